// Model sections of the decay study, one of every kind: how a decay is made, by channel or by head,
// shared keys, positions, the delta rule.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ebb::testing {

inline std::vector<nlohmann::json> decay_study_grid() {
  using nlohmann::json;
  std::vector<json> all;
  const auto add = [&](json decay, json fields = json::object()) {
    fields["model_type"] = "decay_study";
    fields["decay"] = decay;
    all.push_back(fields);
  };
  const json rope = {{"rpe", "rope"}}, tpe = {{"rpe", "tpe"}}, dplr = {{"token_mixer", "dplr"}};
  for (const char* g : {"vector", "scalar"}) {
    for (const char* type : {"mamba2", "mamba2_noA", "mamba2_noDelta", "mamba2_noA_noDelta", "gla",
                             "hgrn2", "lightnet", "lssp", "simple"})
      add({{"type", type}, {"granularity", g}});
    add({{"type", "gla"}, {"granularity", g}, {"gla_rule", "scaled"}});
    for (const char* type : {"mamba2", "lightnet", "simple"}) {
      add({{"type", type}, {"granularity", g}}, rope);
      add({{"type", type}, {"granularity", g}}, dplr);
    }
    add({{"type", "simple"}, {"granularity", g}}, {{"rpe", "rope"}, {"token_mixer", "dplr"}});
    add({{"type", "lightnet"}, {"granularity", g}}, tpe);
    add({{"type", "simple"}, {"granularity", g}}, tpe);
  }
  for (const char* type : {"mamba2", "gla", "hgrn2", "lightnet", "lssp", "simple"})
    add({{"type", type}, {"share", true}});
  for (const char* type : {"tnl", "tnl_l"}) {
    add({{"type", type}});
    add({{"type", type}}, {{"rpe", "rope"}, {"rope_form", "cosine"}});
  }
  add({{"type", "lightnet"}, {"granularity", "scalar"}},
      {{"rpe", "rope"}, {"rope_form", "cosine"}});
  add({{"type", "simple"}, {"granularity", "scalar"}},
      {{"rpe", "rope"}, {"rope_form", "cosine"}, {"token_mixer", "dplr"}});
  add({{"type", "tnl"}}, tpe);
  add({{"type", "simple"}, {"share", true}}, tpe);
  add({{"type", "gla"}, {"granularity", "scalar"}}, {{"rpe", "tpe"}, {"token_mixer", "dplr"}});
  return all;
}

// Letters and digits of a model section, as a test's name.
inline std::string section_name(const nlohmann::json& fields) {
  std::string name;
  for (const auto& [key, value] : fields.items()) {
    if (!name.empty()) name += '_';
    if (value.is_object())
      name += section_name(value);
    else if (value.is_string())
      name += value.get<std::string>();
    else
      name += value == true ? key : key + "_" + value.dump();
  }
  std::string out;
  for (const char c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_') out += c;
  return out;
}

}  // namespace ebb::testing

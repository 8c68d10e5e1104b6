// ModelConfig: what a model is. Field names are those of the public library's config.json, which
// is read leniently (unknown fields are kept and written back); a recipe's model section is strict.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ebb {

// How a model of the decay study makes its decays (models/decay_study.h).
struct DecayConfig {
  DecayConfig();  // not inline: GCC 12 would warn of strings that are not initialised

  std::string type = "simple";
  bool by_channel = true;   // "granularity": vector or scalar
  bool share = false;       // the key is what the decay leaves
  double threshold = 0.99;  // p of simple
  bool scaled = false;      // "gla_rule": scaled, logsigmoid(u/16), or root, logsigmoid(u)/16
};

struct ModelConfig {
  std::string model_type = "gated_deltanet";
  int64_t vocab_size = 32000;
  int64_t hidden_size = 512;
  int64_t num_hidden_layers = 18;
  int64_t num_heads = 6;
  std::optional<int64_t> num_v_heads = {};  // default: num_heads
  int64_t head_dim = 64;
  double expand_v = 2;
  int64_t conv_size = 4;
  bool use_short_conv = true;
  bool use_gate = true;
  bool allow_neg_eigval = false;
  bool safe_gate = false;                  // kda: asks for the bounded gate
  std::optional<double> lower_bound = {};  // kda: of the bounded gate; absent: softplus gate
  int64_t hidden_ratio = 4;
  std::optional<int64_t> intermediate_size = {};  // default: from hidden_ratio
  double norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool use_l2warp = false;
  std::string hidden_act = "swish";
  // mamba2
  int64_t state_size = 128, n_groups = 1, expand = 2;
  bool use_conv_bias = true, use_bias = false;
  bool rmsnorm = true, norm_before_gate = false;
  int64_t chunk_size = 256;                  // only rounding depends on it
  double dt_limit_low = 0;                   // limits of the step, "dt_limit"
  std::optional<double> dt_limit_high = {};  // null: none
  bool residual_in_fp32 = false;             // the residual stream, beside bf16 activations
  bool rescale_prenorm_residual = true;      // initialisation of out_proj
  std::string weight_init = "fla";           // or mamba_ssm (models/mamba2.h)
  // dart, beside mamba2's
  bool use_sma = true;          // false: Mamba-2 with the same weights, read-out left out
  int64_t sma_chunk = 256;      // S, tokens of a memory
  bool sma_normalize = true;    // of queries, verifiers and the memories' rows
  bool sma_shared_read = true;  // read memories with the scan's C, not a vector of their own
  double sma_eps = 1e-6, sma_eps_row = 1e-12;
  // gla, hgrn2, lightnet, retnet (models/config_attention.h)
  double expand_k = 1;
  double gate_logit_normalizer = 16;
  std::optional<double> clamp_min = {};  // of gla's log decays
  bool use_output_gate = true;           // gla, retnet
  bool elementwise_affine = true;        // a weight of the mixers' norms
  int64_t expand_ratio = 128;            // key channels of a head
  bool use_lower_bound = true;
  // transformer; num_kv_heads also of gla, retnet
  std::optional<int64_t> num_kv_heads = {};  // default: num_heads
  bool qk_norm = false, qkv_bias = false;
  std::optional<int64_t> window_size = {};
  double rope_theta = 10000;
  int64_t max_position_embeddings = 4096;  // kept, not a limit
  // decay_study
  DecayConfig decay = {};
  std::string rpe = "none";            // or rope, tpe
  bool rope_cosine = false;            // "rope_form" of decays per head: cosine, or rotate
  std::string token_mixer = "linear";  // or dplr

  // rwkv7 (gate_low_rank_dim also of gla, lightnet): ranks of low-rank products; norms of LayerNorm
  // kind
  int64_t decay_low_rank_dim = 64, gate_low_rank_dim = 128, a_low_rank_dim = 64;
  int64_t v_low_rank_dim = 16;
  bool norm_first = true, norm_bias = true;
  bool frozen_decay_scale = false;  // exp(A_log) per head in place of the native e^{-1/2}

  // Everything a foreign config.json held, so that it is written back whole.
  nlohmann::json source = nlohmann::json::object();

  bool is_dart() const { return model_type == "dart"; }
  bool is_mamba2() const { return model_type == "mamba2" || is_dart(); }  // its blocks
  bool is_rwkv7() const { return model_type == "rwkv7"; }
  int64_t v_heads() const { return num_v_heads.value_or(num_heads); }
  int64_t v_dim() const;  // per head
  int64_t key_heads() const { return num_kv_heads.value_or(num_heads); }
  // decay_study: rope in the form that doubles the keys, the only one for decays per channel.
  bool cosine_rope() const { return rpe == "rope" && (decay.by_channel || rope_cosine); }
  int64_t gla_key_width() const;    // of all heads: hidden_size·expand_k
  int64_t gla_value_width() const;  // hidden_size·expand_v
  int64_t mlp_width() const;        // intermediate_size, or the multiple-of-256 rule
  nlohmann::json to_json() const;   // source, with these fields set
};

// Strict: every unknown field or bad value is an error, all reported at once. `what` names the
// file in the message; `path` is the JSON path of the object.
ModelConfig parse_model_config(const nlohmann::json& object, const std::string& path,
                               const std::string& what);
// Lenient: unknown fields are kept. A field that changes the computation and is not supported is
// an error that names it.
ModelConfig parse_foreign_config(const nlohmann::json& object, const std::string& file);

// The values of model_type that this version implements.
const std::vector<std::string>& model_types();

// "gdn-100m" and friends; throws with the list of names when there is none.
ModelConfig preset(const std::string& name);
std::vector<std::string> preset_names();

}  // namespace ebb

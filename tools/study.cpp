#include "tools/study.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "models/config_reader.h"
#include "tensor/check.h"
#include "tensor/file.h"
#include "tensor/notice.h"
#include "tools/commands.h"
#include "tools/recipe.h"
#include "tools/version.h"

namespace ebb::tools {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kStates[] = {"waiting", "running", "stopped", "done", "failed"};

json to_json(const StudyRun& r) {
  json j = {{"name", r.name},       {"recipe", r.recipe},
            {"file", r.file},       {"seed", r.seed},
            {"set", r.set},         {"state", state_name(r.state)},
            {"trained", r.trained}, {"evaluated", r.evaluated},
            {"steps", r.steps},     {"attempts", r.attempts},
            {"seconds", r.seconds}};
  if (r.state == RunState::failed) j["error"] = r.error;
  if (r.state == RunState::running) j["pid"] = r.pid;
  return j;
}

StudyRun from_json(const json& j, const std::string& file) {
  StudyRun r;
  try {
    r = {.name = j.at("name"),
         .recipe = j.at("recipe"),
         .file = j.at("file"),
         .seed = j.at("seed"),
         .set = j.at("set"),
         .error = j.value("error", ""),
         .trained = j.at("trained"),
         .evaluated = j.at("evaluated"),
         .steps = j.at("steps"),
         .attempts = j.at("attempts"),
         .seconds = j.at("seconds")};
    const std::string state = j.at("state");
    const auto known = std::find(std::begin(kStates), std::end(kStates), state);
    check(known != std::end(kStates), "study: {}: state {} of {}", file, state, r.name);
    r.state = RunState(known - std::begin(kStates));
  } catch (const json::exception& e) {
    fail("study: {}: {}", file, json_problem(e));
  }
  if (r.state == RunState::running) r.state = RunState::stopped;  // with whoever wrote this
  return r;
}

// Whether the process that a lock is of has ended; one that has just begun has not written its id.
bool ended(const std::string& pid_file) {
  if (!fs::exists(pid_file)) return false;
  const long pid = std::atol(read_file(pid_file).c_str());
  return pid > 0 && kill(pid_t(pid), 0) != 0 && errno == ESRCH;
}

// The recipes' names in a study, by file. One keeps the name it has there; a new one is called by
// its file, with as many folders before it as tell it from those that are called so already, or
// that are new like it. A study that was moved, without the files it knew, takes those of the same
// name for them.
class RecipeNames {
 public:
  RecipeNames(const std::vector<StudyRun>& known, const std::vector<fs::path>& files) {
    for (const StudyRun& r : known) names_[r.file] = r.recipe, taken_.insert(r.recipe);
    std::map<std::string, std::set<fs::path>> alike;
    for (const fs::path& f : files)
      if (!names_.count(f.string()) && !moved(f)) alike[f.stem().string()].insert(f);
    for (const auto& [stem, same] : alike)
      for (const fs::path& f : same) add(f, same.size() == 1 ? 0 : 1);
  }
  const std::string& of(const fs::path& file) const { return names_.at(file.string()); }

 private:
  bool moved(const fs::path& file) {
    std::set<std::string> candidates, nearer;
    for (const auto& [known, name] : names_) {
      const fs::path k = known;
      if (k.filename() != file.filename() || fs::exists(k)) continue;
      candidates.insert(name);
      if (k.parent_path().filename() == file.parent_path().filename()) nearer.insert(name);
    }
    const std::set<std::string>& found = nearer.size() == 1 ? nearer : candidates;
    if (found.size() != 1) return false;
    names_[file.string()] = *found.begin();
    return true;
  }
  void add(const fs::path& file, int folders) {
    std::string name = file.stem().string();
    fs::path above = file.parent_path();
    for (; (folders > 0 || taken_.count(name)) && above.has_filename(); --folders) {
      name = above.filename().string() + "-" + name;
      above = above.parent_path();
    }
    std::string unique = name;
    for (int i = 2; taken_.count(unique); ++i) unique = fmt::format("{}~{}", name, i);
    taken_.insert(unique);
    names_[file.string()] = unique;
  }
  std::map<std::string, std::string> names_;
  std::set<std::string> taken_;
};

std::vector<fs::path> recipe_files(const std::vector<std::string>& given) {
  std::vector<fs::path> out;
  for (const std::string& g : given) {
    check(fs::is_regular_file(g), "study: there is no recipe {}", g);
    const fs::path file = fs::canonical(g);
    if (std::find(out.begin(), out.end(), file) == out.end()) out.push_back(file);
  }
  return out;
}

std::vector<std::string> settings(const StudyOptions& o, uint64_t seed) {
  std::vector<std::string> set = o.set;
  set.push_back(fmt::format("seed={}", seed));
  set.push_back(fmt::format("init.seed={}", seed));
  return set;
}

}  // namespace

const char* state_name(RunState state) { return kStates[size_t(state)]; }

Study::Study(std::string out) : out_(std::move(out)) {
  make_folders(out_);
  lock();
  load();
}

Study::~Study() {
  if (lock_ < 0) return;
  if (!fs::exists(out_ + "/study.json")) fs::remove(out_ + "/.lock");  // nothing came of it
  close(lock_);
}

void Study::lock() {
  const std::string file = out_ + "/.lock";
  for (bool told = false;; told = true) {
    lock_ = open(file.c_str(), O_RDWR | O_CREAT, 0666);  // not O_CLOEXEC: runs keep it
    check(lock_ >= 0, "study: cannot write {}: {}", file, std::strerror(errno));
    const bool mine = flock(lock_, LOCK_EX | LOCK_NB) == 0;
    struct stat held = {}, there = {};
    if (mine && fstat(lock_, &held) == 0 && stat(file.c_str(), &there) == 0 &&
        held.st_ino == there.st_ino)
      break;
    close(lock_);
    lock_ = -1;
    if (mine) continue;  // removed meanwhile by the one that had it
    check(ended(file), "study: another `ebb study` is at work in {}", out_);
    if (!told) notice(fmt::format("waiting for the runs that a killed study left in {}\n", out_));
    usleep(100'000);
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  const bool written =
      ftruncate(lock_, 0) == 0 && pwrite(lock_, pid.data(), pid.size(), 0) == ssize_t(pid.size());
  check(written, "study: cannot write {}: {}", file, std::strerror(errno));
}

void Study::load() {
  const std::string file = out_ + "/study.json";
  if (!fs::exists(file)) return;
  const json j = read_json(file);
  check(j.is_object() && j.value("command", "") == "study" && j.contains("runs") &&
            j["runs"].is_array(),
        "study: {} was not written by `ebb study`", file);
  for (const json& r : j["runs"]) runs.push_back(from_json(r, file));
}

void Study::save() const {
  json list = json::array();
  for (const StudyRun& r : runs) list.push_back(to_json(r));
  const json j = {
      {"command", "study"}, {"ebb", version_number()}, {"commit", commit()}, {"runs", list}};
  write_file_atomically(out_ + "/study.json", j.dump(1) + "\n");
}

std::vector<size_t> Study::plan(const StudyOptions& o) {
  const std::vector<fs::path> files = recipe_files(o.recipes);
  const RecipeNames names(runs, files);
  std::vector<Device> devices;
  for (const std::string& d : o.devices) devices.push_back(usable_device(d));
  std::vector<StudyRun> all = runs;
  std::vector<size_t> mine;
  std::set<std::string> problems;  // those of several seeds once
  for (const uint64_t seed : o.seeds)
    for (const fs::path& f : files) {
      const std::string name = fmt::format("{}-s{}", names.of(f), seed);
      try {
        TrainConfig c = read_recipe(f, settings(o, seed));
        c.out = out_ + "/" + name;
        for (const Device d : devices) check_trainable(c, f, d);
        if (const std::string before = c.out + "/recipe.json"; fs::exists(before)) {
          const std::string differs = recipe_difference(before, c);
          check(differs.empty(),
                "{}: {} was made with other settings (different: {}); choose another --out",
                f.string(), c.out, differs);
        }
        auto known =
            std::find_if(all.begin(), all.end(), [&](const auto& r) { return r.name == name; });
        if (known == all.end())
          known = all.insert(known, {.name = name, .recipe = names.of(f), .file = f, .seed = seed});
        known->file = f;
        known->set = o.set;
        known->steps = c.steps;
        mine.push_back(size_t(known - all.begin()));
      } catch (const Error& e) {
        const std::string what = e.what(), file = f.string();
        problems.insert(what.find(file) == std::string::npos ? file + ": " + what : what);
      }
    }
  check(problems.empty(), "study: nothing is started:\n  {}", fmt::join(problems, "\n  "));
  runs = std::move(all);
  return mine;
}

std::vector<std::string> train_arguments(const Study& study, const StudyRun& run,
                                         const std::string& device) {
  StudyOptions o;
  o.set = run.set;
  std::vector<std::string> out = {"train", run.file, "--resume", "--quiet", "--device", device};
  for (const std::string& s : settings(o, run.seed)) out.insert(out.end(), {"--set", s});
  out.insert(out.end(), {"--set", "out=" + json(study.folder(run)).dump()});
  return out;
}

}  // namespace ebb::tools

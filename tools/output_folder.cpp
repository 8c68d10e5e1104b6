#include "tools/output_folder.h"

#include "tensor/check.h"
#include "tensor/file.h"
#include "tools/commands.h"

namespace ebb::tools {

namespace fs = std::filesystem;

fs::path new_folder(const std::string& name, bool overwrite, const char* command) {
  if (name.empty()) throw UsageError("--out names no folder");
  fs::path out = fs::absolute(name).lexically_normal();
  if (!out.has_filename()) out = out.parent_path();
  check(!fs::exists(out) || overwrite, "{}: {} exists already; --overwrite replaces it", command,
        out.string());
  check(!fs::exists(out) || fs::is_directory(out), "{}: {} is not a folder", command, out.string());
  return out;
}

void copy_other_files(const fs::path& from, const fs::path& to) {
  const auto stays = [](const std::string& name) {
    for (const char* end : {".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json",
                            ".pt", ".pth", ".ckpt"})
      if (name.ends_with(end)) return true;
    for (const char* own : {"config.json", "init.json", "loop.json", "checksums.json"})
      if (name == own) return true;
    return false;
  };
  for (const auto& f : fs::directory_iterator(from))
    if (const std::string name = f.path().filename().string(); f.is_regular_file() && !stays(name))
      write_file_atomically((to / name).string(), read_file(f.path().string()));
}

void publish(const fs::path& staged, const fs::path& out) {
  if (fs::exists(out)) fs::rename(out, staged.parent_path() / "replaced");
  fs::rename(staged, out);
  sync_folder(out.parent_path().string());
}

}  // namespace ebb::tools

// Model folders that a command writes: whole or not at all.
//   const fs::path out = new_folder(options.out, options.overwrite, "init");
//   const TemporaryFolder staging(out.parent_path(), out.filename().string());
//   ... write staging.path() / "model" ...
//   publish(staging.path() / "model", out);
#pragma once
#include <filesystem>
#include <string>

namespace ebb::tools {

// `out` as an absolute path. Throws where there is something that must not be replaced.
std::filesystem::path new_folder(const std::string& out, bool overwrite, const char* command);

// Copies what else a model folder holds (tokenizer, generation settings): neither weights nor
// config, nor what ebb keeps of training beside them.
void copy_other_files(const std::filesystem::path& from, const std::filesystem::path& to);

// Renames the finished folder, in a temporary one, to `out`, in exchange for the one there may be.
void publish(const std::filesystem::path& staged, const std::filesystem::path& out);

}  // namespace ebb::tools

// ebb: one binary, a subcommand per job.
#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>

#include "tensor/error.h"
#include "tensor/file.h"
#include "tensor/notice.h"
#include "tools/commands.h"
#include "tools/version.h"

namespace ebb::tools {
namespace {

void add_commands(CLI::App& app) {
  for (const auto add :
       {add_tokenize, add_init, add_convert, add_train, add_study, add_demo_data, add_eval,
        add_generate, add_mqar, add_report, add_inspect, add_verify, add_bench, add_gradcheck})
    add(app);
}

// CLI11 clamps what is too large, takes -1 for an unsigned number and reads 010 as eight.
std::string whole_number(const std::string& text, uint64_t most) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (whole && value <= most && (text[0] != '0' || text.size() == 1)) return "";
  return fmt::format("want a whole number from 0 to {}, got '{}'", most, text);
}

void check_whole_numbers(CLI::App& app) {
  for (CLI::Option* o : app.get_options()) {
    const std::string type = o->get_type_name();
    if (!type.starts_with("INT") && !type.starts_with("UINT")) continue;
    const uint64_t most = type[0] == 'U' ? UINT64_MAX : uint64_t(INT64_MAX);
    o->check(CLI::Validator([most](std::string& text) { return whole_number(text, most); }, ""));
  }
  for (CLI::App* c : app.get_subcommands([](const CLI::App*) { return true; }))
    check_whole_numbers(*c);
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* c : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(c->get_name());
  return names;
}

int complain(const std::string& what, int code) {
  std::string line = what;
  for (char& c : line)
    if (c == '\n') c = ' ';
  notice(fmt::format("ebb: error: {}\n", line));
  return code;
}

// "PATH: reason", without the library's words around it.
std::string file_problem(const std::filesystem::filesystem_error& e) {
  const std::string path = e.path1().empty() ? "a file without a name" : e.path1().string();
  const std::string other = e.path2().empty() ? "" : " and " + e.path2().string();
  return fmt::format("{}{}: {}", path, other, e.code().message());
}

// What was printed has arrived, or it is said that it has not (a full disk behind a redirection).
int finish(int code) {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return code;
  return complain(fmt::format("cannot write to standard output: {}", std::strerror(errno)),
                  kExitFailure);
}

// "" when argv names a command or none; else what to say.
std::string unknown_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return "";
  const std::string word = argv[1];
  const std::vector<std::string> names = command_names(app);
  if (std::find(names.begin(), names.end(), word) != names.end()) return "";
  const std::string guess = closest(word, names);
  return fmt::format("unknown command '{}'{}; `ebb --help` lists them all", word,
                     guess.empty() ? "" : fmt::format(", did you mean '{}'?", guess));
}

int run(int argc, char** argv) {
  CLI::App app("ebb builds, trains and studies language models with a fading recurrent state.",
               "ebb");
  app.set_version_flag("--version", version_text, "Show version, features and what is missing");
  app.get_formatter()->column_width(34);
  app.failure_message([](const CLI::App*, const CLI::Error& e) { return std::string(e.what()); });
  add_commands(app);
  check_whole_numbers(app);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n  ebb --version\n  ebb COMMAND --help\n"
      "Exit codes: 0 ok, 1 failure, 2 wrong usage.");
  if (const std::string what = unknown_command(app, argc, argv); !what.empty())
    return complain(what, kExitUsage);
  const NewFolders made;
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    return finish(app.exit(e));
  } catch (const CLI::ParseError& e) {
    // CLI11 reports what is missing before what it did not understand, the likelier mistake.
    const std::vector<std::string> extra = app.remaining(true);
    if (e.get_name() == "RequiredError" && !extra.empty())
      return complain(fmt::format("'{}' was not expected", extra.front()), kExitUsage);
    return complain(e.what(), kExitUsage);
  } catch (const UsageError& e) {
    return complain(e.what(), kExitUsage);
  } catch (const Exit& e) {
    return finish(e.code);
  } catch (const std::filesystem::filesystem_error& e) {
    return complain(file_problem(e), kExitFailure);
  } catch (const std::bad_alloc&) {
    return complain("out of memory", kExitFailure);
  } catch (const std::exception& e) {
    return complain(e.what(), kExitFailure);
  }
  return finish(0);
}

// Of the standard streams those that the caller closed are opened for nothing: a file must not take
// their number and get what is printed.
void hold_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd)
    if (::fcntl(fd, F_GETFD) == -1 && ::open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd)
      std::abort();
}

}  // namespace
}  // namespace ebb::tools

int main(int argc, char** argv) {
  ebb::tools::hold_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond ulimit -f fails and is reported
  return ebb::tools::run(argc, argv);
}

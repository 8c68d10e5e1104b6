// ebb train killed at random moments always resumes, bit-identical to the run left alone.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "models/tokenizer.h"
#include "tensor/check.h"
#include "tensor/compare.h"
#include "tensor/file.h"
#include "tensor/folder_lock.h"
#include "tensor/random.h"
#include "tensor/safetensors.h"
#include "tests/cli.h"
#include "tests/model_folder.h"
#include "tests/temporary_folder.h"
#include "train/shards.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;

class KillTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ShardWriter w(folder_ + "/text", Tokenizer::bytes().vocab_hash(), 257);
    for (uint64_t i = 0; i < 400; ++i) {
      std::vector<int64_t> ids;
      for (uint64_t j = 0; j < 40; ++j) ids.push_back(97 + random_word({1, i}, j) % 8);
      ids.push_back(256);
      w.add(ids);
    }
    w.finish();
    nlohmann::json recipe = testing::small_recipe(folder_ + "/text");
    recipe["model"]["num_hidden_layers"] = 2;
    recipe.update({{"steps", 30}, {"log_every", 1}});
    write_file_atomically(folder_ + "/recipe.json", recipe.dump());
  }
  pid_t start(const std::string& out) const {
    const pid_t pid = fork();
    if (pid == 0) {
      if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(126);
      const std::string recipe = folder_ + "/recipe.json", set = "out=" + folder_ + "/" + out;
      execl(EBB_BINARY, "ebb", "train", recipe.c_str(), "--resume", "--device", "cpu", "--quiet",
            "--set", set.c_str(), nullptr);
      _exit(127);
    }
    return pid;
  }
  static int finish(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return status;
  }
  // What a run logged, times left out.
  std::string log(const std::string& out) const {
    std::ifstream in(folder_ + "/" + out + "/metrics.jsonl");
    std::string all;
    for (std::string line; std::getline(in, line);) {
      nlohmann::json j = nlohmann::json::parse(line);
      j.erase("tokens_per_second");
      all += j.dump() + "\n";
    }
    return all;
  }

  testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(KillTest, TwentyKillsChangeNothing) {
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(finish(start("whole")), 0);
  double whole = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  int killed = 0;
  for (uint64_t i = 0; i < 20; ++i) {
    const pid_t pid = start("killed");
    const double share = uniform_open(random_word({9, 9}, i));
    std::this_thread::sleep_for(std::chrono::duration<double>(0.4 * whole * share));
    kill(pid, SIGKILL);
    if (WIFSIGNALED(finish(pid))) {
      ++killed;
    } else if (killed <= 3) {  // faster than the first run, where others use the machine
      fs::remove_all(folder_ + "/killed");
      whole /= 2;
    }
  }
  EXPECT_GT(killed, 3);  // the later ones may find the run complete
  ASSERT_EQ(finish(start("killed")), 0);
  EXPECT_EQ(log("killed"), log("whole"));
  const SafeTensors a(folder_ + "/whole/final/model.safetensors"),
      b(folder_ + "/killed/final/model.safetensors");
  for (const std::string& n : a.names()) EXPECT_TRUE(bitwise_equal(a.get(n), b.get(n))) << n;
  for (const auto& e : fs::directory_iterator(folder_ + "/killed"))
    EXPECT_FALSE(e.path().filename().string().starts_with(".")) << e.path();
}

TEST_F(KillTest, SignalsWriteACheckpointAndExitZero) {
  ASSERT_EQ(finish(start("whole")), 0);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    fs::remove_all(folder_ + "/stopped");
    const pid_t pid = start("stopped");
    while (!fs::exists(folder_ + "/stopped/metrics.jsonl")) usleep(1000);
    kill(pid, signal);
    EXPECT_EQ(finish(pid), 0) << signal;
    ASSERT_EQ(finish(start("stopped")), 0);
    EXPECT_EQ(log("stopped"), log("whole")) << signal;
  }
}

TEST_F(KillTest, AFolderHasOneWriter) {
  const std::string out = folder_ + "/held";
  make_folders(out);
  {
    const FolderLock lock(out);
    EXPECT_EQ(WEXITSTATUS(finish(start("held"))), 1);
    EXPECT_TRUE(fs::is_empty(out));
    const testing::CliResult r =
        testing::run_ebb("train " + folder_ + "/recipe.json --device cpu --set out=" + out);
    EXPECT_NE(r.err.find("held: another process is writing there"), std::string::npos) << r.err;
  }
  EXPECT_EQ(finish(start("held")), 0);
  const FolderLock lock(out);
  const testing::CliResult r = testing::run_ebb("eval --task perplexity --model " + out +
                                                " --tokens " + folder_ + "/text --out " + out);
  EXPECT_EQ(r.code, 1);
  EXPECT_NE(r.err.find("held: another process is writing there"), std::string::npos) << r.err;
}

}  // namespace
}  // namespace ebb

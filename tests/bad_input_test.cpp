// Bad input to every command: one clear line on standard error, the exit code, nothing left behind.
#include "tests/bad_input.h"

namespace ebb::testing {
namespace {

TEST_F(BadInput, Tokenize) {
  expect_refused({
      {"tokenize @/none.txt --tokenizer bytes --out @/out/t", 1, "none.txt does not exist"},
      {"tokenize @/folder --tokenizer bytes --out @/out/t", 1, "folder is not a file"},
      {"tokenize @/empty.txt --tokenizer bytes --out @/out/t", 1, "no text in the input"},
      {"tokenize @/lines.jsonl --tokenizer bytes --out @/out/t", 1, "lines.jsonl:2: not a JSON"},
      {"tokenize @/lines.jsonl --field txt --tokenizer bytes --out @/out/t", 1,
       "lines.jsonl:1: field \"txt\" is missing"},
      {"tokenize @/text.txt --tokenizer @/none --out @/out/t", 1, "/none: No such file"},
      {"tokenize @/text.txt --tokenizer @/folder --out @/out/t", 1,
       "holds neither tokenizer.model"},
      {"tokenize @/text.txt --tokenizer @/text.txt --out @/out/t", 1,
       "text.txt is not a SentencePiece model"},
      {"tokenize @/text.txt --tokenizer @/m_tokenizer --out @/out/t", 1, "not one that ebb reads"},
      {"tokenize @/text.txt --tokenizer @/m_tokenizer_broken --out @/out/t", 1,
       "tokenizer.json is not valid JSON: line 1"},
      {"tokenize @/text.txt --tokenizer bytes --out @/file/t", 1, "file"},
      {"tokenize @/text.txt --tokenizer bytes", 2, "--out is required"},
      {"tokenize @/loop --tokenizer bytes --out @/out/t", 1, "loop.*symbolic links"},
      {"tokenize @/text.txt --tokenizer bytes --out @/file/below/t", 1,
       "cannot make the folder .*file/below.*a part of the path is a file"},
      {"tokenise @/text.txt", 2, "did you mean 'tokenize'"},
  });
}

TEST_F(BadInput, Init) {
  expect_refused({
      {"init --model @/none --scheme post --out @/out/m", 1, "neither a model folder nor a preset"},
      {"init --model gdn-10m --scheme post --out @/out/m", 1, "did you mean gdn-100m"},
      {"init --model @/folder --scheme post --out @/out/m", 1, "folder/config.json"},
      {"init --model @/m_cut --scheme post --out @/out/m", 1, "cut short or damaged"},
      {"init --model @/model --scheme posts --out @/out/m", 2, "posts"},
      {"init --model @/model --scheme dami --out @/out/m", 2, "--tokens"},
      {"init --model @/model --scheme dami --tokens @/none --out @/out/m", 1, "no shard .*none"},
      {"init --model @/model --scheme dami --tokens @/text.txt --out @/out/m", 2, "--tokenizer"},
      {"init --model @/model --scheme dami --tokens @/text.txt --tokenizer bytes --out @/out/m", 1,
       "gives 4001 tokens, 8 x 4096 are asked for"},
      {"init --model @/m_narrow --scheme dami --tokens @/data/text --out @/out/m", 1,
       "a vocabulary of 257, and the model's has 100"},
      {"init --model @/model --scheme dami --tokens @/data/text --set dami.taumax=9 --out @/out/m",
       2, "/init/dami/taumax: unknown; did you mean tau_max"},
      {"init --model @/model --scheme post --out @/model", 1, "model exists already"},
      {"init --model @/model --scheme post --out @/file/m", 1, "file"},
      {"init --model @/model --scheme post --out ''", 2, "--out names no folder"},
      {"init --model @/model --scheme post --set post_length=0 --out @/out/m", 2,
       "/init/post_length: must lie in"},
      {"init --model @/model --scheme dami --tokens @/data/text --set dami.tau_max=0 --out @/out/m",
       2, "/init/dami/tau_max: must lie in"},
      {"init --model @/model --scheme dami --tokens @/data/other --out @/out/m", 1,
       "other-00000.bin was made with another tokenizer"},
      {"init --model @/model --scheme dami --tokens @/data/flipped --length 16 --out @/out/m", 1,
       "flipped-00000.bin is damaged"},
  });
}

TEST_F(BadInput, TrainRecipes) {
  expect_refused({
      {"train @/none.json", 1, "cannot read .*none.json: No such file"},
      {"train @/folder", 1, "cannot read .*folder: Is a directory"},
      {"train @/broken.json", 1, "broken.json is not valid JSON: line 3, column"},
      {"train @/text.txt", 1, "text.txt is not valid JSON: line 1"},
      {"train @/no_data.json", 1, "/data/train names no shards"},
      {"train @/number.json", 1, "number.json is not valid JSON: .*1e400"},
      {"train @/twice.json", 1, "twice.json: the key \"steps\" appears twice in one object"},
      {"train @/deep.json", 1, "deep.json is nested too deeply"},
      {"train @/zero.json", 1, "zero.json is not valid JSON: line 2, column 2: a byte 0"},
      // All mistakes at once, each with its path.
      {"train @/unknown.json", 1, "/model/n_heads: unknown; did you mean num_heads"},
      {"train @/unknown.json --set model.n_heads=null", 1, "n_heads"},
      {"train @/recipe.json --set optim.warmpu=1 --set step=3", 1,
       "2 mistakes .*/optim/warmpu: unknown; did you mean warmup\\?.*/step: unknown; did you mean "
       "steps\\?"},
      {"train @/recipe.json --set optim.lr=fast", 1, "/optim/lr: want a number, got \"fast\""},
      {"train @/recipe.json --set steps=-1", 1, "/steps: must be at least 0"},
      {"train @/recipe.json --set steps=1e300", 1, "/steps: want a whole number"},
      {"train @/recipe.json --set steps=99999999999999999999", 1, "/steps"},
      {"train @/recipe.json --set init.scheme=damy", 1, "did you mean dami"},
      {"train @/recipe.json --device cpu --set init.scheme=post --set 'model={\"model_type\": "
       "\"gla\", \"vocab_size\": 257, \"num_heads\": 2, \"hidden_size\": 32}'",
       1, "/init/scheme sets decay gates, and the layers of a gla have none .*want random"},
      // What is not used by this run is checked too.
      {"train @/recipe.json --set init.dami.tau_min=-1 --set optim.beta1=1 --set optim.eps=0", 1,
       "3 mistakes .*/init/dami/tau_min: must.*/optim/beta1: must.*/optim/eps: must"},
      {"train @/recipe.json --set model.num_hidden_layers=1000000000000", 1,
       "/model/num_hidden_layers: must be at most 10000"},
      {"train @/recipe.json --set model.model_type=gated_delta", 1, "did you mean gated_deltanet"},
      {"train @/recipe.json --set 'model={\"model_type\": \"dart\", \"sma_chunk\": 0, "
       "\"sma_sharedread\": true, \"state_size\": 512}'",
       1,
       "3 mistakes .*/model/state_size: must be at most 256, got 512.*/model/sma_chunk: must lie "
       "in .*got 0.*/model/sma_sharedread: unknown; did you mean sma_shared_read"},
      {"train @/recipe.json --set 'model={\"preset\": \"dart-130\"}'", 1, "did you mean dart-130m"},
      {"train @/recipe.json --set 'model={\"model_type\": \"dartt\"}'", 1, "did you mean dart"},
      {"train @/recipe.json --set nothing", 1, "--set nothing: want path=value"},
      {"train @/recipe.json --set steps.deep=1", 1, "--set steps.deep=1"},
      {"train @/recipe.json --device gpu", 2, "device 'gpu'"},
      {"train @/recipe.json --device cpu --set dtype=bf16", 1, "bf16 needs a GPU"},
      {"train", 2, "recipe is required"},
  });
}

TEST_F(BadInput, TrainDataAndFolders) {
  const std::string cpu = "train @/recipe.json --device cpu --quiet ";
  std::vector<std::pair<std::string, const char*>> cases = {
      {"--set data.train='[\"@/data/none\"]'", "no shard .*none"},
      {"--set data.train='[\"@/folder\"]'", "no shard .*folder"},
      {"--set data.train='[\"@/text.txt\"]'", "text.txt is not a token shard"},
      {"--set data.train='[\"@/empty.txt\"]'", "empty.txt has 0 bytes"},
      {"--set data.train='[\"@/data/short\"]'", "short-00000.bin .*truncated or damaged"},
      {"--set data.train='[\"@/data/flipped\"]'", "flipped-00000.bin is damaged .checksum"},
      {"--set data.train='[\"@/data/vocabulary\"]'", "vocab_size 257 is less than the 25601"},
      {"--set data.train='[\"@/data/gap\"]'", "gap-00001.bin is missing, .*gap-00002.bin is there"},
      {"--set data.train='[\"@/data/other\"]'", "other-00000.bin was tokenized with another"},
      {"--set data.validation='[\"@/data/other\"]'", "other-00000.bin was tokenized with another"},
      {"--set data.validation='[\"@/data/flipped\"]'", "flipped-00000.bin is damaged"},
      {"--set length=100000", "too few for one window"},
      {"--set init.scheme=dami --set init.calibration_length=100000",
       "calibration: the stream has 4001 tokens"},
      {"--set data.tokenizer=@/none", "/none: No such file"},
      {"--set model.vocab_size=100", "vocab_size 100 is less than the 257 of .*text-00000.bin"},
      {"--set model='{\"folder\": \"@/none\"}'", "none: there is no such model folder"},
      {"--set model='{\"folder\": \"@/m_narrow\"}'", "vocab_size 100 is less than"},
      {"--set model='{\"folder\": \"@/m_cut\"}'", "cut short or damaged"},
      {"--set model='{\"preset\": \"gdn-1b\"}'", "preset 'gdn-1b' does not exist"},
      {"--set out=@/file", "file"},
      {"--set out=@/file/run", "file"},
      {"--set out=", "names no run folder"},
      {"--set out=@/run", "holds checkpoints already; give --resume"},
      {"--resume --set out=@/run --set optim.lr=1", "different: optim"},
      {"--resume --set out=@/damaged_run", "no checkpoint in .*damaged_run is intact"},
  };
  for (const auto& [more, says] : cases) {
    const std::string command = cpu + more;
    expect_refused({{command.c_str(), 1, says}});
  }
}

TEST_F(BadInput, NoGpu) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU here";
  for (const std::string command :
       {"train @/recipe.json", "generate --model @/model --prompt a", "inspect @/model",
        "init --model @/model --scheme post --out @/out/m", "verify @/cases",
        "eval --model @/model --task perplexity --tokens @/data/text --out @/out/e"}) {
    const std::string on_gpu = command + std::string(" --device cuda");
    expect_refused({{on_gpu.c_str(), 1, "no GPU"}});
  }
}

TEST_F(BadInput, ModelFoldersHoweverTheyAreRead) {
  const std::vector<std::pair<std::string, std::string>> folders = {
      {"m_type", "/model_type: \"gated_deltanets\" is not supported; did you mean gated_deltanet"},
      {"m_word", "/num_heads: want a whole number, got \"two\""},
      {"m_negative", "/num_hidden_layers: must be at least 1"},
      {"m_width", "embeddings.weight"},
      {"m_config", "m_config/config.json is not valid JSON: line 3"},
      {"m_cut", "m_cut/model.safetensors.*cut short or damaged"},
      {"m_text", "m_text/model.safetensors"},
      {"m_missing_tensor", "missing.*model.norm.weight"},
  };
  for (const auto& [folder, says] : folders)
    for (const std::string& command :
         {"inspect @/" + folder, "generate --prompt a --model @/" + folder,
          "init --scheme post --out @/out/m --model @/" + folder})
      expect_refused({{command.c_str(), 1, says.c_str()}});
}

TEST_F(BadInput, Inspect) {
  expect_refused({
      {"inspect @/none", 1, "neither a model folder nor a preset"},
      {"inspect @/file", 1, "neither a model folder nor a preset"},
      {"inspect @/folder", 1, "cannot read .*folder/config.json"},
      {"inspect @/m_no_weights", 1, "m_no_weights/model.safetensors"},
      {"inspect @/model --tokens @/none", 1, "none"},
      {"inspect @/model --tokens @/data/short", 1, "truncated or damaged"},
      {"inspect @/model --tokens @/text.txt --tokenizer bytes --length 0", 2, "want at least 1"},
      {"inspect @/model --json @/file/out.json", 1, "file"},
      {"inspect @/loop", 1, "loop: Too many levels of symbolic links"},
      {"inspect @/m_layers", 1, "/num_hidden_layers: must be at most 10000, got 1000000000000"},
      {"inspect @/m_wide", 1, "/hidden_size: must be at most"},
      {"inspect @/m_deep", 1, "m_deep/config.json is nested too deeply"},
      {"inspect @/model --tokens @/data/flipped --length 16", 1, "flipped-00000.bin is damaged"},
      {"inspect @/model --tokens @/data/other --length 16", 1,
       "other-00000.bin was made with another tokenizer than that of .*model"},
      {"inspect @/model --tokens @/data/text --sequences 9223372036854775807", 2, "tokens at most"},
      {"inspect @/model --json @/folder", 1, "folder: it is a folder"},
  });
}

TEST_F(BadInput, Eval) {
  expect_refused({
      {"eval --model @/none --task perplexity --tokens @/data/text --out @/out/e", 1,
       "there is no folder .*none"},
      {"eval --model @/folder --task perplexity --tokens @/data/text --out @/out/e", 1,
       "holds neither config.json"},
      {"eval --model @/damaged_run --tokenizer bytes --task perplexity --tokens @/data/other "
       "--out @/out/e",
       1, "another tokenizer"},
      {"eval --model @/m_nan --task perplexity --tokens @/data/text --out @/out/e", 1,
       "the loss is -?nan"},
      {"eval --model @/model --task perplexity --tokens @/data/none --out @/out/e", 1, "no shard"},
      {"eval --model @/model --task perplexity --tokens @/data/flipped --out @/out/e", 1,
       "flipped-00000.bin is damaged"},
      {"eval --model @/model --task perplexity --tokens @/data/other --out @/out/e", 1,
       "another tokenizer"},
      {"eval --model @/model --task perplexity --tokens @/data/vocabulary --out @/out/e", 1,
       "vocabulary-00000.bin was made with another tokenizer"},
      {"eval --model @/model --task perplexity --tokens @/data/text --out @/file", 1,
       "cannot make the folder .*file"},
      {"eval --model @/m_no_tokenizer --task perplexity --tokens @/data/text --out @/out/e", 1,
       "holds neither tokenizer.model"},
      {"eval --model @/m_narrow --tokenizer bytes --task perplexity --tokens @/data/text "
       "--out @/out/e",
       1, "100 token ids, its tokenizer 257"},
      {"eval --model @/model --task perplexty --tokens @/data/text --out @/out/e", 2,
       "did you mean perplexity"},
      {"eval --model @/model --task niah_single_1 --lengths 256 --samples 1 --data @/niah "
       "--out @/out/e",
       1, "niah_single_1_256.jsonl:1: field 'input'"},
      {"eval --model @/model --task niah_single_1 --lengths 256 --samples 1 --data @/niah2 "
       "--out @/out/e",
       1, "niah_single_1_256.jsonl:1: not valid JSON"},
      {"eval --model @/model --task niah_single_1 --lengths 1024 --samples 1 --data @/file "
       "--out @/out/e",
       1, "file"},
      {"eval --model @/model --task niah_single_2 --lengths 1024 --samples 1 --data @/out/d "
       "--haystack @/none --out @/out/e",
       1, "none"},
  });
}

TEST_F(BadInput, Generate) {
  expect_refused({
      {"generate --model @/none --prompt a", 1, "there is no folder"},
      {"generate --model @/model --prompt ''", 1, "the prompt is empty"},
      {"generate --model @/model --prompt-file @/empty.txt", 1, "empty.txt is empty"},
      {"generate --model @/model --prompt-file @/folder", 1, "folder"},
      {"generate --model @/model --prompt-file @/lines.jsonl --field text", 1,
       "lines.jsonl:2: not a JSON object"},
      {"generate --model @/m_nan --prompt a", 1, "the model's largest logit is -?nan"},
      {"generate --model @/m_no_tokenizer --prompt a", 1, "holds neither tokenizer.model"},
      {"generate --model @/m_tokenizer --prompt a", 1, "not one that ebb reads"},
      {"generate --model @/m_narrow --tokenizer bytes --prompt a", 1, "its tokenizer 257"},
  });
}

TEST_F(BadInput, Mqar) {
  const std::string g = "mqar generate --out @/out/m.jsonl ",
                    e = "mqar eval --length 24 --pairs 2 ";
  const std::string r = "train @/recipe.json --device cpu --quiet --set data=";
  const std::vector<std::tuple<std::string, int, const char*>> cases = {
      {"mqar", 2, "subcommand is required"},
      {"mqar write", 2, "write"},
      {g, 2, "--pairs is required"},
      {g + "--length 255 --pairs 2", 2, "length 255: want an even number"},
      {g + "--length 64 --pairs 4,17", 2, "17 pairs in a length of 64: want 1 ... 16"},
      {g + "--length 64 --pairs 4 --vocab-size 64", 2, "vocab_size 64: want more"},
      {g + "--pairs 0", 2, "0 pairs"},
      {g + "--pairs two", 2, "pairs"},
      {g + "--pairs 2 --power nan", 2, "power"},
      {g + "--pairs 2 --seed 4294967296", 2, "--seed 4294967296: want less than 2.31"},
      {g + "--pairs 2 --examples 0", 2, "examples"},
      {"mqar generate --pairs 2 --examples 2 --out @/file/m.jsonl", 1, "file"},
      {"mqar generate --pairs 2 --examples 2 --out @/folder", 1, "folder: it is a folder"},
      {e + "--model @/none", 1, "there is no folder .*none"},
      {e + "--model @/folder", 1, "holds neither config.json"},
      {e + "--model @/m_cut", 1, "cut short or damaged"},
      {e + "--model @/m_nan --vocab-size 64 --examples 2 --out @/out/s.json", 1,
       "mqar eval: .*: the loss is -?nan"},
      {e + "--model @/model", 1, "the task has 8192 tokens, the model's vocab_size is 300"},
      {e + "--model @/model --vocab-size 64 --device cpu --dtype bf16", 2, "f32 on cpu"},
      {e + "--model @/model --vocab-size 64 --examples 1 --out @/folder", 1,
       "folder: it is a folder"},
      {r + "'{\"kind\": \"mqr\"}'", 1, "did you mean mqar"},
      {r + "'{\"kind\": \"mqar\"}'", 1, "/data/mqar: names no numbers of pairs"},
      {r + "'{\"mqar\": {\"pairs\": [4]}}'", 1, "/data/mqar: wants \"kind\": \"mqar\""},
      {r + "'{\"kind\": \"mqar\", \"train\": [\"a\"], \"mqar\": {\"pairs\": [4]}}'", 1,
       "/data/train: belongs to shards"},
      {r + "'{\"kind\": \"mqar\", \"mqar\": {\"pair\": [4]}}'", 1,
       "/data/mqar/pair: unknown; did you mean pairs"},
      {r + "'{\"kind\": \"mqar\", \"mqar\": {\"pairs\": [4]}}'", 1,
       "the task has 8192 tokens, the model's vocab_size is 257"},
      {r + "'{\"kind\": \"mqar\", \"mqar\": {\"pairs\": [9], \"vocab_size\": 64}}'", 1,
       "9 pairs in a length of 32"},
      {r + "'{\"kind\": \"mqar\", \"mqar\": {\"pairs\": [4], \"vocab_size\": 64, "
           "\"examples\": 1}}'",
       1, "1 examples are too few for one batch of 2"},
      {r + "'{\"kind\": \"mqar\", \"mqar\": {\"pairs\": [4], \"vocab_size\": 64}}' "
           "--set init.scheme=dami",
       1, "/init: scheme dami calibrates on token shards"},
  };
  for (const auto& [command, code, says] : cases) expect_refused({{command.c_str(), code, says}});
}

TEST_F(BadInput, Report) {
  expect_refused({
      {"report @/none --out @/out/r.html", 1, "there is no folder"},
      {"report @/file --out @/out/r.html", 1, "there is no folder"},
      {"report @/folder --out @/out/r.html", 1, "holds none of"},
      {"report @/r_recipe --out @/out/r.html", 1, "recipe.json is not valid JSON: line 1"},
      {"report @/r_metrics --out @/out/r.html", 1, "metrics.jsonl:2: not a record"},
      {"report @/r_gates --out @/out/r.html", 1, "gates_initial.json: a gate without the number"},
      {"report @/r_results --out @/out/r.html", 1, "results.json is not a result of ebb eval"},
      {"report @/run --out @/folder", 1, "folder: it is a folder"},
      {"report @/run --out @/file/r.html", 1, "file"},
  });
}

TEST_F(BadInput, NumbersOfOptions) {
  const std::string generate = "generate --model @/model --prompt a --temperature 1 ";
  for (const std::string& command :
       {generate + "--seed -1", generate + "--seed 99999999999999999999", generate + "--top-k 1e3",
        generate + "--batch 010", std::string("gradcheck --filter swiglu --seed -1"),
        std::string("tokenize @/text.txt --tokenizer bytes --out @/out/t --shard-tokens "
                    "99999999999999999999"),
        std::string("inspect @/model --tokens @/data/text --length -5")})
    expect_refused({{command.c_str(), 2, "want a whole number from 0 to"}});
  expect_refused({{"bench gemm --least nan", 2, "--least nan"},
                  {"bench gemm --least -1", 2, "--least -1"},
                  {"gradcheck --tolerance nan", 2, "between 0 and 1"}});
}

// Said before the work, not after it.
TEST_F(BadInput, ResultFiles) {
  for (const std::string command :
       {"verify @/cases", "gradcheck --filter swiglu", "bench ops --filter '^swiglu' --repeats 3",
        "bench gemm", "bench models gdn-100m"}) {
    const std::string to_folder = command + " --json @/folder",
                      below_file = command + " --json @/file/x";
    expect_refused({{to_folder.c_str(), 1, "folder: it is a folder"},
                    {below_file.c_str(), 1, "cannot make the folder .*file"}});
  }
}

TEST_F(BadInput, Verify) {
  expect_refused({
      {"verify @/loop", 1, "loop: Too many levels of symbolic links"},
      {"verify @/none", 1, "none"},
      {"verify @/folder", 1, "no golden case found"},
      {"verify", 2, "paths is required"},
  });
  const CliResult r = run("verify @/cases");
  EXPECT_EQ(r.code, 1);
  EXPECT_TRUE(std::regex_search(r.out, std::regex("broken.*safetensors"))) << r.out << r.err;
}

}  // namespace
}  // namespace ebb::testing

// Safetensors files: round trips, and one clear error for every defect.
#include "tensor/safetensors.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <regex>

#include "tensor/compare.h"
#include "tests/layouts.h"
#include "tests/temporary_folder.h"

namespace ebb::testing {
namespace {

class SafeTensorsTest : public ::testing::Test {
 protected:
  std::string path() const { return folder_.file("x.safetensors"); }
  // Length, header, data, as given.
  void write(const std::string& header, const std::string& data) const {
    const uint64_t n = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &n, 8);
    write_file_atomically(path(), bytes + header + data);
  }
  std::string error() const {
    try {
      SafeTensors f(path());
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  template <class F>
  std::string error(F fn) const {
    try {
      fn(SafeTensors(path()));
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  TemporaryFolder folder_;
};

TEST_F(SafeTensorsTest, RoundTripOfEveryTypeAndLayout) {
  Layouts random(31);
  for (int trial = 0; trial < 40; ++trial) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (int i = 0; i < 12; ++i) {
      const Tensor t = random.strided(random.shape(4, 5, 0), kAllTypes[random.integer(0, 5)]);
      random.fill(t);
      tensors.emplace_back("layer." + std::to_string(i) + ".w", t);
    }
    save_safetensors(path(), tensors, {{"case", "{\"T\": 3}"}, {"ümlaut \"quoted\"", "a\nb"}});
    const SafeTensors f(path());
    EXPECT_EQ(f.names().size(), tensors.size());
    EXPECT_EQ(f.metadata("case"), "{\"T\": 3}");
    EXPECT_EQ(f.metadata("ümlaut \"quoted\""), "a\nb");
    EXPECT_EQ(f.metadata().size(), 2u);
    for (const auto& [name, t] : tensors) {
      ASSERT_TRUE(f.contains(name));
      const Tensor back = f.get(name, t.dtype(), t.shape());
      ASSERT_TRUE(bitwise_equal(back, t)) << name;
    }
  }
}

TEST_F(SafeTensorsTest, BytesAreDeterministicAlignedAndPadded) {
  const Tensor bytes = Tensor::full({3}, 7, DType::u8), wide = Tensor::full({2}, 1, DType::f64),
               half = Tensor::full({1}, 1, DType::bf16);
  const std::vector<std::pair<std::string, Tensor>> tensors = {
      {"c", bytes}, {"b", wide}, {"a", half}, {"d", wide}};
  save_safetensors(path(), tensors, {{"k", "v"}});
  const std::string first = read_file(path());
  save_safetensors(path(), tensors, {{"k", "v"}});
  EXPECT_TRUE(read_file(path()) == first);
  uint64_t n = 0;
  std::memcpy(&n, first.data(), 8);
  EXPECT_EQ(n % 8, 0u);
  const std::string header = first.substr(8, size_t(n));
  EXPECT_EQ(header.substr(0, header.find_last_not_of(' ') + 1),
            R"({"__metadata__":{"k":"v"},"b":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},)"
            R"("d":{"dtype":"F64","shape":[2],"data_offsets":[16,32]},)"
            R"("a":{"dtype":"BF16","shape":[1],"data_offsets":[32,34]},)"
            R"("c":{"dtype":"U8","shape":[3],"data_offsets":[34,37]}})");
  EXPECT_EQ(first.size(), 8 + n + 37);
}

TEST_F(SafeTensorsTest, TensorsAreReadOnlyViewsThatOutliveTheReader) {
  save_safetensors(path(), {{"w", Tensor::arange(6, DType::f32).view({2, 3})}});
  const int64_t before = memory_stats(Device::cpu()).current;
  const Tensor w = SafeTensors(path()).get("w");
  EXPECT_EQ(memory_stats(Device::cpu()).current, before);  // no copy
  EXPECT_EQ(w.to_vector<float>(), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_THROW(w.fill_(0), Error);
  // Writing the file anew leaves the view alone.
  save_safetensors(path(), {{"w", Tensor::zeros({2, 3})}});
  EXPECT_EQ(w.to_vector<float>(), (std::vector<float>{0, 1, 2, 3, 4, 5}));
}

TEST_F(SafeTensorsTest, MisalignedDataIsCopied) {
  const std::vector<float> values = {1.5f, -2};
  std::string data("\x05", 1);
  data.append(reinterpret_cast<const char*>(values.data()), 8);
  write(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
        R"("f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
        data);
  const SafeTensors f(path());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(f.get("f").raw()) % 4, 0u);
  EXPECT_EQ(f.get("f").to_vector<float>(), values);
  EXPECT_EQ(f.get("b").item(), 5);
}

TEST_F(SafeTensorsTest, EmptyFilesAndTensors) {
  save_safetensors(path(), {});
  EXPECT_TRUE(SafeTensors(path()).names().empty());
  save_safetensors(path(), {{"none", Tensor::zeros({0, 3})}, {"scalar", Tensor::full({}, 2)}});
  const SafeTensors f(path());
  EXPECT_EQ(f.get("none").shape(), (Shape{0, 3}));
  EXPECT_EQ(f.get("scalar").item(), 2);
  EXPECT_EQ(f.get("scalar").dim(), 0);
}

TEST_F(SafeTensorsTest, Bool) {
  write(R"({"m":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})", std::string("\1\0\1", 3));
  const Tensor m = SafeTensors(path()).get("m");
  EXPECT_EQ(m.dtype(), DType::u8);
  EXPECT_EQ(m.to_vector<uint8_t>(), (std::vector<uint8_t>{1, 0, 1}));
}

TEST_F(SafeTensorsTest, HalfPrecisionBecomesF32OnRequest) {
  std::string data(2 * 65536, '\0');
  for (uint32_t h = 0; h < 65536; ++h) std::memcpy(&data[2 * h], &h, 2);
  write(R"({"h":{"dtype":"F16","shape":[65536],"data_offsets":[0,131072]}})", data);
  EXPECT_TRUE(std::regex_search(error([](const SafeTensors& f) { f.get("h"); }),
                                std::regex("tensor 'h' is F16.*ask for it as f32")));
  EXPECT_TRUE(std::regex_search(error([](const SafeTensors& f) { f.get("h", DType::bf16); }),
                                std::regex("tensor 'h' is F16, want BF16")));
  const Tensor t = SafeTensors(path()).get("h", DType::f32, {65536});
  for (uint32_t h = 0; h < 65536; ++h) {
    const int exponent = int(h >> 10 & 31), mantissa = int(h & 1023);
    const float got = t.data<float>()[h];
    if (exponent == 31 && mantissa) {
      ASSERT_TRUE(std::isnan(got)) << h;
      continue;
    }
    double want = exponent == 31  ? INFINITY
                  : exponent == 0 ? std::ldexp(mantissa, -24)
                                  : std::ldexp(1024 + mantissa, exponent - 25);
    if (h & 0x8000) want = -want;
    ASSERT_EQ(got, want) << h;
    ASSERT_EQ(std::signbit(got), (h & 0x8000) != 0) << h;
  }
}

TEST_F(SafeTensorsTest, RequestsThatDoNotFit) {
  save_safetensors(path(), {{"w", Tensor::zeros({2, 3})}}, {{"a", "b"}});
  const auto expect = [&](auto fn, const std::string& rest) {
    EXPECT_EQ(error(fn), path() + ": " + rest);
  };
  expect([](const SafeTensors& f) { f.get("v"); }, "no tensor 'v' among its 1");
  expect([](const SafeTensors& f) { f.get("w", DType::f64); },
         "tensor 'w' is F32, want F64; convert it with to()");
  expect(
      [](const SafeTensors& f) {
        f.get("w", DType::f32, {3, 2});
      },
      "tensor 'w' is [2,3], want [3,2]");
  expect([](const SafeTensors& f) { f.metadata("c"); }, "no 'c' in its metadata");
}

struct Defect {
  const char* header;
  const char* data;
  const char* pattern;
};

TEST_F(SafeTensorsTest, DefectsOfTheHeader) {
#define ONE(entry) R"({"w":)" entry "}"
  const Defect defects[] = {
      {"{\"w\":", "", "not valid JSON"},
      {"", "", "not valid JSON"},
      {"[]", "", "not a JSON object"},
      {"{} x", "", "not valid JSON"},
      {ONE("3"), "", "'w': its header entry is not an object"},
      {ONE(R"({"shape":[1],"data_offsets":[0,1]})"), "a", "'w': no 'dtype'"},
      {ONE(R"({"dtype":"U8","data_offsets":[0,1]})"), "a", "'w': no 'shape'"},
      {ONE(R"({"dtype":"U8","shape":[1]})"), "a", "'w': no 'data_offsets'"},
      {ONE(R"({"dtype":8,"shape":[1],"data_offsets":[0,1]})"), "a", "dtype is not a string"},
      {ONE(R"({"dtype":"Q4","shape":[1],"data_offsets":[0,1]})"), "a", "unknown dtype 'Q4'"},
      {ONE(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})"), "a", "shape is not an array"},
      {ONE(R"({"dtype":"U8","shape":[-1],"data_offsets":[0,1]})"), "a", "bad size -1"},
      {ONE(R"({"dtype":"U8","shape":[1.0],"data_offsets":[0,1]})"), "a", "bad size 1.0"},
      {ONE(R"({"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]})"), "a",
       "bad size 18446744073709551615"},
      {ONE(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]})"), "a",
       "9 dimensions"},
      {ONE(R"({"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]})"), "",
       "overflows"},
      {ONE(R"({"dtype":"U8","shape":[1],"data_offsets":[0]})"), "a", "not a range"},
      {ONE(R"({"dtype":"U8","shape":[1],"data_offsets":[1,0]})"), "a", "not a range"},
      {ONE(R"({"dtype":"U8","shape":[1],"data_offsets":[-1,0]})"), "a", "not a range"},
      {ONE(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), "abcd",
       "hold 4 bytes, F32 \\[2\\] needs 8"},
      {ONE(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})"), "abc",
       "ends at data byte 4, the file has 3: it is cut short"},
      {ONE(R"({"dtype":"U8","shape":[2],"data_offsets":[1,3]})"), "abc", "gap of 1 bytes before"},
      {ONE(R"({"dtype":"U8","shape":[2],"data_offsets":[0,2]})"), "abc",
       "1 bytes of data belong to no tensor"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       "abc", "'b': data_offsets overlap"},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       "ab", "key \"w\" appears twice"},
      {ONE(R"({"dtype":"U8","shape":[[1]],"data_offsets":[0,1]})"), "a", "nested too deeply"},
      {R"({"__metadata__":3})", "", "__metadata__ is not an object"},
      {R"({"__metadata__":{"a":3}})", "", "value of 'a' is not a string"},
  };
#undef ONE
  for (const Defect& d : defects) {
    write(d.header, d.data);
    const std::string text = error();
    EXPECT_TRUE(std::regex_search(text, std::regex(d.pattern))) << d.header << ": " << text;
    EXPECT_TRUE(text.starts_with(path() + ": ")) << text;
  }
}

TEST_F(SafeTensorsTest, DefectsOfTheFile) {
  EXPECT_EQ(error(), "cannot read " + path() + ": No such file or directory");
  write_file_atomically(path(), "");
  EXPECT_EQ(error(), path() + ": 0 bytes are too few for a safetensors file");
  write_file_atomically(path(), "1234567");
  EXPECT_EQ(error(), path() + ": 7 bytes are too few for a safetensors file");
  write_file_atomically(path(), std::string("\x10\0\0\0\0\0\0\0{}", 10));
  EXPECT_TRUE(std::regex_search(error(), std::regex("header length 16 is beyond the file's 10")));
  write_file_atomically(path(), "PK\x03\x04 a zip archive, not tensors");
  EXPECT_TRUE(std::regex_search(error(), std::regex("not a safetensors file")));
}

TEST_F(SafeTensorsTest, TypesWithoutATensorTypeAreOnlyRefusedWhenAskedFor) {
  write(R"({"f8":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]},)"
        R"("u8":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
        "ab");
  EXPECT_EQ(SafeTensors(path()).get("u8").item(), 'b');
  EXPECT_EQ(error([](const SafeTensors& f) { f.get("f8"); }),
            path() + ": tensor 'f8' is F8_E4M3, which ebb has no type for");
}

// Whatever bytes a file holds: it is read whole, or there is one Error. Every position is cut at,
// and every bit of every byte flipped.
TEST_F(SafeTensorsTest, DamagedFilesNeverCrash) {
  save_safetensors(path(),
                   {{"a", Tensor::arange(5, DType::f32)},
                    {"b", Tensor::arange(3, DType::u8)},
                    {"c", Tensor::zeros({2, 2}, DType::i64)}},
                   {{"k", "v"}});
  const std::string good = read_file(path());
  const size_t data = size_t(uint8_t(good[0])) + 8 + 256 * size_t(uint8_t(good[1]));
  const auto refused = [&](const std::string& bad) {
    FILE* f = std::fopen(path().c_str(), "wb");
    EXPECT_EQ(std::fwrite(bad.data(), 1, bad.size(), f), bad.size());
    std::fclose(f);
    try {
      const SafeTensors file(path());
      for (const std::string& name : file.names()) {
        const bool half = file.info(name).dtype == "F16";
        (half ? file.get(name, DType::f32) : file.get(name)).to_vector<double>();
      }
    } catch (const Error& e) {
      EXPECT_TRUE(std::string(e.what()).starts_with(path() + ": ")) << e.what();
      return true;
    }
    return false;
  };
  for (size_t end = 0; end < good.size(); ++end) EXPECT_TRUE(refused(good.substr(0, end))) << end;
  EXPECT_TRUE(refused(good + "x"));
  int survived = 0;
  for (size_t i = 0; i < good.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[i] = char(bad[i] ^ (1 << bit));
      const bool damaged = refused(bad);
      if (i >= data) {
        EXPECT_FALSE(damaged) << i;  // the format has no checksum
      }
      survived += i < data && !damaged;
    }
  EXPECT_GT(survived, 0);  // a letter of a name, spaces: still a header
  Layouts random(32);
  for (int trial = 0; trial < 400; ++trial) {
    std::string bad = good;
    for (int64_t k = random.integer(2, 6); k > 0; --k)
      bad[size_t(random.integer(0, int64_t(bad.size()) - 1))] = char(random.integer(0, 255));
    refused(bad);
  }
}

// A header that nests a million arrays must not take the stack down.
TEST_F(SafeTensorsTest, DeepHeadersAreRefused) {
  const std::string deep(1'000'000, '[');
  write(R"({"w":{"dtype":"U8","data_offsets":[0,1],"shape":)" + deep, "a");
  EXPECT_TRUE(std::regex_search(error(), std::regex("nested too deeply")));
  write(deep, "");
  EXPECT_TRUE(std::regex_search(error(), std::regex("nested too deeply")));
}

TEST_F(SafeTensorsTest, WriterRefusesWhatCannotBeRead) {
  const Tensor t = Tensor::zeros({1});
  const auto error_of = [&](const std::vector<std::pair<std::string, Tensor>>& tensors,
                            const std::map<std::string, std::string>& metadata = {}) {
    try {
      save_safetensors(path(), tensors, metadata);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(error_of({{"w", t}, {"w", t}}), path() + ": two tensors are called 'w'");
  EXPECT_EQ(error_of({{"w", Tensor()}}), path() + ": tensor 'w' is undefined");
  EXPECT_EQ(error_of({{"__metadata__", t}}), path() + ": no tensor may be called __metadata__");
  EXPECT_TRUE(std::regex_search(error_of({{"\xff", t}}), std::regex("not UTF-8")));
  EXPECT_TRUE(std::regex_search(error_of({{"w", t}}, {{"k", "\xc3"}}), std::regex("not UTF-8")));
  EXPECT_TRUE(folder_.names().empty());
}

}  // namespace
}  // namespace ebb::testing

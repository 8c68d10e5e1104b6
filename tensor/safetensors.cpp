#include "tensor/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "tensor/check.h"
#include "tensor/json_text.h"

namespace ebb {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr const char* kMetadata = "__metadata__";
static_assert(std::endian::native == std::endian::little, "the format is little-endian");

struct FileType {
  const char* name;
  int64_t bytes;
  std::optional<DType> dtype;  // none: known to the format, but no tensor type of ours
};
constexpr FileType kFileTypes[] = {
    {"F32", 4, DType::f32}, {"F64", 8, DType::f64}, {"BF16", 2, DType::bf16},
    {"I32", 4, DType::i32}, {"I64", 8, DType::i64}, {"U8", 1, DType::u8},
    {"BOOL", 1, DType::u8}, {"F16", 2, {}},         {"I8", 1, {}},
    {"I16", 2, {}},         {"U16", 2, {}},         {"U32", 4, {}},
    {"U64", 8, {}},         {"F8_E4M3", 1, {}},     {"F8_E5M2", 1, {}},
    {"F8_E8M0", 1, {}},     {"C64", 8, {}},
};

const FileType* find_type(const std::string& name) {
  for (const FileType& t : kFileTypes)
    if (name == t.name) return &t;
  return nullptr;
}

const char* type_name(DType t) {
  for (const FileType& f : kFileTypes)
    if (f.dtype == t) return f.name;
  return "?";
}

// Throws with the file's name in front.
template <class... Args>
void expect(bool ok, const std::string& path, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok)
    throw Error(fmt::format("{}: {}", path, fmt::format(format, std::forward<Args>(args)...)));
}

Json parse_header(const std::string& path, const char* text, size_t bytes) {
  constexpr int kDepth = 3;  // header, entry, shape
  Json header;
  try {
    header = parse_json({text, bytes}, "the header", Comments::refuse, kDepth);
  } catch (const Error& e) {
    fail("{}: {}; the file is damaged or not safetensors", path, e.what());
  }
  expect(header.is_object(), path, "the header is not a JSON object");
  return header;
}

std::map<std::string, std::string> parse_metadata(const std::string& path, const Json& value) {
  expect(value.is_object(), path, "{} is not an object", kMetadata);
  std::map<std::string, std::string> out;
  for (const auto& [key, text] : value.items()) {
    expect(text.is_string(), path, "{}: the value of '{}' is not a string", kMetadata, key);
    out[key] = text.get<std::string>();
  }
  return out;
}

// A JSON number that is an integer in [0, 2^63).
bool read_size(const Json& value, int64_t* out) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t(INT64_MAX)) return false;
  *out = value.get<int64_t>();
  return true;
}

SafeTensors::Info parse_info(const std::string& path, const std::string& name, const Json& value) {
  SafeTensors::Info info;
  info.name = name;
  expect(value.is_object(), path, "tensor '{}': its header entry is not an object", name);
  const auto field = [&](const char* key) -> const Json& {
    const auto it = value.find(key);
    expect(it != value.end(), path, "tensor '{}': no '{}' in the header", name, key);
    return *it;
  };
  const Json& dtype = field("dtype");
  expect(dtype.is_string(), path, "tensor '{}': dtype is not a string", name);
  info.dtype = dtype.get<std::string>();
  const FileType* type = find_type(info.dtype);
  expect(type != nullptr, path, "tensor '{}': unknown dtype '{}'", name, info.dtype);

  const Json& shape = field("shape");
  expect(shape.is_array(), path, "tensor '{}': shape is not an array", name);
  expect(shape.size() <= size_t(kMaxDims), path, "tensor '{}': {} dimensions, at most {} work",
         name, shape.size(), kMaxDims);
  int64_t bytes = type->bytes;
  for (const Json& size : shape) {
    int64_t n = 0;
    expect(read_size(size, &n), path, "tensor '{}': bad size {} in shape", name, size.dump());
    expect(!__builtin_mul_overflow(bytes, n, &bytes), path, "tensor '{}': shape {} overflows", name,
           shape.dump());
    info.shape.push_back(n);
  }
  const Json& offsets = field("data_offsets");
  expect(offsets.is_array() && offsets.size() == 2 && read_size(offsets[0], &info.begin) &&
             read_size(offsets[1], &info.end) && info.begin <= info.end,
         path, "tensor '{}': data_offsets {} are not a range", name, offsets.dump());
  expect(info.end - info.begin == bytes, path,
         "tensor '{}': data_offsets {} hold {} bytes, {} {} needs {}", name, offsets.dump(),
         info.end - info.begin, info.dtype, info.shape, bytes);
  return info;
}

// Tensors must tile the data exactly: no overlap, no gap, nothing outside, nothing left over.
void check_tiling(const std::string& path, const std::vector<SafeTensors::Info>& infos,
                  int64_t data_bytes) {
  int64_t at = 0;
  for (const SafeTensors::Info& info : infos) {
    expect(info.end <= data_bytes, path,
           "tensor '{}' ends at data byte {}, the file has {}: it is cut short or damaged",
           info.name, info.end, data_bytes);
    expect(info.begin >= at, path, "tensor '{}': data_offsets overlap another tensor's", info.name);
    expect(info.begin <= at, path, "gap of {} bytes before tensor '{}'", info.begin - at,
           info.name);
    at = info.end;
  }
  expect(at == data_bytes, path, "{} bytes of data belong to no tensor", data_bytes - at);
}

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {  // subnormal: mantissa · 2^-24
    const float v = float(mantissa) * 0x1p-24f;
    return sign ? -v : v;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

}  // namespace

SafeTensors::SafeTensors(const std::string& path) : file_(MappedFile::open(path)) {
  const size_t size = file_->size();
  expect(size >= 8, path, "{} bytes are too few for a safetensors file", size);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file_->data(), 8);
  expect(header_bytes <= kMaxHeader, path,
         "header length {} is beyond the format's limit; this is not a safetensors file",
         header_bytes);
  expect(header_bytes <= size - 8, path,
         "header length {} is beyond the file's {} bytes: it is cut short or not safetensors",
         header_bytes, size);
  data_start_ = int64_t(8 + header_bytes);
  const Json header = parse_header(path, file_->data() + 8, size_t(header_bytes));
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadata)
      metadata_ = parse_metadata(path, value);
    else
      infos_.push_back(parse_info(path, name, value));
  }
  std::stable_sort(infos_.begin(), infos_.end(), [](const Info& a, const Info& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_tiling(path, infos_, int64_t(size) - data_start_);
  for (size_t i = 0; i < infos_.size(); ++i) index_[infos_[i].name] = i;
}

std::vector<std::string> SafeTensors::names() const {
  std::vector<std::string> out;
  for (const Info& info : infos_) out.push_back(info.name);
  return out;
}

const SafeTensors::Info& SafeTensors::info(const std::string& name) const {
  const auto it = index_.find(name);
  expect(it != index_.end(), path(), "no tensor '{}' among its {}", name, infos_.size());
  return infos_[it->second];
}

Tensor SafeTensors::get(const std::string& name) const {
  const Info& t = info(name);
  const FileType* type = find_type(t.dtype);
  expect(t.dtype != "F16", path(),
         "tensor '{}' is F16, which ebb does not compute in; ask for it as f32", name);
  expect(type->dtype.has_value(), path(), "tensor '{}' is {}, which ebb has no type for", name,
         t.dtype);
  const char* data = file_->data() + data_start_ + t.begin;
  const int64_t bytes = t.end - t.begin;
  if (bytes > 0 && reinterpret_cast<uintptr_t>(data) % uintptr_t(type->bytes) == 0)
    return Tensor::wrap(borrow(data, size_t(bytes), file_), *type->dtype, t.shape,
                        dense_strides(t.shape), 0);
  Tensor copied = Tensor::empty(t.shape, *type->dtype);
  if (bytes > 0) std::memcpy(copied.raw(), data, size_t(bytes));
  return copied;
}

Tensor SafeTensors::get(const std::string& name, DType dtype) const {
  const Info& t = info(name);
  if (t.dtype == "F16" && dtype == DType::f32) {
    const char* data = file_->data() + data_start_ + t.begin;
    Tensor out = Tensor::empty(t.shape, DType::f32);
    float* values = out.data<float>();
    for (int64_t i = 0; i < out.numel(); ++i) {
      uint16_t half = 0;
      std::memcpy(&half, data + 2 * i, 2);
      values[i] = half_to_float(half);
    }
    return out;
  }
  const std::optional<DType> have = find_type(t.dtype)->dtype;
  expect(have == dtype, path(), "tensor '{}' is {}, want {}{}", name, t.dtype, type_name(dtype),
         have ? "; convert it with to()" : "");
  return get(name);
}

Tensor SafeTensors::get(const std::string& name, DType dtype, const Shape& shape) const {
  const Info& t = info(name);
  expect(t.shape == shape, path(), "tensor '{}' is {}, want {}", name, t.shape, shape);
  return get(name, dtype);
}

const std::string& SafeTensors::metadata(const std::string& key) const {
  const auto it = metadata_.find(key);
  expect(it != metadata_.end(), path(), "no '{}' in its metadata", key);
  return it->second;
}

void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::set<std::string> seen;
  std::vector<const std::pair<std::string, Tensor>*> order;
  for (const auto& entry : tensors) {
    const auto& [name, t] = entry;
    expect(t.defined(), path, "tensor '{}' is undefined", name);
    expect(name != kMetadata, path, "no tensor may be called {}", kMetadata);
    expect(seen.insert(name).second, path, "two tensors are called '{}'", name);
    order.push_back(&entry);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return item_size(a->second.dtype()) > item_size(b->second.dtype());
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  int64_t at = 0;
  for (const auto* entry : order) {
    const auto& [name, t] = *entry;
    header[name] = {{"dtype", type_name(t.dtype())},
                    {"shape", std::vector<int64_t>(t.shape().begin(), t.shape().end())},
                    {"data_offsets", {at, at + t.nbytes()}}};
    at += t.nbytes();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception& e) {
    fail("{}: a name or metadata value is not UTF-8 ({})", path, json_problem(e));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  expect(text.size() <= kMaxHeader, path, "the header would take {} bytes", text.size());
  write_file_atomically(path, [&](FileWriter& out) {
    const uint64_t length = text.size();
    out.write(&length, sizeof length);
    out.write(text);
    for (const auto* entry : order) {
      const Tensor host = entry->second.cpu().contiguous();
      if (host.numel()) out.write(host.raw(), size_t(host.nbytes()));
    }
  });
}

}  // namespace ebb

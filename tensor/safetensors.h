// The safetensors file format: an 8-byte length, a JSON header, then raw little-endian data.
//   SafeTensors f("model.safetensors");
//   Tensor w = f.get("lm_head.weight");              // a view of the mapped file, not a copy
//   Tensor g = f.get("grad", DType::f32, {3, 4});    // throws unless it is exactly that
//   save_safetensors("out.safetensors", {{"w", w}}, {{"case", "demo"}});
// Every defect of a file is one Error that names the file and the tensor or header field.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensor/file.h"
#include "tensor/tensor.h"

namespace ebb {

class SafeTensors {
 public:
  struct Info {
    std::string name;
    std::string dtype;  // as in the file: "F32", "BF16", "F16", "BOOL" ...
    Shape shape;
    int64_t begin = 0, end = 0;  // bytes, from the start of the data
  };

  // Maps the file and validates the whole header.
  explicit SafeTensors(const std::string& path);

  const std::string& path() const { return file_->path(); }
  const std::vector<Info>& infos() const { return infos_; }  // in the order of the data
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return index_.count(name) > 0; }
  const Info& info(const std::string& name) const;

  // Read-only CPU tensors that keep the mapping alive. F32 F64 BF16 I32 I64 U8 as they are, BOOL
  // as u8; others throw, except that F16 may be asked for as f32.
  Tensor get(const std::string& name) const;
  Tensor get(const std::string& name, DType dtype) const;
  Tensor get(const std::string& name, DType dtype, const Shape& shape) const;

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& metadata(const std::string& key) const;  // throws when absent

 private:
  std::shared_ptr<MappedFile> file_;
  int64_t data_start_ = 0;
  std::vector<Info> infos_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Atomic. Tensors of any device and strides; data ordered by item size (so that all of it is
// aligned), then as given. The same input gives the same bytes.
void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace ebb

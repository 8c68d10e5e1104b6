#include "tensor/graph.h"

#include "tensor/check.h"

namespace ebb {

GraphCapture::GraphCapture(Device device) : arena_(device), device_(device) {}

GraphCapture::~GraphCapture() {
  if constexpr (kWithCuda) {
    if (!graph_) return;
    gpu::graph_destroy(graph_);
  }
}

void GraphCapture::capture(const std::function<void()>& work) {
  check(!graph_, "graph: captured twice");
  if constexpr (kWithCuda) {
    synchronize(device_);
    arena_.begin_use();
    try {
      gpu::graph_begin(device_);
      work();
      graph_ = gpu::graph_end(device_);
    } catch (...) {
      gpu::graph_abandon(device_);
      arena_.end_use();
      throw;
    }
    arena_.end_use();
  }
}

void GraphCapture::replay() {
  check(graph_, "graph: nothing captured");
  if constexpr (kWithCuda) gpu::graph_launch(graph_, device_);
}

}  // namespace ebb

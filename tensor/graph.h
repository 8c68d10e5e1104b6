// GraphCapture: device work recorded once as a CUDA graph and launched again as a whole.
//   GraphCapture graph(device);
//   work();                                // once eagerly: lazy set-up must not fall into capture
//   graph.capture([&] { work(); });        // records, does not run
//   graph.replay();
// Memory that `work` takes comes from the graph's own arena and keeps its addresses, so tensors
// it leaves behind (outputs) hold each replay's values; they must not outlive the graph. Inputs are
// read from where they were at capture. `work` may not synchronise with the host.
#pragma once
#include <functional>
#include <memory>

#include "tensor/memory.h"

namespace ebb {

class GraphCapture {
 public:
  explicit GraphCapture(Device device);  // a GPU
  ~GraphCapture();
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;

  void capture(const std::function<void()>& work);  // once
  void replay();                                    // on the current stream
  int64_t reserved() const { return arena_.reserved(); }

 private:
  GraphArena arena_;
  Device device_;
  void* graph_ = nullptr;  // cudaGraphExec_t
};

namespace gpu {
void graph_begin(Device device);    // the current stream records from here on
void* graph_end(Device device);     // instantiated graph
void graph_abandon(Device device);  // after a failure between the two; never throws
void graph_launch(void* graph, Device device);
void graph_destroy(void* graph);
}  // namespace gpu

}  // namespace ebb

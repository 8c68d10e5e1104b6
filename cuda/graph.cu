// Capture and launch of CUDA graphs (tensor/graph.h).
#include "cuda/device.cuh"
#include "tensor/graph.h"

namespace ebb::gpu {

void graph_begin(Device device) {
  cuda_check(cudaStreamBeginCapture(stream_on(device), cudaStreamCaptureModeThreadLocal),
             "graph capture");
}

void* graph_end(Device device) {
  cudaGraph_t graph = nullptr;
  cuda_check(cudaStreamEndCapture(stream_on(device), &graph), "graph capture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t code = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  cuda_check(code, "graph instantiation");
  return executable;
}

void graph_abandon(Device device) {
  cudaGraph_t graph = nullptr;
  if (is_capturing(stream_on(device))) cudaStreamEndCapture(stream_on(device), &graph);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();  // what went wrong is thrown already
}

void graph_launch(void* graph, Device device) {
  cuda_check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_on(device)),
             "graph launch");
}

void graph_destroy(void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

}  // namespace ebb::gpu

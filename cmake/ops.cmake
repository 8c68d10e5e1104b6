# Every operator, one word each: ops/NAME.{h,cpp} and, unless it is composed of other operators,
# cuda/NAME.cu. A row in tests/op_table.cpp is demanded by the contract test.

# elementwise, movement, reductions
list(APPEND EBB_OPS elementwise movement indexing reduce cumsum softmax)

# products, embedding, losses
list(APPEND EBB_OPS matmul embedding cross_entropy linear_cross_entropy)

# normalisations
list(APPEND EBB_OPS gated_rms_norm l2_norm layer_norm rms_norm)

# convolution, gates, activations, token shift
list(APPEND EBB_OPS causal_conv1d swiglu decay_gate forget_gate sigmoid_gate token_shift
  channel_mix)

# recurrences
list(APPEND EBB_OPS delta_rule delta_rule_channel dplr)
list(APPEND EBB_OPS gated_linear_attention ssd state_memory_attention)
list(APPEND EBB_OPS attention rotary)
list(APPEND EBB_OPS log_cumsum_exp)

# optimizer
list(APPEND EBB_OPS adamw multi_tensor)

# Operators written entirely in terms of others: named above too, but no cuda/NAME.cu.
list(APPEND EBB_OPS_COMPOSED channel_mix movement)

# Further sources of larger operators: ops/*.cpp and cuda/*.cu.
list(APPEND EBB_OP_EXTRA_SOURCES ops/map.cpp ops/reduce_cpu.cpp ops/seq_layout.cpp)
list(APPEND EBB_OP_EXTRA_SOURCES ops/causal_conv1d_cpu.cpp)
list(APPEND EBB_CUDA_EXTRA_SOURCES cuda/causal_conv1d_state.cu)
list(APPEND EBB_OP_EXTRA_SOURCES ops/delta_rule_cpu.cpp ops/delta_rule_cpu_bwd.cpp
  ops/delta_rule_channel_cpu.cpp ops/delta_rule_channel_cpu_bwd.cpp
  ops/dplr_cpu.cpp ops/dplr_cpu_bwd.cpp)
list(APPEND EBB_CUDA_EXTRA_SOURCES
  cuda/delta_fast_bwd.cu cuda/delta_fast_channel.cu cuda/delta_fast_channel_gradients.cu
  cuda/delta_fast_channel_wide.cu
  cuda/delta_fast_channel_prepare.cu cuda/delta_fast_fwd.cu cuda/delta_fast_gradients.cu
  cuda/delta_fast_gradients_wide.cu
  cuda/delta_fast_prepare.cu cuda/delta_segments.cu cuda/delta_channel_logits.cu
  cuda/delta_rule_bwd.cu cuda/delta_rule_fwd.cu
  cuda/delta_rule_channel_bwd.cu cuda/delta_rule_channel_fwd.cu
  cuda/delta_rule_channel_gradients.cu
  cuda/delta_rule_step.cu cuda/delta_rule_step_logits.cu
  cuda/dplr_bwd.cu cuda/dplr_fast.cu cuda/dplr_fast_gradients.cu cuda/dplr_fast_prepare.cu
  cuda/dplr_fast_scan.cu cuda/dplr_steep_gradients.cu cuda/dplr_wide_gradients.cu
  cuda/dplr_wide_prepare.cu cuda/dplr_wide_scan.cu cuda/dplr_wide_scan_slots.cu
  cuda/dplr_wide_scores.cu cuda/dplr_wide_values.cu)
list(APPEND EBB_OP_EXTRA_SOURCES
  ops/gated_linear_attention_cpu.cpp ops/gated_linear_attention_cpu_bwd.cpp
  ops/linear_attention_channel.cpp ops/linear_attention_channel_cpu.cpp)
list(APPEND EBB_CUDA_EXTRA_SOURCES
  cuda/gated_linear_attention_bwd.cu cuda/gated_linear_attention_fwd.cu
  cuda/gated_linear_attention_step.cu cuda/linear_attention_channel.cu
  cuda/linear_attention_fast_bwd.cu cuda/linear_attention_fast_fwd.cu
  cuda/linear_attention_gradients.cu cuda/linear_attention_reverse.cu
  cuda/linear_attention_runs.cu)
list(APPEND EBB_OP_EXTRA_SOURCES
  ops/state_memory_attention_cpu.cpp ops/state_memory_attention_cpu_bwd.cpp
  ops/state_memory_cache.cpp)
list(APPEND EBB_CUDA_EXTRA_SOURCES
  cuda/state_memory_attention_bwd.cu cuda/state_memory_fast_bwd.cu
  cuda/state_memory_fast_fwd.cu cuda/state_memory_fast_memories.cu
  cuda/state_memory_fast_prepare.cu cuda/state_memory_fast_tokens.cu
  cuda/state_memory_step.cu)
list(APPEND EBB_OP_EXTRA_SOURCES ops/attention_cpu.cpp)
list(APPEND EBB_CUDA_EXTRA_SOURCES
  cuda/attention_fast_bwd.cu cuda/attention_fast_fwd.cu cuda/attention_step.cu)
list(APPEND EBB_OP_EXTRA_SOURCES ops/gemm.cpp ops/gemm_blas.cpp ops/matmul_algorithms.cpp)
list(APPEND EBB_CUDA_EXTRA_SOURCES cuda/gemm.cu)
list(APPEND EBB_CUDA_EXTRA_SOURCES cuda/norm_rows.cu)

# Of the CUDA sources those that take a minute or more, longest first.
set(EBB_CUDA_SLOW_SOURCES
  cuda/state_memory_attention_bwd.cu cuda/delta_fast_channel.cu cuda/dplr_bwd.cu
  cuda/gated_linear_attention_bwd.cu cuda/delta_rule_channel_bwd.cu cuda/delta_rule_bwd.cu
  cuda/delta_fast_channel_gradients.cu cuda/causal_conv1d.cu cuda/delta_rule_channel_fwd.cu
  cuda/delta_fast_channel_prepare.cu cuda/attention.cu cuda/gated_linear_attention_fwd.cu
  cuda/delta_rule_fwd.cu cuda/delta_fast_bwd.cu cuda/delta_fast_fwd.cu cuda/copy.cu
  cuda/delta_fast_gradients.cu cuda/gated_rms_norm.cu cuda/linear_cross_entropy.cu
  cuda/linear_attention_gradients.cu)

set(EBB_TENSOR_SOURCES
  tensor/compare.cpp
  tensor/copy.cpp
  tensor/device.cpp
  tensor/device_flags.cpp
  tensor/device_info.cpp
  tensor/event.cpp
  tensor/graph.cpp
  tensor/file.cpp
  tensor/folder_lock.cpp
  tensor/hash.cpp
  tensor/json_text.cpp
  tensor/memory.cpp
  tensor/print.cpp
  tensor/random.cpp
  tensor/safetensors.cpp
  tensor/shape.cpp
  tensor/tensor.cpp
  tensor/views.cpp
)
set(EBB_AUTOGRAD_SOURCES
  autograd/backward.cpp
  autograd/gradcheck.cpp
  autograd/node.cpp
  autograd/parameter.cpp
  autograd/recompute.cpp
  autograd/var.cpp
)
# CUDA sources that belong to tensor/.
set(EBB_CUDA_TENSOR_SOURCES
  cuda/copy.cu
  cuda/device.cu
  cuda/device_info.cu
  cuda/event.cu
  cuda/graph.cu
  cuda/memory.cu
  cuda/pool.cu
  cuda/tensor_map.cu
  cuda/random.cu
)
set(EBB_OP_TABLE_SOURCES
  tests/op_table.cpp
  tests/op_rows/attention.cpp
  tests/op_rows/conv.cpp
  tests/op_rows/decay.cpp
  tests/op_rows/delta_rule.cpp
  tests/op_rows/delta_rule_channel.cpp
  tests/op_rows/dplr.cpp
  tests/op_rows/elementwise.cpp
  tests/op_rows/gate.cpp
  tests/op_rows/linear_attention.cpp
  tests/op_rows/linear_attention_inputs.cpp
  tests/op_rows/loss.cpp
  tests/op_rows/matmul.cpp
  tests/op_rows/movement.cpp
  tests/op_rows/norm.cpp
  tests/op_rows/optimizer.cpp
  tests/op_rows/reduce.cpp
  tests/op_rows/state_memory_attention.cpp
)
set(EBB_TOOL_SOURCES
  tools/bench.cpp
  tools/bench_ceilings.cpp
  tools/bench_command.cpp
  tools/bench_gemm.cpp
  tools/bench_models.cpp
  tools/bench_rows.cpp
  tools/bench_rows/attention.cpp
  tools/bench_rows/gate.cpp
  tools/bench_rows/loss.cpp
  tools/bench_rows/norm.cpp
  tools/bench_rows/optimizer.cpp
  tools/bench_rows/product.cpp
  tools/bench_rows/recurrence.cpp
  tools/bench_rows/tensor.cpp
  tools/child.cpp
  tools/command.cpp
  tools/convert.cpp
  tools/demo_data.cpp
  tools/eval_command.cpp
  tools/eval_models.cpp
  tools/eval_tables.cpp
  tools/generate.cpp
  tools/gradcheck.cpp
  tools/gradcheck_command.cpp
  tools/init.cpp
  tools/inspect.cpp
  tools/main.cpp
  tools/model_report.cpp
  tools/mqar_command.cpp
  tools/mqar_task.cpp
  tools/output_folder.cpp
  tools/progress_line.cpp
  tools/report_command.cpp
  tools/result_file.cpp
  tools/study.cpp
  tools/study_command.cpp
  tools/study_runner.cpp
  tools/study_summary.cpp
  tools/temporary_folder.cpp
  tools/token_source.cpp
  tools/tokenize.cpp
  tools/train.cpp
  tools/verify.cpp
  tools/verify_adapters.cpp
  tools/verify_case.cpp
  tools/verify_command.cpp
  tools/verify_limits.cpp
  tools/verify_model.cpp
  tools/verify_tokenizer.cpp
  tools/version.cpp
)

# Test sources by ctest label, relative to tests/.
set(EBB_UNIT_TESTS
  config_test.cpp
  data_test.cpp
  decay_init_test.cpp
  eval_test.cpp
  tokenizer_test.cpp
  autograd_test.cpp
  copy_test.cpp
  event_test.cpp
  file_test.cpp
  memory_test.cpp
  random_test.cpp
  safetensors_test.cpp
  tensor_test.cpp
  views_test.cpp
)
# op_contract_test.cpp and op_cuda_test.cpp are built in; these are further ones.
set(EBB_OP_TESTS
  delta_rule_test.cpp
  op_harness.cpp
)
set(EBB_CUDA_TESTS
  graph_test.cpp
  pool_cuda_test.cpp
  tensor_cuda_test.cpp
  op_harness.cpp
)

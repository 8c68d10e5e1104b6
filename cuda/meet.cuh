// Where groups of warps with ways of their own wait for one another, each at a place of its own in
// the code. One barrier would do; but synccheck of compute-sanitizer, which tells a barrier that
// only some threads of a block reach from a mistake by the instruction, follows barriers at which
// threads wait in one place, while others may arrive anywhere. So the first group waits for all the
// others, and they for it.
#pragma once
#include "cuda/warpgroup.cuh"

namespace ebb::gpu {

// By group GROUP of groups with FIRST, OTHERS... threads; ids `id` and as many more as OTHERS.
template <int GROUP, int FIRST, int... OTHERS>
__device__ __forceinline__ void barrier_meet(int id) {
  constexpr int kAll = (FIRST + ... + OTHERS);
  if constexpr (GROUP == 0) {
    barrier_wait<kAll>(id);
    (barrier_arrive<FIRST + OTHERS>(++id), ...);
  } else {
    constexpr int kOthers[] = {OTHERS...};
    barrier_arrive<kAll>(id);
    barrier_wait<FIRST + kOthers[GROUP - 1]>(id + GROUP);
  }
}

}  // namespace ebb::gpu

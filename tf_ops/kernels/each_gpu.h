// One kernel for all: a thread does element i, and those that lie a grid's width further on. The elements of a warp are
// neighbours, so its loads are whole lines, also those of host memory across the bus.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gpu.h"

namespace hvd_ext::gpu {

constexpr int kThreadsOfEach = 256;
// As many as an H200 runs at once: 132 multiprocessors with 8 blocks.
constexpr int64_t kMostBlocks = 1056;

template <typename Each>
__global__ void __launch_bounds__(kThreadsOfEach) Apply(Each each, int64_t elements) {
  const int64_t step = int64_t{gridDim.x} * kThreadsOfEach;
  for (int64_t i = int64_t{blockIdx.x} * kThreadsOfEach + threadIdx.x; i < elements; i += step) each(i);
}

template <typename Each>
void ForEach(Each each, int64_t elements, cudaStream_t stream) {
  if (elements == 0) return;
  const int64_t blocks = std::min((elements + kThreadsOfEach - 1) / kThreadsOfEach, kMostBlocks);
  LaunchApart(Apply<Each>, blocks, kThreadsOfEach, stream, each, elements);
}

}  // namespace hvd_ext::gpu

// Error feedback (kernels/topk.h) and sparse sums on a GPU, with the bits of the processor's.
//
// Each call queues one kernel in a stream and returns; for no elements it does nothing. Pointers are to memory that the
// GPU reaches: its own, or host memory that is registered with CUDA. A launch that fails is the thread's next
// cudaGetLastError.
#pragma once

#include <cstdint>

#include "kernels/gpu.h"
#include "kernels/topk.h"

namespace hvd_ext::gpu {

// accumulated = a, next_residual = 0, next_velocity = velocity'; where `accumulated` is next_residual, that is a.
void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated, cudaStream_t stream);
// Sets next_residual, and with masks next_velocity, to 0 at the picks.
void Take(const ErrorFeedback& feedback, const int32_t* picks, int64_t count, cudaStream_t stream);
// data[positions[i] - base] += values[i]; the positions differ.
void AddEntries(float* data, int64_t base, const int32_t* positions, const float* values, int64_t count,
                cudaStream_t stream);

}  // namespace hvd_ext::gpu

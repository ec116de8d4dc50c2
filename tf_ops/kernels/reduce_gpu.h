// The kernels of kernels/reduce.h on a GPU, with the bits of the processor's; a NaN may have other bits.
//
// Each call queues one kernel in a stream and returns; for no elements it does nothing. Pointers are to memory that the
// GPU reaches: its own, or host memory that is registered with CUDA. A launch that fails is the thread's next
// cudaGetLastError.
#pragma once

#include <cstdint>

#include "kernels/gpu.h"
#include "kernels/reduce.h"

namespace hvd_ext::gpu {

void Combine(ReduceOp op, DType dtype, void* accumulator, const void* x, int64_t elements, cudaStream_t stream);
void Divide(DType dtype, void* data, int64_t divisor, int64_t elements, cudaStream_t stream);
void Narrow(DType wire, void* to, float* x, int64_t elements, float scale, cudaStream_t stream);
void Widen(DType wire, float* to, const void* x, int64_t elements, float scale, cudaStream_t stream);
void AddWidened(DType wire, float* accumulator, const void* x, int64_t elements, float scale, cudaStream_t stream);
void CombineWidened(ReduceOp op, DType wire, float* accumulator, const void* x, int64_t elements, cudaStream_t stream);
void Round(DType wire, float* x, int64_t elements, float scale, cudaStream_t stream);

}  // namespace hvd_ext::gpu

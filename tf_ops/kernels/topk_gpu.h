// Selects the k elements of greatest magnitude on a GPU, with the answer of kernels/topk.h for Selector::kExact, bit
// for bit. It is a C ABI without TensorFlow and MPI, in libhvd_ext_gpu.so.
//
// A call enqueues work in a stream and returns. It neither waits nor allocates memory, so that it may be captured in a
// CUDA graph. x is read once, unless the sample is misleading or k is more than a quarter of a segment (docs/gpu.md).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A part of x. The segments of a call are disjoint and ascending, and 0 <= k <= elements < 2^31.
typedef struct {
  int64_t begin;
  int64_t elements;
  int64_t k;
} HvdExtTopKSegment;

enum { HVD_EXT_TOPK_GPU_INVALID = -1 };  // an argument was refused; positive codes are those of CUDA

// Returns the bytes of device memory that a call with these arguments needs, or HVD_EXT_TOPK_GPU_INVALID if it would
// refuse them. One segment of elements of b bytes needs about elements / 512 bytes and, if it has more than 32768
// elements and k is at most a quarter of them, at most (b + 4) * min(elements, 3 k + elements / 256 + 4096) bytes for
// candidates.
int64_t hvd_ext_topk_gpu_workspace(int32_t dtype, const HvdExtTopKSegment* segments, int64_t n_segments);

// dtype: a floating-point DType of kernels/reduce.h. x, indices, values, non_finite and workspace are device memory;
// segments is host memory, which is read before the call returns. x must be aligned to the size of an element, and
// workspace to 256 bytes. indices receives positions in x, int64 if `wide`, else int32, ascending in each segment;
// those of segment s begin at the sum of the k of the segments before s. values (may be null) receives x at the
// indices. non_finite (may be null) becomes 1 if a picked key, or any key of a segment with k = 0, is infinite or NaN,
// else 0. stream: a cudaStream_t. Returns 0, or a code that hvd_ext_topk_gpu_error() explains; failures on the device
// appear at the caller's next synchronisation, as with every kernel.
int hvd_ext_topk_gpu(int32_t dtype, const void* x, const HvdExtTopKSegment* segments, int64_t n_segments, void* indices,
                     int32_t wide, void* values, int32_t* non_finite, void* workspace, int64_t workspace_nbytes,
                     void* stream);

const char* hvd_ext_topk_gpu_error(void);  // the text of this thread's last failure

#ifdef __cplusplus
}
#endif

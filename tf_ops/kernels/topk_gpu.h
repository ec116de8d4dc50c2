// The k elements of greatest magnitude on a GPU: the answer of kernels/topk.h for Selector::kExact, bit for bit, behind
// a C ABI. No TensorFlow, no MPI; libhvd_ext_topk_gpu.so holds it alone.
//
// A call puts work into a stream and returns: it waits for nothing and allocates nothing, so that it may be captured in
// a CUDA graph. x is read once, except where a sample misleads or k is more than a quarter of a segment (docs/gpu.md).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A part of x: segments are disjoint and ascending; 0 <= k <= elements < 2^31.
typedef struct {
  int64_t begin;
  int64_t elements;
  int64_t k;
} HvdExtTopKSegment;

enum { HVD_EXT_TOPK_GPU_INVALID = -1 };  // an argument is refused; positive codes are those of CUDA

// Bytes of device memory that a call with these arguments needs; HVD_EXT_TOPK_GPU_INVALID if they are refused. An
// element of b bytes, one segment: at most (b + 4) * min(elements, 3 k + elements / 256 + 4096), where k is at most a
// quarter of more than 32768 elements, else none; and about elements / 512 bytes.
int64_t hvd_ext_topk_gpu_workspace(int32_t dtype, const HvdExtTopKSegment* segments, int64_t n_segments);

// dtype: DType of kernels/reduce.h, a float. x, indices, values, non_finite and workspace are device memory, segments
// is host memory and is read before the call returns. x may start at any multiple of an element's size, workspace at
// any of 256 bytes. indices: positions in x, int32 or int64 (`wide`), ascending in each segment; those of segment s
// begin at the sum of k before s. values (may be null): x at the indices. non_finite (may be null): 1 if a picked key,
// or in a segment with k = 0 any key, is infinite or NaN, else 0. stream: a cudaStream_t. Returns 0, or a code whose
// words are in hvd_ext_topk_gpu_error(); failures on the device show at the caller's next synchronisation, as with
// every kernel.
int hvd_ext_topk_gpu(int32_t dtype, const void* x, const HvdExtTopKSegment* segments, int64_t n_segments, void* indices,
                     int32_t wide, void* values, int32_t* non_finite, void* workspace, int64_t workspace_nbytes,
                     void* stream);

const char* hvd_ext_topk_gpu_error(void);  // what the last failure of this thread was

#ifdef __cplusplus
}
#endif

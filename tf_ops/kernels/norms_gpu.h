// Sums of squares of many tensors on a GPU, with the bits of kernels/norms.h; a NaN may have other bits. It is a C ABI
// without TensorFlow and MPI, in libhvd_ext_gpu.so.
//
// A call enqueues work in a stream and returns. It neither waits nor allocates memory, so that it may be captured in a
// CUDA graph. Each tensor is read once.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void* data;  // device memory, aligned to the size of an element; may be null if there are no elements
  int64_t elements;
} HvdExtNormsTensor;

enum { HVD_EXT_NORMS_GPU_INVALID = -1 };  // an argument was refused; positive codes are those of CUDA

// Returns the bytes of device memory that a call with these tensors needs, about 24 for each tensor and 8 for each
// block of 65,536 elements, or HVD_EXT_NORMS_GPU_INVALID if it would refuse them. They may have fewer than 2^31 blocks
// in all.
int64_t hvd_ext_norms_gpu_workspace(const HvdExtNormsTensor* tensors, int64_t n_tensors);

// dtype: a floating-point DType of kernels/reduce.h. tensors is host memory, which is read before the call returns.
// squares and workspace are device memory; workspace must be aligned to 256 bytes. squares receives a float64 for each
// tensor. stream: a cudaStream_t. Returns 0, or a code that hvd_ext_norms_gpu_error() explains; failures on the device
// appear at the caller's next synchronisation, as with every kernel.
int hvd_ext_norms_gpu(int32_t dtype, const HvdExtNormsTensor* tensors, int64_t n_tensors, double* squares,
                      void* workspace, int64_t workspace_nbytes, void* stream);

const char* hvd_ext_norms_gpu_error(void);  // the text of this thread's last failure

#ifdef __cplusplus
}
#endif

// The updates of kernels/layerwise.h on a GPU, with the bits of the processor's; but a NaN may have other bits, and
// where a result rounds to float32's least normal number a processor may have 0. Functions of libhvd_ext_gpu.so,
// without TensorFlow and MPI.
//
// A call enqueues work in a stream and returns. It neither waits nor allocates memory, so that it may be captured in a
// CUDA graph.
#pragma once

#include <stdint.h>

#include "kernels/layerwise.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { HVD_EXT_LAYERWISE_GPU_INVALID = -1 };  // an argument was refused; positive codes are those of CUDA

// The bytes of device memory that a call with n variables needs.
int64_t hvd_ext_layerwise_gpu_workspace(int64_t n);

// `variables` is host memory, which is read before the call returns; all that it and the steps point to is device
// memory, and so is `workspace`, which must be aligned to 256 bytes. stream: a cudaStream_t. They return 0, or a code
// that hvd_ext_layerwise_gpu_error() explains; failures on the device appear at the caller's next synchronisation, as
// with every kernel.
int hvd_ext_lars_gpu(const hvd_ext::LarsVariable* variables, int64_t n, const hvd_ext::LarsStep* step, void* workspace,
                     int64_t workspace_nbytes, void* stream);
int hvd_ext_lamb_gpu(const hvd_ext::LambVariable* variables, int64_t n, const hvd_ext::LambStep* step, void* workspace,
                     int64_t workspace_nbytes, void* stream);
int hvd_ext_move_gpu(const hvd_ext::MovedVariable* variables, int64_t n, const float* rates, void* workspace,
                     int64_t workspace_nbytes, void* stream);

const char* hvd_ext_layerwise_gpu_error(void);  // the text of this thread's last failure

#ifdef __cplusplus
}
#endif

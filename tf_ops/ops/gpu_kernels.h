// The kernels of libhvd_ext_gpu.so for ops on a GPU. The library lies beside that of the ops, and is loaded at the
// first use: where no op runs on a GPU, CUDA is not touched.
#pragma once

#include "absl/status/status.h"
#include "kernels/layerwise_gpu.h"
#include "kernels/norms_gpu.h"
#include "kernels/topk_gpu.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/stream_executor.h"

namespace hvd_ext {

struct GpuKernels {
  decltype(&hvd_ext_topk_gpu_workspace) topk_workspace;
  decltype(&hvd_ext_topk_gpu) topk;
  decltype(&hvd_ext_norms_gpu_workspace) norms_workspace;
  decltype(&hvd_ext_norms_gpu) norms;
  decltype(&hvd_ext_layerwise_gpu_workspace) layerwise_workspace;
  decltype(&hvd_ext_lars_gpu) lars;
  decltype(&hvd_ext_lamb_gpu) lamb;
  decltype(&hvd_ext_move_gpu) move;
  decltype(&hvd_ext_layerwise_gpu_error) error;  // of any of them
};

// Sets *kernels; an error where the library is not there, or is of another version.
absl::Status FindGpuKernels(const GpuKernels** kernels);

// The stream of the GPU on which an op runs; null on the CPU.
inline void* StreamOf(tensorflow::OpKernelContext* context) {
  auto* device = context->op_device_context();
  return device == nullptr || device->stream() == nullptr ? nullptr
                                                          : device->stream()->platform_specific_handle().stream;
}

// Calls enqueue(kernels, workspace, nbytes) with device memory of workspace_nbytes(kernels), and gives the error of
// either. TensorFlow may give the memory to what comes later in the stream.
template <typename Nbytes, typename Enqueue>
absl::Status OnGpu(tensorflow::OpKernelContext* context, const Nbytes& workspace_nbytes, const Enqueue& enqueue) {
  const GpuKernels* kernels = nullptr;
  TF_RETURN_IF_ERROR(FindGpuKernels(&kernels));
  const int64_t nbytes = workspace_nbytes(*kernels);
  if (nbytes < 0) return absl::InvalidArgumentError(kernels->error());
  tensorflow::Tensor workspace;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({nbytes}), &workspace));
  void* memory = const_cast<char*>(workspace.tensor_data().data());
  if (enqueue(*kernels, memory, nbytes) != 0) return absl::InternalError(kernels->error());
  return absl::OkStatus();
}

}  // namespace hvd_ext

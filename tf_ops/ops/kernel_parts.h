// What the ops that compute on one rank share: their threads, what they write to, and how they refuse.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/workers.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace hvd_ext {

inline ParallelFor WorkersOf(tensorflow::OpKernelContext* context) {
  const auto* workers = context->device()->tensorflow_cpu_worker_threads();
  if (workers == nullptr || workers->num_threads < 2) return nullptr;
  const auto schedule = [pool = workers->workers](auto work) { pool->Schedule(work); };
  return WithTheCaller(workers->num_threads, schedule);
}

// Sets *written to the memory of a variable's tensor, or to new memory where a tensor that was read from the variable
// still has it: that tensor keeps its values.
inline absl::Status MemoryToWrite(tensorflow::OpKernelContext* context, const tensorflow::Tensor& now,
                                  tensorflow::Tensor* written) {
  if (!now.RefCountIsOne()) return context->allocate_temp(now.dtype(), now.shape(), written);
  *written = now;
  return absl::OkStatus();
}

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

}  // namespace hvd_ext

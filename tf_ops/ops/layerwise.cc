// The updates of LARS and LAMB, all variables in one call. Their Python face is hvd_ext/tensorflow/updates.py.
#include "kernels/layerwise.h"

#include <algorithm>
#include <list>
#include <vector>

#include "ops/gpu_kernels.h"
#include "ops/kernel_parts.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ext {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("HvdExt>ApplyLars")
    .Input("weights: N * resource")
    .Input("velocities: N * resource")
    .Input("gradients: N * float")
    .Input("scales: float")
    .Input("momentum: float")
    .Input("rate: float")
    .Attr("N: int >= 1")
    .Attr("decays: list(float) >= 1")
    .Attr("nesterov: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
One step of LARS (LarsUpdate of tf_ops/kernels/layerwise.h), in one pass over weights, velocities and gradients.

weights: float32 variables, each another one.
velocities: float32 variables of the same shapes.
gradients: of the same shapes.
scales: for each variable its trust ratio, times the learning rate where that is inside of the momentum.
momentum: a scalar.
rate: a scalar: the learning rate where that is outside of the momentum, else 1.
decays: for each variable its weight decay.
)doc");

REGISTER_OP("HvdExt>LambUpdates")
    .Input("weights: N * resource")
    .Input("momentums: N * resource")
    .Input("velocities: N * resource")
    .Input("gradients: N * float")
    .Input("unbias: float")
    .Output("updates: N * float")
    .Attr("N: int >= 1")
    .Attr("decays: list(float) >= 1")
    .Attr("first: float")
    .Attr("second: float")
    .Attr("epsilon: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      const int n = context->num_outputs();
      for (int i = 0; i < n; ++i) context->set_output(i, context->input(3 * n + i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
A step of LAMB up to the trust ratio (LambUpdates of tf_ops/kernels/layerwise.h): both averages, and the updates.

weights: float32 variables, which are read.
momentums: float32 variables of the same shapes, each another one.
velocities: the same.
gradients: of the same shapes.
unbias: for both averages 1 / (1 - beta^t).
updates: what is subtracted from the weights, times the trust ratio and the learning rate.
decays: for each variable its weight decay.
first: 1 - beta_1.
second: 1 - beta_2.
)doc");

REGISTER_OP("HvdExt>ApplyUpdates")
    .Input("weights: N * resource")
    .Input("updates: N * float")
    .Input("rates: float")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Subtracts from each variable its update, times its rate.

weights: float32 variables, each another one.
updates: of the same shapes.
rates: for each variable a number.
)doc");

// The variables that an op has as its first inputs, locked as long as the object lives.
class Variables {
 public:
  absl::Status Hold(OpKernelContext* context, int count) {
    held_.resize(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      TF_RETURN_IF_ERROR(
          tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i), &held_[static_cast<size_t>(i)]));
    }
    written_.resize(held_.size());
    // In the order of their addresses, so that two ops that share some of them do not wait for each other.
    std::vector<tensorflow::mutex*> mutexes;
    for (const auto& variable : held_) mutexes.push_back(variable->mu());
    std::sort(mutexes.begin(), mutexes.end());
    mutexes.erase(std::unique(mutexes.begin(), mutexes.end()), mutexes.end());
    for (tensorflow::mutex* mutex : mutexes) locks_.emplace_back(*mutex);
    return absl::OkStatus();
  }

  // Checks that variable i is float32 and has the shape of `like`; `what` and `place` are its name in the error.
  absl::Status Check(const char* what, int place, int i, const Tensor& like) const {
    const Tensor& now = *at(i)->tensor();
    if (at(i)->is_initialized && now.dtype() == tensorflow::DT_FLOAT && now.shape() == like.shape()) {
      return absl::OkStatus();
    }
    return Invalid(what, " ", place, " (", tensorflow::DataTypeString(now.dtype()), ", shape ",
                   now.shape().DebugString(), "): must be float32, initialised, and of its gradient's shape, ",
                   like.shape().DebugString());
  }

  const float* Read(int i) const { return at(i)->tensor()->flat<float>().data(); }

  // Sets *data to memory for the next values of variable i, which Commit gives it.
  absl::Status Write(OpKernelContext* context, int i, float** data) {
    Tensor& written = written_[static_cast<size_t>(i)];
    TF_RETURN_IF_ERROR(MemoryToWrite(context, *at(i)->tensor(), &written));
    *data = written.flat<float>().data();
    return absl::OkStatus();
  }

  void Commit() {
    for (size_t i = 0; i < held_.size(); ++i) {
      if (written_[i].data() != nullptr) *held_[i]->tensor() = written_[i];
    }
  }

 private:
  tensorflow::Var* at(int i) const { return held_[static_cast<size_t>(i)].get(); }

  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> held_;
  std::vector<Tensor> written_;
  std::list<tensorflow::mutex_lock> locks_;
};

absl::Status OneForEach(const char* what, int64_t count, int n) {
  if (count == n) return absl::OkStatus();
  return Invalid(what, " (", count, "): must be one for each variable; there are ", n);
}

// An op with N variables in each of its lists.
class LayerwiseOp : public OpKernel {
 public:
  explicit LayerwiseOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("N", &n_));
  }

  void Compute(OpKernelContext* context) override { OP_REQUIRES_OK(context, Run(context)); }

 protected:
  virtual absl::Status Run(OpKernelContext* context) = 0;

  void GetDecays(OpKernelConstruction* construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("decays", &decays_));
    OP_REQUIRES_OK(construction, OneForEach("decays", static_cast<int64_t>(decays_.size()), n_));
  }
  float Decay(int i) const { return decays_[static_cast<size_t>(i)]; }

  // Updates the variables where the op runs: host(workers), or on_gpu(kernels, workspace, its bytes, stream), which
  // enqueues.
  template <typename Host, typename Gpu>
  absl::Status Update(OpKernelContext* context, const Host& host, const Gpu& on_gpu) {
    if (StreamOf(context) == nullptr) {
      host(WorkersOf(context));
      return absl::OkStatus();
    }
    return OnGpu(
        context, [this](const GpuKernels& kernels) { return kernels.layerwise_workspace(n_); },
        [&](const GpuKernels& kernels, void* workspace, int64_t nbytes) {
          return on_gpu(kernels, workspace, nbytes, StreamOf(context));
        });
  }

  int n_ = 0;

 private:
  std::vector<float> decays_;
};

class ApplyLarsOp : public LayerwiseOp {
 public:
  explicit ApplyLarsOp(OpKernelConstruction* construction) : LayerwiseOp(construction) {
    GetDecays(construction);
    OP_REQUIRES_OK(construction, construction->GetAttr("nesterov", &nesterov_));
  }

 protected:
  absl::Status Run(OpKernelContext* context) override {
    const Tensor &scales = context->input(3 * n_), &momentum = context->input(3 * n_ + 1),
                 &rate = context->input(3 * n_ + 2);
    TF_RETURN_IF_ERROR(OneForEach("scales", scales.NumElements(), n_));
    if (momentum.NumElements() != 1 || rate.NumElements() != 1) {
      return Invalid("momentum (", momentum.NumElements(), " numbers) and rate (", rate.NumElements(),
                     "): must be one number");
    }
    Variables variables;
    TF_RETURN_IF_ERROR(variables.Hold(context, 2 * n_));
    std::vector<LarsVariable> all(static_cast<size_t>(n_));
    for (int i = 0; i < n_; ++i) {
      const Tensor& gradient = context->input(2 * n_ + i);
      TF_RETURN_IF_ERROR(variables.Check("weights", i, i, gradient));
      TF_RETURN_IF_ERROR(variables.Check("velocity", i, n_ + i, gradient));
      LarsVariable& one = all[static_cast<size_t>(i)];
      one = {variables.Read(i),
             variables.Read(n_ + i),
             gradient.flat<float>().data(),
             nullptr,
             nullptr,
             gradient.NumElements(),
             Decay(i)};
      TF_RETURN_IF_ERROR(variables.Write(context, i, &one.next_weights));
      TF_RETURN_IF_ERROR(variables.Write(context, n_ + i, &one.next_velocity));
    }
    const LarsStep step{scales.flat<float>().data(), momentum.flat<float>().data(), rate.flat<float>().data(),
                        nesterov_};
    TF_RETURN_IF_ERROR(Update(
        context, [&](const auto& workers) { LarsUpdate(all.data(), n_, step, workers); },
        [&](const GpuKernels& kernels, void* workspace, int64_t nbytes, void* stream) {
          return kernels.lars(all.data(), n_, &step, workspace, nbytes, stream);
        }));
    variables.Commit();
    return absl::OkStatus();
  }

 private:
  bool nesterov_ = false;
};

class LambUpdatesOp : public LayerwiseOp {
 public:
  explicit LambUpdatesOp(OpKernelConstruction* construction) : LayerwiseOp(construction) {
    GetDecays(construction);
    OP_REQUIRES_OK(construction, construction->GetAttr("first", &step_.first));
    OP_REQUIRES_OK(construction, construction->GetAttr("second", &step_.second));
    OP_REQUIRES_OK(construction, construction->GetAttr("epsilon", &step_.epsilon));
  }

 protected:
  absl::Status Run(OpKernelContext* context) override {
    const Tensor& unbias = context->input(4 * n_);
    if (unbias.NumElements() != 2) return Invalid("unbias (", unbias.NumElements(), "): must be two numbers");
    Variables variables;
    TF_RETURN_IF_ERROR(variables.Hold(context, 3 * n_));
    std::vector<LambVariable> all(static_cast<size_t>(n_));
    for (int i = 0; i < n_; ++i) {
      const Tensor& gradient = context->input(3 * n_ + i);
      TF_RETURN_IF_ERROR(variables.Check("weights", i, i, gradient));
      TF_RETURN_IF_ERROR(variables.Check("momentum", i, n_ + i, gradient));
      TF_RETURN_IF_ERROR(variables.Check("velocity", i, 2 * n_ + i, gradient));
      Tensor* update = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(i, gradient.shape(), &update));
      LambVariable& one = all[static_cast<size_t>(i)];
      one = {variables.Read(i),
             gradient.flat<float>().data(),
             variables.Read(n_ + i),
             variables.Read(2 * n_ + i),
             nullptr,
             nullptr,
             update->flat<float>().data(),
             gradient.NumElements(),
             Decay(i)};
      TF_RETURN_IF_ERROR(variables.Write(context, n_ + i, &one.next_momentum));
      TF_RETURN_IF_ERROR(variables.Write(context, 2 * n_ + i, &one.next_velocity));
    }
    LambStep step = step_;
    step.unbias = unbias.flat<float>().data();
    TF_RETURN_IF_ERROR(Update(
        context, [&](const auto& workers) { LambUpdates(all.data(), n_, step, workers); },
        [&](const GpuKernels& kernels, void* workspace, int64_t nbytes, void* stream) {
          return kernels.lamb(all.data(), n_, &step, workspace, nbytes, stream);
        }));
    variables.Commit();
    return absl::OkStatus();
  }

 private:
  LambStep step_{};
};

class ApplyUpdatesOp : public LayerwiseOp {
 public:
  using LayerwiseOp::LayerwiseOp;

 protected:
  absl::Status Run(OpKernelContext* context) override {
    const Tensor& rates = context->input(2 * n_);
    TF_RETURN_IF_ERROR(OneForEach("rates", rates.NumElements(), n_));
    Variables variables;
    TF_RETURN_IF_ERROR(variables.Hold(context, n_));
    std::vector<MovedVariable> all(static_cast<size_t>(n_));
    for (int i = 0; i < n_; ++i) {
      const Tensor& update = context->input(n_ + i);
      TF_RETURN_IF_ERROR(variables.Check("weights", i, i, update));
      MovedVariable& one = all[static_cast<size_t>(i)];
      one = {variables.Read(i), update.flat<float>().data(), nullptr, update.NumElements()};
      TF_RETURN_IF_ERROR(variables.Write(context, i, &one.next_weights));
    }
    const float* each = rates.flat<float>().data();
    TF_RETURN_IF_ERROR(Update(
        context, [&](const auto& workers) { ApplyUpdates(all.data(), n_, each, workers); },
        [&](const GpuKernels& kernels, void* workspace, int64_t nbytes, void* stream) {
          return kernels.move(all.data(), n_, each, workspace, nbytes, stream);
        }));
    variables.Commit();
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>ApplyLars").Device(tensorflow::DEVICE_CPU), ApplyLarsOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>LambUpdates").Device(tensorflow::DEVICE_CPU), LambUpdatesOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>ApplyUpdates").Device(tensorflow::DEVICE_CPU), ApplyUpdatesOp);
REGISTER_KERNEL_BUILDER(
    Name("HvdExt>ApplyLars").Device(tensorflow::DEVICE_GPU).HostMemory("weights").HostMemory("velocities"),
    ApplyLarsOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>LambUpdates")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("weights")
                            .HostMemory("momentums")
                            .HostMemory("velocities"),
                        LambUpdatesOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>ApplyUpdates").Device(tensorflow::DEVICE_GPU).HostMemory("weights"),
                        ApplyUpdatesOp);

}  // namespace
}  // namespace hvd_ext

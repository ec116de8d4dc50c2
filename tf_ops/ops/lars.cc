// The update of LARS, all variables in one call. Its Python face is hvd_ext/tensorflow/norms.py.
#include "kernels/lars.h"

#include <algorithm>
#include <list>
#include <vector>

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
One step of LARS (LarsUpdate of tf_ops/kernels/lars.h), in one pass over weights, velocities and gradients.

weights: float32 variables, each another one.
velocities: float32 variables of the same shapes.
gradients: of the same shapes.
scales: for each variable its trust ratio, times the learning rate where that is inside of the momentum.
momentum: a scalar.
rate: a scalar: the learning rate where that is outside of the momentum, else 1.
decays: for each variable its weight decay.
)doc");

using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

// Locks variables in the order of their addresses, so that two ops that share some of them do not wait for each other.
class Locks {
 public:
  explicit Locks(const std::vector<Variable>& variables) {
    std::vector<tensorflow::mutex*> mutexes;
    for (const Variable& variable : variables) mutexes.push_back(variable->mu());
    std::sort(mutexes.begin(), mutexes.end());
    mutexes.erase(std::unique(mutexes.begin(), mutexes.end()), mutexes.end());
    for (tensorflow::mutex* mutex : mutexes) locks_.emplace_back(*mutex);
  }

 private:
  std::list<tensorflow::mutex_lock> locks_;
};

class ApplyLarsOp : public OpKernel {
 public:
  explicit ApplyLarsOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("N", &n_));
    OP_REQUIRES_OK(construction, construction->GetAttr("decays", &decays_));
    OP_REQUIRES_OK(construction, construction->GetAttr("nesterov", &step_.nesterov));
    OP_REQUIRES(construction, static_cast<int>(decays_.size()) == n_,
                Invalid("decays (", decays_.size(), "): must be one for each variable; there are ", n_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &scales = context->input(3 * n_), &momentum = context->input(3 * n_ + 1),
                 &rate = context->input(3 * n_ + 2);
    OP_REQUIRES(
        context, scales.NumElements() == n_ && momentum.NumElements() == 1 && rate.NumElements() == 1,
        Invalid("scales (", scales.NumElements(), "): must be one for each variable, which are ", n_,
                ", and momentum (", momentum.NumElements(), ") and rate (", rate.NumElements(), ") one number"));
    std::vector<Variable> variables(static_cast<size_t>(2 * n_));
    for (int i = 0; i < 2 * n_; ++i) {
      OP_REQUIRES_OK(context, tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i),
                                                         &variables[static_cast<size_t>(i)]));
    }
    const Locks locks(variables);
    std::vector<Tensor> written(variables.size());
    std::vector<LarsVariable> all;
    for (int i = 0; i < n_; ++i) {
      const Tensor& gradient = context->input(2 * n_ + i);
      for (int j : {i, n_ + i}) {
        const size_t place = static_cast<size_t>(j);
        OP_REQUIRES_OK(context, ToWrite(context, j < n_ ? "weights" : "velocity", i, gradient, variables[place].get(),
                                        &written[place]));
      }
      const size_t weight = static_cast<size_t>(i), velocity = static_cast<size_t>(n_ + i);
      all.push_back({variables[weight]->tensor()->flat<float>().data(),
                     variables[velocity]->tensor()->flat<float>().data(), gradient.flat<float>().data(),
                     written[weight].flat<float>().data(), written[velocity].flat<float>().data(),
                     gradient.NumElements(), scales.flat<float>()(i), decays_[weight]});
    }
    LarsStep step = step_;
    step.momentum = momentum.flat<float>()(0);
    step.rate = rate.flat<float>()(0);
    LarsUpdate(all.data(), n_, step, WorkersOf(context));
    for (size_t i = 0; i < variables.size(); ++i) *variables[i]->tensor() = written[i];
  }

 private:
  // Sets *written as MemoryToWrite does.
  static absl::Status ToWrite(OpKernelContext* context, const char* what, int place, const Tensor& gradient,
                              tensorflow::Var* variable, Tensor* written) {
    const Tensor& now = *variable->tensor();
    if (!variable->is_initialized || now.dtype() != tensorflow::DT_FLOAT || now.shape() != gradient.shape()) {
      return Invalid(what, " ", place, " (", tensorflow::DataTypeString(now.dtype()), ", shape ",
                     now.shape().DebugString(), "): must be float32, initialised, and of its gradient's shape, ",
                     gradient.shape().DebugString());
    }
    return MemoryToWrite(context, now, written);
  }

  int n_ = 0;
  std::vector<float> decays_;
  LarsStep step_{};
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>ApplyLars").Device(tensorflow::DEVICE_CPU), ApplyLarsOp);

}  // namespace
}  // namespace hvd_ext

// The ops of a channel: begin a step, hand a gradient over, get it back reduced. Their Python face is
// hvd_ext/tensorflow/gradients/registration.py.
//
// Submit returns at once, and Collect is asynchronous: no thread of TensorFlow ever waits for the network, so that
// back-propagation goes on while buckets travel. In a graph, a Collect depends on its own Submit only.
#include <cstring>

#include "engine/engine.h"
#include "ops/pending.h"
#include "ops/status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ext {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

REGISTER_OP("HvdExt>BeginStep")
    .Attr("channel: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Begins a step of a channel; all submits of the step run after it.

channel: the channel's handle; it belongs to one init(), a later engine refuses it.
)doc");

REGISTER_OP("HvdExt>BeginSparseStep")
    .Input("density: double")
    .Attr("channel: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Begins a step of a channel with sparse buckets, in place of BeginStep; all submits of the step run after it.

density: scalar in [0, 1], the part of a sparse bucket's elements that is selected.
channel: the channel's handle.
)doc");

REGISTER_OP("HvdExt>EndStep")
    .Input("ok: bool")
    .Attr("channel: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Ends a step of a channel with sparse buckets; it runs after all collects of the step.

ok: scalar, the same on all ranks: true commits the residuals and velocities of the step, false leaves them as before.
channel: the channel's handle.
)doc");

REGISTER_OP("HvdExt>Submit")
    .Input("gradient: T")
    .Output("ticket: int64")
    .Attr("T: {float, double, half, bfloat16, int32, int64}")
    .Attr("channel: int")
    .Attr("tensor: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Copies a gradient into its bucket, which travels when it is full; returns at once.

gradient: this rank's values.
ticket: the step that the gradient belongs to, for Collect.
channel: the channel's handle.
tensor: index of the gradient in the channel.
)doc");

REGISTER_OP("HvdExt>Collect")
    .Input("ticket: int64")
    .Output("reduced: T")
    .Attr("T: {float, double, half, bfloat16, int32, int64}")
    .Attr("shape: shape")
    .Attr("channel: int")
    .Attr("tensor: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc(R"doc(
Gives the reduced gradient, bit-identical on all ranks, when its bucket has come back.

ticket: from the Submit of the same gradient.
reduced: the sum or average over the ranks.
shape: the gradient's shape.
channel: the channel's handle.
tensor: index of the gradient in the channel.
)doc");

absl::Status ScalarInput(OpKernelContext* context, const char* name) {
  const TensorShape& shape = context->input(0).shape();
  if (tensorflow::TensorShapeUtils::IsScalar(shape)) return ToTensorFlow(Status::Ok());
  return ToTensorFlow(Invalid(std::string(name) + " must be a scalar, its shape is " + shape.DebugString()));
}

class BeginStepOp : public OpKernel {
 public:
  explicit BeginStepOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("channel", &channel_));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<Engine> engine;
    OP_REQUIRES_OK(context, ToTensorFlow(Engine::OfChannel(channel_, &engine)));
    OP_REQUIRES_OK(context, ToTensorFlow(engine->BeginStep(channel_)));
  }

 private:
  int64_t channel_;
};

class BeginSparseStepOp : public OpKernel {
 public:
  explicit BeginSparseStepOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("channel", &channel_));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<Engine> engine;
    OP_REQUIRES_OK(context, ScalarInput(context, "density"));
    OP_REQUIRES_OK(context, ToTensorFlow(Engine::OfChannel(channel_, &engine)));
    OP_REQUIRES_OK(context, ToTensorFlow(engine->BeginSparseStep(channel_, context->input(0).scalar<double>()())));
  }

 private:
  int64_t channel_;
};

class EndStepOp : public OpKernel {
 public:
  explicit EndStepOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("channel", &channel_));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<Engine> engine;
    OP_REQUIRES_OK(context, ScalarInput(context, "ok"));
    OP_REQUIRES_OK(context, ToTensorFlow(Engine::OfChannel(channel_, &engine)));
    OP_REQUIRES_OK(context, ToTensorFlow(engine->EndStep(channel_, context->input(0).scalar<bool>()())));
  }

 private:
  int64_t channel_;
};

class SubmitOp : public OpKernel {
 public:
  explicit SubmitOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("channel", &channel_));
    OP_REQUIRES_OK(construction, construction->GetAttr("tensor", &tensor_));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<Engine> engine;
    OP_REQUIRES_OK(context, ToTensorFlow(Engine::OfChannel(channel_, &engine)));
    const auto bytes = context->input(0).tensor_data();
    int64_t ticket = 0;
    OP_REQUIRES_OK(context, ToTensorFlow(engine->Submit(channel_, tensor_, bytes.data(), bytes.size(), &ticket)));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    output->scalar<int64_t>()() = ticket;
  }

 private:
  int64_t channel_;
  int64_t tensor_;
};

class CollectOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectOp(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("channel", &channel_));
    OP_REQUIRES_OK(construction, construction->GetAttr("tensor", &tensor_));
    OP_REQUIRES_OK(construction, construction->GetAttr("shape", &shape_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<Engine> engine;
    OP_REQUIRES_OK_ASYNC(context, ToTensorFlow(Engine::OfChannel(channel_, &engine)), done);
    const int64_t ticket = context->input(0).scalar<int64_t>()(), channel = channel_, tensor = tensor_;
    const TensorShape shape = shape_;
    // The kernel may be gone from here on: a cancelled step is done at once.
    auto pending = Pending::Begin(context, std::move(done));
    engine->Collect(channel, tensor, ticket, [pending, shape](const Status& status, const void* data) {
      pending->End([&](OpKernelContext* c) {
        if (!status.ok()) return c->SetStatus(ToTensorFlow(status));
        Tensor* output = nullptr;
        OP_REQUIRES_OK(c, c->allocate_output(0, shape, &output));
        const auto bytes = output->tensor_data();
        if (!bytes.empty()) std::memcpy(const_cast<char*>(bytes.data()), data, bytes.size());
      });
    });
  }

 private:
  int64_t channel_;
  int64_t tensor_;
  TensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>BeginStep").Device(tensorflow::DEVICE_CPU), BeginStepOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>BeginSparseStep").Device(tensorflow::DEVICE_CPU), BeginSparseStepOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>EndStep").Device(tensorflow::DEVICE_CPU), EndStepOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Submit").Device(tensorflow::DEVICE_CPU), SubmitOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Collect").Device(tensorflow::DEVICE_CPU), CollectOp);

}  // namespace
}  // namespace hvd_ext

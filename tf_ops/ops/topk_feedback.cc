// Error feedback and selection in one op. Its Python face is hvd_ext/tensorflow/topk/ops.py.
#include "kernels/denormals.h"
#include "ops/topk_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace hvd_ext {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("HvdExt>TopKErrorFeedback")
    .Input("residual: float")
    .Input("gradient: float")
    .Input("k: int64")
    .Input("offsets: int64")
    .Output("next_residual: float")
    .Output("values: float")
    .Output("indices: Tindices")
    .Output("counts: int64")
    .Attr("Tindices: {int32, int64} = DT_INT32")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(1), &shape));
      c->set_output(0, shape);
      return PickShapes(c, 2, 1, 2, 3);
    })
    .Doc(R"doc(
Adds the gradient to the residual, selects from the sum, and leaves what was not selected, in one pass.

residual: what earlier steps left.
gradient: of the same shape.
next_residual: residual + gradient, 0 at the picks; the residual's memory where there is no other reference.
values: residual + gradient at the indices.
)doc");

REGISTER_OP("HvdExt>ResourceTopKErrorFeedback")
    .Input("residual: resource")
    .Input("gradient: float")
    .Input("k: int64")
    .Input("offsets: int64")
    .Output("values: float")
    .Output("indices: Tindices")
    .Output("counts: int64")
    .Attr("Tindices: {int32, int64} = DT_INT32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return PickShapes(c, 2, 0, 1, 2); })
    .Doc(R"doc(
The same on a variable, in its memory unless there is another reference.

residual: a float32 variable of the gradient's shape.
)doc");

absl::Status CheckShapes(const Tensor& residual, const Tensor& gradient) {
  if (residual.dtype() != tensorflow::DT_FLOAT) {
    return Invalid("residual (", tensorflow::DataTypeString(residual.dtype()), "): must be float32");
  }
  if (residual.shape() != gradient.shape()) {
    return Invalid("residual (shape ", residual.shape().DebugString(), "): must have the gradient's shape, ",
                   gradient.shape().DebugString());
  }
  return absl::OkStatus();
}

// Inputs 1, 2 and 3 are gradient, k and offsets; outputs from `first` on are the picks. `next` gives the tensor that
// the residual is written to; it is called when everything has been checked.
class FeedbackOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

 protected:
  template <typename Next>
  absl::Status Run(OpKernelContext* context, const Tensor& residual, int first, Next next) {
    const Tensor& gradient = context->input(1);
    TF_RETURN_IF_ERROR(CheckShapes(residual, gradient));
    const bool wide = context->expected_output_dtype(first + 1) == tensorflow::DT_INT64;
    std::vector<TopKSegment> segments;
    int64_t count = 0;
    TF_RETURN_IF_ERROR(
        SegmentsOf(context->input(2), context->input(3), gradient.NumElements(), wide, &segments, &count));
    const int64_t n_segments = static_cast<int64_t>(segments.size());
    Picks picks;
    TF_RETURN_IF_ERROR(picks.Allocate(context, first, count, n_segments));
    ErrorFeedback feedback;
    feedback.gradient = gradient.flat<float>().data();
    feedback.residual = residual.flat<float>().data();
    TF_RETURN_IF_ERROR(next(&feedback.next_residual));
    auto scratch = scratches_.Take();
    bool non_finite = false;
    const WithDenormals denormals;  // small values must not be lost; WithTheCaller does the same for other threads
    TopKErrorFeedback(TopKOptions(), feedback, segments.data(), n_segments, scratch.get(), WorkersOf(context),
                      picks.Counts(), picks.Indices(), wide, static_cast<float*>(picks.Values()), &non_finite);
    scratches_.Give(std::move(scratch));
    return absl::OkStatus();
  }

 private:
  Scratches scratches_;
};

class TopKErrorFeedbackOp : public FeedbackOp {
 public:
  using FeedbackOp::FeedbackOp;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(
        context, Run(context, context->input(0), 1, [context](float** next) {
          Tensor* output = nullptr;
          TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output));
          *next = output->flat<float>().data();
          return absl::OkStatus();
        }));
  }
};

class ResourceTopKErrorFeedbackOp : public FeedbackOp {
 public:
  using FeedbackOp::FeedbackOp;

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    OP_REQUIRES(context, variable->is_initialized, Invalid("residual: the variable must be initialised first"));
    Tensor* residual = variable->tensor();
    Tensor fresh;
    OP_REQUIRES_OK(context, Run(context, *residual, 0, [&](float** next) {
                     // A tensor that was read from the variable keeps its values.
                     if (!residual->RefCountIsOne()) {
                       TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, residual->shape(), &fresh));
                     }
                     *next = (residual->RefCountIsOne() ? *residual : fresh).flat<float>().data();
                     return absl::OkStatus();
                   }));
    if (fresh.NumElements() > 0) *residual = fresh;
  }
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>TopKErrorFeedback").Device(tensorflow::DEVICE_CPU), TopKErrorFeedbackOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>ResourceTopKErrorFeedback").Device(tensorflow::DEVICE_CPU),
                        ResourceTopKErrorFeedbackOp);

}  // namespace
}  // namespace hvd_ext

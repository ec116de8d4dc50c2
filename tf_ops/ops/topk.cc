// The op of the selection, on TensorFlow's worker threads. Its Python face is hvd_ext/tensorflow/topk/ops.py.
#include "ops/dtype.h"
#include "ops/topk_inputs.h"
#include "tensorflow/core/framework/op.h"

namespace hvd_ext {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("HvdExt>TopK")
    .Input("x: T")
    .Input("k: int64")
    .Input("offsets: int64")
    .Input("seed: int64")
    .Output("values: T")
    .Output("indices: Tindices")
    .Output("counts: int64")
    .Attr("T: {float, double, half, bfloat16}")
    .Attr("Tindices: {int32, int64} = DT_INT32")
    .Attr("selector: int >= 0 = 0")
    .Attr("samplings: int >= 0 = 30")
    .Attr("threshold: float = 0.0")
    .SetShapeFn([](InferenceContext* c) { return PickShapes(c, 1, 0, 1, 2); })
    .Doc(R"doc(
Selects the k elements of greatest magnitude of every segment of x.

x: any shape, read in memory order.
k: picks of each segment, at most its elements.
offsets: segment s is [offsets[s], offsets[s + 1]) of x.
seed: a scalar for the selectors that draw at random.
values: x at the indices; 0 at places that are not used.
indices: positions in x, ascending in each segment; -1 at places that are not used.
counts: picks of each segment; they stand first in its k places.
selector: number of the selector (Selector of tf_ops/kernels/topk.h).
samplings: N of MSTopK.
threshold: magnitude for the threshold selector.
)doc");

class TopKOp : public OpKernel {
 public:
  explicit TopKOp(OpKernelConstruction* construction) : OpKernel(construction) {
    int selector = 0;
    float threshold = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("selector", &selector));
    OP_REQUIRES_OK(construction, construction->GetAttr("samplings", &options_.samplings));
    OP_REQUIRES_OK(construction, construction->GetAttr("threshold", &threshold));
    OP_REQUIRES(construction, selector <= static_cast<int>(Selector::kRandom),
                Invalid("selector (", selector, "): must be from 0 to ", static_cast<int>(Selector::kRandom)));
    options_.selector = static_cast<Selector>(selector);
    options_.threshold = threshold;
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    const bool wide = context->expected_output_dtype(1) == tensorflow::DT_INT64;
    std::vector<TopKSegment> segments;
    int64_t count = 0;
    OP_REQUIRES_OK(context, SegmentsOf(context->input(1), context->input(2), x.NumElements(), wide, &segments, &count));
    OP_REQUIRES(context, tensorflow::TensorShapeUtils::IsScalar(context->input(3).shape()),
                Invalid("seed (shape ", context->input(3).shape().DebugString(), "): must be a scalar"));
    TopKOptions options = options_;
    options.seed = static_cast<uint64_t>(context->input(3).scalar<int64_t>()());
    Picks picks;
    const int64_t n_segments = static_cast<int64_t>(segments.size());
    OP_REQUIRES_OK(context, picks.Allocate(context, 0, count, n_segments));
    auto scratch = scratches_.Take();
    bool non_finite = false;
    TopK(options, FromTensorFlow(x.dtype()), x.tensor_data().data(), segments.data(), n_segments, scratch.get(),
         WorkersOf(context), picks.Counts(), picks.Indices(), wide, picks.Values(), &non_finite);
    scratches_.Give(std::move(scratch));
    picks.ClearUnused(segments);
  }

 private:
  TopKOptions options_;
  Scratches scratches_;
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>TopK").Device(tensorflow::DEVICE_CPU), TopKOp);

}  // namespace
}  // namespace hvd_ext

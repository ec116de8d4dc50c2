// The ops of the selection, on TensorFlow's worker threads, with and without error feedback. Their Python face is
// hvd_ext/tensorflow/topk/ops.py.
#include "kernels/topk.h"

#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/denormals.h"
#include "ops/dtype.h"
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
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

// The inputs k and offsets, and the outputs values indices and counts, by their places.
absl::Status PickShapes(InferenceContext* c, int k_input, int values, int indices, int counts) {
  tensorflow::shape_inference::ShapeHandle k, offsets;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(k_input), 1, &k));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(k_input + 1), 1, &offsets));
  tensorflow::shape_inference::DimensionHandle segments;
  TF_RETURN_IF_ERROR(c->Subtract(c->Dim(offsets, 0), 1, &segments));
  TF_RETURN_IF_ERROR(c->Merge(segments, c->Dim(k, 0), &segments));
  tensorflow::shape_inference::DimensionHandle picks = c->UnknownDim();
  if (const Tensor* known = c->input_tensor(k_input)) {
    int64_t sum = 0;
    for (int64_t i = 0; i < known->NumElements(); ++i) sum += known->flat<int64_t>()(i);
    if (sum >= 0) picks = c->MakeDim(sum);
  }
  c->set_output(values, c->Vector(picks));
  c->set_output(indices, c->Vector(picks));
  c->set_output(counts, c->Vector(segments));
  return absl::OkStatus();
}

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

// Reads and checks the segments.
absl::Status SegmentsOf(const Tensor& k, const Tensor& offsets, int64_t elements, bool wide,
                        std::vector<TopKSegment>* segments, int64_t* picks) {
  if (k.dims() != 1 || offsets.dims() != 1 || offsets.NumElements() != k.NumElements() + 1) {
    return Invalid("offsets (shape ", offsets.shape().DebugString(), "): must have one element more than k (shape ",
                   k.shape().DebugString(), "), both of one dimension");
  }
  if (!wide && elements > std::numeric_limits<int32_t>::max()) {
    return Invalid("indices (int32): must hold every position; x has ", elements, " elements; ask for int64");
  }
  const auto places = offsets.vec<int64_t>();
  const auto ks = k.vec<int64_t>();
  if (places(0) != 0 || places(k.NumElements()) != elements) {
    return Invalid("segments (from ", places(0), " to ", places(k.NumElements()), "): must cover x; it has ", elements,
                   " elements");
  }
  *picks = 0;
  for (int64_t s = 0; s < k.NumElements(); ++s) {
    const int64_t length = places(s + 1) - places(s);
    if (length < 0 || places(s + 1) > elements) {
      return Invalid("segment ", s, " (", length, " elements): must have 0 or more; offsets must ascend");
    }
    if (ks(s) < 0 || ks(s) > length) {
      return Invalid("k (", ks(s), "): must be from 0 to the number of elements; segment ", s, " has ", length);
    }
    segments->push_back({places(s), length, ks(s)});
    *picks += ks(s);
  }
  return absl::OkStatus();
}

// Outputs of the picks, and what is not used of them afterwards.
struct Picks {
  Tensor* values = nullptr;
  Tensor* indices = nullptr;
  Tensor* counts = nullptr;
  bool wide = false;  // indices are int64

  absl::Status Allocate(OpKernelContext* context, int first, int64_t picks, int64_t segments) {
    TF_RETURN_IF_ERROR(context->allocate_output(first, TensorShape({picks}), &values));
    TF_RETURN_IF_ERROR(context->allocate_output(first + 1, TensorShape({picks}), &indices));
    return context->allocate_output(first + 2, TensorShape({segments}), &counts);
  }
  int64_t* Counts() { return counts->vec<int64_t>().data(); }
  void* Indices() { return const_cast<char*>(indices->tensor_data().data()); }
  void* Values() { return const_cast<char*>(values->tensor_data().data()); }

  void ClearUnused(const std::vector<TopKSegment>& segments) {
    int64_t place = 0;
    const size_t index_size = tensorflow::DataTypeSize(indices->dtype());
    const size_t value_size = tensorflow::DataTypeSize(values->dtype());
    for (size_t s = 0; s < segments.size(); ++s) {
      const int64_t begin = place + Counts()[s];
      place += segments[s].k;
      const size_t unused = static_cast<size_t>(place - begin);
      if (unused == 0) continue;
      std::memset(static_cast<char*>(Indices()) + begin * index_size, 0xff, unused * index_size);
      std::memset(static_cast<char*>(Values()) + begin * value_size, 0, unused * value_size);
    }
  }
};

// An op that selects. Kernels may run several times at once: each run borrows its own memory.
class SelectionOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

 protected:
  // Reads the segments from the inputs k and offsets, and runs body(segments, picks, scratch); the outputs
  // from `first` on are the picks.
  template <typename Body>
  absl::Status Select(OpKernelContext* context, int k_input, int64_t elements, int first, const Body& body) {
    std::vector<TopKSegment> segments;
    Picks picks;
    picks.wide = context->expected_output_dtype(first + 1) == tensorflow::DT_INT64;
    int64_t count = 0;
    TF_RETURN_IF_ERROR(
        SegmentsOf(context->input(k_input), context->input(k_input + 1), elements, picks.wide, &segments, &count));
    TF_RETURN_IF_ERROR(picks.Allocate(context, first, count, static_cast<int64_t>(segments.size())));
    std::unique_ptr<TopKScratch> scratch = Take();
    const absl::Status done = body(segments, &picks, scratch.get());
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(scratch));
    return done;
  }

 private:
  std::unique_ptr<TopKScratch> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<TopKScratch>();
    auto scratch = std::move(free_.back());
    free_.pop_back();
    return scratch;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<TopKScratch>> free_;
};

class TopKOp : public SelectionOp {
 public:
  explicit TopKOp(OpKernelConstruction* construction) : SelectionOp(construction) {
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
    OP_REQUIRES(context, tensorflow::TensorShapeUtils::IsScalar(context->input(3).shape()),
                Invalid("seed (shape ", context->input(3).shape().DebugString(), "): must be a scalar"));
    if (StreamOf(context) != nullptr) {
      OP_REQUIRES_OK(context, OnStream(context, x));
      return;
    }
    TopKOptions options = options_;
    options.seed = static_cast<uint64_t>(context->input(3).scalar<int64_t>()());
    const auto select = [&](const std::vector<TopKSegment>& segments, Picks* picks, TopKScratch* scratch) {
      bool non_finite = false;
      TopK(options, FromTensorFlow(x.dtype()), x.tensor_data().data(), segments.data(),
           static_cast<int64_t>(segments.size()), scratch, WorkersOf(context), picks->Counts(), picks->Indices(),
           picks->wide, picks->Values(), &non_finite);
      picks->ClearUnused(segments);
      return absl::OkStatus();
    };
    OP_REQUIRES_OK(context, Select(context, 1, x.NumElements(), 0, select));
  }

 private:
  // On a GPU; the counts and all inputs but x are in the host's memory.
  absl::Status OnStream(OpKernelContext* context, const Tensor& x) {
    if (options_.selector != Selector::kExact) {
      return absl::UnimplementedError("on a GPU only the exact selector (0) is implemented");
    }
    const auto select = [&](const std::vector<TopKSegment>& segments, Picks* picks, TopKScratch*) {
      std::vector<HvdExtTopKSegment> all;
      for (size_t s = 0; s < segments.size(); ++s) {
        all.push_back({segments[s].begin, segments[s].elements, segments[s].k});
        picks->Counts()[s] = segments[s].k;
      }
      const int64_t n = static_cast<int64_t>(all.size());
      const int32_t dtype = static_cast<int32_t>(FromTensorFlow(x.dtype()));
      return OnGpu(
          context, [&](const GpuKernels& kernels) { return kernels.topk_workspace(dtype, all.data(), n); },
          [&](const GpuKernels& kernels, void* workspace, int64_t nbytes) {
            return kernels.topk(dtype, x.tensor_data().data(), all.data(), n, picks->Indices(), picks->wide,
                                picks->Values(), nullptr, workspace, nbytes, StreamOf(context));
          });
    };
    return Select(context, 1, x.NumElements(), 0, select);
  }

  TopKOptions options_;
};

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

// Inputs 1, 2 and 3 are gradient, k and offsets; outputs from `first` on are the picks. `next` gives the memory that
// the residual is written to; it is called when everything has been checked.
class FeedbackOp : public SelectionOp {
 public:
  using SelectionOp::SelectionOp;

 protected:
  template <typename Next>
  absl::Status Run(OpKernelContext* context, const Tensor& residual, int first, Next next) {
    const Tensor& gradient = context->input(1);
    TF_RETURN_IF_ERROR(CheckShapes(residual, gradient));
    const auto select = [&](const std::vector<TopKSegment>& segments, Picks* picks, TopKScratch* scratch) {
      ErrorFeedback feedback;
      feedback.gradient = gradient.flat<float>().data();
      feedback.residual = residual.flat<float>().data();
      TF_RETURN_IF_ERROR(next(&feedback.next_residual));
      bool non_finite = false;
      const WithDenormals denormals;  // small values must not be lost; WithTheCaller does the same for other threads
      TopKErrorFeedback(TopKOptions(), feedback, segments.data(), static_cast<int64_t>(segments.size()), scratch,
                        WorkersOf(context), picks->Counts(), picks->Indices(), picks->wide,
                        static_cast<float*>(picks->Values()), &non_finite);
      return absl::OkStatus();
    };
    return Select(context, 2, gradient.NumElements(), first, select);
  }
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
    Tensor written;
    OP_REQUIRES_OK(context, Run(context, *residual, 0, [&](float** next) {
                     TF_RETURN_IF_ERROR(MemoryToWrite(context, *residual, &written));
                     *next = written.flat<float>().data();
                     return absl::OkStatus();
                   }));
    *residual = written;
  }
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>TopK").Device(tensorflow::DEVICE_CPU), TopKOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>TopK")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("k")
                            .HostMemory("offsets")
                            .HostMemory("seed")
                            .HostMemory("counts"),
                        TopKOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>TopKErrorFeedback").Device(tensorflow::DEVICE_CPU), TopKErrorFeedbackOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>ResourceTopKErrorFeedback").Device(tensorflow::DEVICE_CPU),
                        ResourceTopKErrorFeedbackOp);

}  // namespace
}  // namespace hvd_ext

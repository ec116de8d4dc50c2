// The collectives that a user calls by name: allreduce, allgather, broadcast, reducescatter, alltoall, barrier. Their
// Python face is hvd_ext/tensorflow/collectives/single.py. All are asynchronous: the engine matches the ranks' calls
// and ends the op.
//
// The plan of a call depends on the tensor's size, which a graph may not know when it is built. The ops carry one row
// per class of sizes (attributes limits, plans, digests, segments) and take the first whose limit is not below the
// size.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "ops/dtype.h"
#include "ops/pending.h"
#include "ops/status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ext {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

#define HVD_EXT_REDUCED "T: {float, double, half, bfloat16, int32, int64}"
#define HVD_EXT_MOVED "T: {float, double, half, bfloat16, int32, int64, uint8}"

// The rows of size classes are the same four attributes in each op.
#define HVD_EXT_REGISTER(name)         \
  REGISTER_OP(name)                    \
      .Input("call_name: string")      \
      .Input("tensor: T")              \
      .Input("signature: string")      \
      .Output("result: T")             \
      .Attr("dtype: string = ''")      \
      .Attr("counted: bool = false")   \
      .Attr("limits: list(int) >= 1")  \
      .Attr("plans: list(int) >= 1")   \
      .Attr("digests: list(int) >= 1") \
      .Attr("segments: list(int) >= 1")

// The documentation of an op: what is its own, and what all have.
std::string CallDoc(const char* own) {
  return std::string(own) + R"doc(limits: sizes in bytes, ascending; the last row takes what is larger.
plans: the engine's plan for each class of sizes.
digests: the plans' digests, compared over the ranks.
segments: the pipelining grain in bytes.
dtype: the user's, where the tensor travels in another one.
call_name: matches the ranks' calls; its n-th use on one rank meets the n-th use on the others.
counted: the name is a number; two such calls of one rank at once are an error.
signature: what else all ranks must give alike, one item a line; the first line is what the user has called.
)doc";
}

absl::Status SameShape(InferenceContext* c) {
  c->set_output(0, c->input(1));
  return absl::OkStatus();
}

absl::Status AnyFirstDimension(InferenceContext* c) {
  ShapeHandle input, output;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &input));
  TF_RETURN_IF_ERROR(c->ReplaceDim(input, 0, c->UnknownDim(), &output));
  c->set_output(0, output);
  return absl::OkStatus();
}

absl::Status AlltoallShape(InferenceContext* c) {
  c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
  return AnyFirstDimension(c);
}

HVD_EXT_REGISTER("HvdExt>Allreduce")
    .Attr(HVD_EXT_REDUCED)
    .Attr("reduce_op: int")
    .Attr("wire: {'', 'float16', 'bfloat16'} = ''")
    .SetIsStateful()
    .SetShapeFn(SameShape)
    .Doc(CallDoc(R"doc(
Gives all ranks the sum, average, minimum, maximum or product of their tensors, bit-identical on all ranks.

tensor: this rank's values, of equal shape and dtype on all ranks.
result: of the tensor's shape and dtype.
reduce_op: the number of a ReduceOp (tf_ops/kernels/reduce.h).
wire: float32 travels in this dtype and is combined in float32; other dtypes travel as they are.
)doc"));

HVD_EXT_REGISTER("HvdExt>Allgather")
    .Attr(HVD_EXT_MOVED)
    .SetIsStateful()
    .SetShapeFn(AnyFirstDimension)
    .Doc(CallDoc(R"doc(
Gives all ranks the tensors of all, joined along the first dimension in the order of ranks.

tensor: this rank's part; the first dimension may differ from rank to rank.
result: the joined parts.
)doc"));

HVD_EXT_REGISTER("HvdExt>Broadcast")
    .Attr(HVD_EXT_MOVED)
    .Attr("root: int >= 0")
    .SetIsStateful()
    .SetShapeFn(SameShape)
    .Doc(CallDoc(R"doc(
Gives all ranks the tensor of one.

tensor: the root's values; on the other ranks only shape and dtype count.
result: the root's values.
root: the rank whose values all get.
)doc"));

HVD_EXT_REGISTER("HvdExt>Reducescatter")
    .Attr(HVD_EXT_REDUCED)
    .Attr("reduce_op: int")
    .Attr("wire: {'', 'float16', 'bfloat16'} = ''")
    .SetIsStateful()
    .SetShapeFn(AnyFirstDimension)
    .Doc(CallDoc(R"doc(
Gives each rank its part of the sum or average of all ranks' tensors, divided along the first dimension.

tensor: this rank's values, of equal shape and dtype on all ranks.
result: this rank's rows of the sum or average; the first ranks have one more where they do not divide evenly.
reduce_op: the number of a ReduceOp (tf_ops/kernels/reduce.h).
wire: as in HvdExt>Allreduce.
)doc"));

HVD_EXT_REGISTER("HvdExt>Alltoall")
    .Input("splits: int64")
    .Output("received: int64")
    .Attr(HVD_EXT_MOVED)
    .Attr("has_splits: bool")
    .SetIsStateful()
    .SetShapeFn(AlltoallShape)
    .Doc(CallDoc(R"doc(
Gives each rank rows of every rank's tensor, joined along the first dimension in the order of ranks.

tensor: this rank's rows; the first dimension may differ from rank to rank.
splits: how many rows go to each rank, from the first row on.
result: the rows that all ranks have sent here.
received: how many rows came from each rank.
has_splits: without, `splits` is not looked at and the rows are divided evenly.
)doc"));

REGISTER_OP("HvdExt>Barrier")
    .Input("call_name: string")
    .Input("signature: string")
    .Attr("engine: int = 0")
    .Attr("counted: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Ends when all ranks of the engine have come to it.

call_name: matches the ranks' calls; its n-th use on one rank meets the n-th use on the others.
signature: as in HvdExt>Allreduce.
engine: of the process set; 0 is the job's.
counted: as in HvdExt>Allreduce.
)doc");

struct SizeClasses {
  std::vector<int64_t> limits, plans, digests, segments;

  absl::Status Read(OpKernelConstruction* construction) {
    TF_RETURN_IF_ERROR(construction->GetAttr("limits", &limits));
    TF_RETURN_IF_ERROR(construction->GetAttr("plans", &plans));
    TF_RETURN_IF_ERROR(construction->GetAttr("digests", &digests));
    TF_RETURN_IF_ERROR(construction->GetAttr("segments", &segments));
    if (plans.size() != limits.size() || digests.size() != limits.size() || segments.size() != limits.size()) {
      return absl::InvalidArgumentError("hvd_ext: limits, plans, digests and segments must have equal lengths");
    }
    return absl::OkStatus();
  }

  size_t Of(int64_t nbytes) const {
    size_t row = 0;
    while (row + 1 < limits.size() && limits[row] < nbytes) ++row;
    return row;
  }
};

// What a call under way keeps alive. A call whose step was cancelled still takes part, so that the other ranks go on:
// its input and its output must outlive the op.
struct Running {
  Tensor input;
  Tensor output;
  std::vector<int64_t> received;  // alltoall
  std::shared_ptr<Pending> pending;
};

Status MakeOutput(Running* running, const std::vector<int64_t>& shape, void** memory) {
  TensorShape output_shape;
  absl::Status built = TensorShape::BuildTensorShape(shape, &output_shape);
  if (!built.ok()) return Invalid("the result's shape: " + std::string(built.message()));
  running->output = Tensor(running->input.dtype(), output_shape);
  if (!running->output.IsInitialized()) return Invalid("no memory for a result of shape " + output_shape.DebugString());
  *memory = const_cast<char*>(running->output.tensor_data().data());
  return Status::Ok();
}

class CallOp : public tensorflow::AsyncOpKernel {
 public:
  CallOp(OpKernelConstruction* construction, Kind kind) : AsyncOpKernel(construction), kind_(kind) {
    OP_REQUIRES_OK(construction, classes_.Read(construction));
    OP_REQUIRES_OK(construction, construction->GetAttr("dtype", &users_dtype_));
    OP_REQUIRES_OK(construction, construction->GetAttr("counted", &counted_));
    if (kind == Kind::kAllreduce || kind == Kind::kReducescatter) {
      int op = 0;
      OP_REQUIRES_OK(construction, construction->GetAttr("reduce_op", &op));
      op_ = static_cast<ReduceOp>(op);  // the engine refuses a number that is no op
      std::string wire;
      OP_REQUIRES_OK(construction, construction->GetAttr("wire", &wire));
      if (!wire.empty()) wire_ = wire == "float16" ? DType::kFloat16 : DType::kBFloat16;
    }
    if (kind == Kind::kBroadcast) {
      OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
    } else if (kind == Kind::kAlltoall) {
      OP_REQUIRES_OK(construction, construction->GetAttr("has_splits", &has_splits_));
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<Engine> engine;  // all plans are of one engine
    OP_REQUIRES_OK_ASYNC(context, ToTensorFlow(Engine::OfPlan(classes_.plans[0], &engine)), done);
    auto running = std::make_shared<Running>();
    running->input = context->input(1);
    const auto bytes = running->input.tensor_data();
    CallSpec spec;
    spec.kind = kind_;
    spec.name = context->input(0).scalar<tensorflow::tstring>()();
    spec.dtype = FromTensorFlow(running->input.dtype());
    spec.op = op_;
    spec.signature = context->input(2).scalar<tensorflow::tstring>()();
    spec.users_dtype = users_dtype_;
    spec.counted = counted_;
    if (spec.dtype == DType::kFloat32) spec.wire = wire_;
    spec.root = static_cast<int>(root_);
    for (int64_t dimension : running->input.shape().dim_sizes()) spec.shape.push_back(dimension);
    const size_t nbytes_each = SizeOf(spec.wire.value_or(spec.dtype));
    const size_t nbytes = static_cast<size_t>(running->input.NumElements()) * nbytes_each;
    // Ranks have parts of different sizes, but must all use one plan.
    const bool uneven = kind_ == Kind::kAllgather || kind_ == Kind::kAlltoall;
    const size_t row = uneven ? classes_.limits.size() - 1 : classes_.Of(nbytes);
    spec.plan = classes_.plans[row];
    spec.plan_digest = classes_.digests[row];
    spec.segment_nbytes = classes_.segments[row];
    if (kind_ == Kind::kAlltoall) {
      spec.received = &running->received;
      const auto splits = context->input(3).flat<int64_t>();
      if (has_splits_) spec.splits.emplace(splits.data(), splits.data() + splits.size());
    }
    running->pending = Pending::Begin(context, std::move(done));
    engine->Call(
        std::move(spec), bytes.data(),
        [running](const std::vector<int64_t>& shape, void** memory) {
          return MakeOutput(running.get(), shape, memory);
        },
        [running](const Status& status) {
          running->pending->End([&](OpKernelContext* c) {
            if (!status.ok()) return c->SetStatus(ToTensorFlow(status));
            c->set_output(0, running->output);
            if (c->num_outputs() < 2) return;
            Tensor* received = nullptr;
            const int64_t ranks = static_cast<int64_t>(running->received.size());
            const absl::Status allocated = c->allocate_output(1, TensorShape({ranks}), &received);
            if (!allocated.ok()) return c->SetStatus(allocated);  // OP_REQUIRES_OK aborts in an asynchronous op
            std::copy(running->received.begin(), running->received.end(), received->flat<int64_t>().data());
          });
        });
    running->pending->WaitIfEager();
  }

 private:
  const Kind kind_;
  ReduceOp op_ = ReduceOp::kSum;
  std::optional<DType> wire_;
  std::string users_dtype_;
  bool counted_ = false;
  int64_t root_ = 0;
  bool has_splits_ = false;
  SizeClasses classes_;
};

template <Kind kind>
class CallOpOf : public CallOp {
 public:
  explicit CallOpOf(OpKernelConstruction* construction) : CallOp(construction, kind) {}
};

class BarrierOp : public tensorflow::AsyncOpKernel {
 public:
  explicit BarrierOp(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("engine", &engine_));
    OP_REQUIRES_OK(construction, construction->GetAttr("counted", &counted_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<Engine> engine;
    OP_REQUIRES_OK_ASYNC(context, ToTensorFlow(Engine::Find(engine_, &engine)), done);
    CallSpec spec;
    spec.kind = Kind::kBarrier;
    spec.name = context->input(0).scalar<tensorflow::tstring>()();
    spec.signature = context->input(1).scalar<tensorflow::tstring>()();
    spec.counted = counted_;
    auto pending = Pending::Begin(context, std::move(done));
    engine->Call(
        std::move(spec), nullptr,
        [](const std::vector<int64_t>&, void** memory) {
          *memory = nullptr;
          return Status::Ok();
        },
        [pending](const Status& status) { pending->End(status); });
    pending->WaitIfEager();
  }

 private:
  int64_t engine_ = 0;
  bool counted_ = false;
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>Allreduce").Device(tensorflow::DEVICE_CPU), CallOpOf<Kind::kAllreduce>);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Allgather").Device(tensorflow::DEVICE_CPU), CallOpOf<Kind::kAllgather>);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Broadcast").Device(tensorflow::DEVICE_CPU), CallOpOf<Kind::kBroadcast>);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Reducescatter").Device(tensorflow::DEVICE_CPU), CallOpOf<Kind::kReducescatter>);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Alltoall").Device(tensorflow::DEVICE_CPU), CallOpOf<Kind::kAlltoall>);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Barrier").Device(tensorflow::DEVICE_CPU), BarrierOp);

}  // namespace
}  // namespace hvd_ext

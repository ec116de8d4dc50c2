// The ops of a channel: begin a step, hand gradients over, get them back reduced. Their Python face is
// hvd_ext/tensorflow/gradients/channel.py.
//
// Submit returns at once, and Collect is asynchronous: no thread of TensorFlow ever waits for the network, so that
// back-propagation goes on while buckets travel. In a graph, a Collect depends on its own Submits only.
//
// Submit and Collect take lists. A list says only what is handed over or collected by one op, not what travels
// together: the buckets are the engine's, and a graph stays right when they change.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/device.h"
#include "engine/engine.h"
#include "ops/gpu_kernels.h"
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
using tensorflow::shape_inference::InferenceContext;

// One list of an op must be as long as another; `what` names the two in words.
absl::Status SameLength(const char* what, int64_t one, int64_t other) {
  if (one == other) return ToTensorFlow(Status::Ok());
  return ToTensorFlow(Invalid(std::string(what) + " must have equal lengths; got " + std::to_string(one) + " and " +
                              std::to_string(other)));
}

absl::Status CollectShapes(InferenceContext* context) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
  TF_RETURN_IF_ERROR(SameLength("shapes and outputs", static_cast<int64_t>(shapes.size()), context->num_outputs()));
  for (int i = 0; i < context->num_outputs(); ++i) {
    tensorflow::shape_inference::ShapeHandle shape;
    TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes[static_cast<size_t>(i)], &shape));
    context->set_output(i, shape);
  }
  return absl::OkStatus();
}

absl::Status SameShapes(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

REGISTER_OP("HvdExt>BeginStep")
    .Attr("channel: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Begins a step of a channel; all submits of the step run after it.

channel: the channel's handle. After its engine has stopped, its successor's channel is used (Engine::Succeed).
)doc");

REGISTER_OP("HvdExt>BeginTopKStep")
    .Input("density: double")
    .Input("momentum: M * float")
    .Attr("M: int >= 0")
    .Attr("channel: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Begins a step of a channel with sparse buckets, in place of BeginStep; all submits of the step run after it.

density: scalar in [0, 1], the part of a sparse bucket's elements that is selected.
momentum: none, or one scalar in [0, 1): of this step, in place of that of the buckets.
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
    .Input("gradients: N * T")
    .Output("ticket: int64")
    .Attr("N: int >= 1")
    .Attr("T: {float, double, half, bfloat16, int32, int64}")
    .Attr("channel: int")
    .Attr("tensors: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Copies gradients into their buckets, each of which travels when it is full; returns at once.

gradients: this rank's values.
ticket: the step that the gradients belong to, for Collect.
channel: the channel's handle.
tensors: for each gradient its index in the channel.
)doc");

REGISTER_OP("HvdExt>Collect")
    .Input("tickets: M * int64")
    .Output("reduced: N * T")
    .Attr("M: int >= 1")
    .Attr("N: int >= 1")
    .Attr("T: {float, double, half, bfloat16, int32, int64}")
    .Attr("shapes: list(shape) >= 1")
    .Attr("channel: int")
    .Attr("tensors: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn(CollectShapes)
    .Doc(R"doc(
Gives reduced gradients, bit-identical on all ranks, when the buckets of all of them have come back.

tickets: from the Submits of the same gradients.
reduced: the sums or averages over the ranks.
shapes: the gradients' shapes.
channel: the channel's handle.
tensors: for each gradient its index in the channel.
)doc");

REGISTER_OP("HvdExt>ReduceStep")
    .Input("gradients: N * T")
    .Output("reduced: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {float, double, half, bfloat16, int32, int64}")
    .Attr("channel: int")
    .Attr("tensors: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn(SameShapes)
    .Doc(R"doc(
A whole step: BeginStep, Submit and Collect in one op, for gradients that travel together anyway.

gradients: this rank's values, all of the channel's.
reduced: the sums or averages over the ranks.
channel: the channel's handle; its steps have no density.
tensors: for each gradient its index in the channel.
)doc");

REGISTER_OP("HvdExt>Together")
    .Input("inputs: T")
    .Output("outputs: T")
    .Attr("T: list(type) >= 1")
    .SetShapeFn(SameShapes)
    .Doc(R"doc(
Gives its inputs unchanged, when all of them are there.

An IdentityN that TensorFlow's optimizers do not know, and so do not take apart.
)doc");

absl::Status ScalarInput(OpKernelContext* context, const char* name) {
  const TensorShape& shape = context->input(0).shape();
  if (tensorflow::TensorShapeUtils::IsScalar(shape)) return ToTensorFlow(Status::Ok());
  return ToTensorFlow(Invalid(std::string(name) + " must be a scalar, its shape is " + shape.DebugString()));
}

// Does the work that begins a step. What is called before a step waits for other ranks, whose graphs may begin the
// steps of two channels in another order, on one thread; so it gets a thread of its own.
void RunBegin(int64_t channel, std::function<void()> work) {
  if (Engine::WaitsAtStep(channel)) {
    std::thread(std::move(work)).detach();
  } else {
    work();
  }
}

void Begin(OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done, int64_t of_graph,
           const std::function<Status(Engine*, int64_t channel)>& begin) {
  auto pending = Pending::Begin(context, std::move(done));
  RunBegin(of_graph, [channel = of_graph, pending, begin]() mutable {
    std::shared_ptr<Engine> engine;
    Status status = Engine::OfStep(&channel, &engine);
    if (status.ok()) status = begin(engine.get(), channel);
    pending->End(status);
  });
  pending->WaitIfEager();
}

// An op with the attribute `channel`.
template <typename Kernel>
class ChannelOp : public Kernel {
 public:
  explicit ChannelOp(OpKernelConstruction* construction) : Kernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("channel", &channel_));
  }

 protected:
  int64_t channel_ = 0;
};

class BeginStepOp : public ChannelOp<tensorflow::AsyncOpKernel> {
 public:
  using ChannelOp::ChannelOp;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Begin(context, std::move(done), channel_,
          [](Engine* engine, int64_t channel) { return engine->BeginStep(channel); });
  }
};

class BeginTopKStepOp : public ChannelOp<tensorflow::AsyncOpKernel> {
 public:
  using ChannelOp::ChannelOp;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    OP_REQUIRES_OK_ASYNC(context, ScalarInput(context, "density"), done);
    const double density = context->input(0).scalar<double>()();
    std::optional<float> momentum;
    if (context->num_inputs() > 1) {
      const Tensor& given = context->input(1);
      OP_REQUIRES_ASYNC(context, context->num_inputs() == 2 && given.NumElements() == 1,
                        ToTensorFlow(Invalid("momentum must be at most one scalar")), done);
      momentum = given.flat<float>()(0);
    }
    Begin(context, std::move(done), channel_, [density, momentum](Engine* engine, int64_t channel) {
      return engine->BeginTopKStep(channel, density, momentum);
    });
  }
};

class EndStepOp : public ChannelOp<OpKernel> {
 public:
  using ChannelOp::ChannelOp;

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<Engine> engine;
    int64_t channel = channel_;
    OP_REQUIRES_OK(context, ScalarInput(context, "ok"));
    OP_REQUIRES_OK(context, ToTensorFlow(Engine::OfSuccessor(&channel, &engine)));
    OP_REQUIRES_OK(context, ToTensorFlow(engine->EndStep(channel, context->input(0).scalar<bool>()())));
  }
};

std::vector<Tensor> InputsOf(OpKernelContext* context) {
  std::vector<Tensor> inputs;
  for (int i = 0; i < context->num_inputs(); ++i) inputs.push_back(context->input(i));
  return inputs;
}

Status SubmitAll(Engine* engine, int64_t channel, const std::vector<int64_t>& tensors,
                 const std::vector<Tensor>& gradients, void* stream, int64_t* ticket,
                 Engine::CallerProgress* progress = nullptr) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto bytes = gradients[i].tensor_data();
    const int64_t nbytes = static_cast<int64_t>(bytes.size());
    HVD_EXT_RETURN_IF_ERROR(stream == nullptr
                                ? engine->Submit(channel, tensors[i], bytes.data(), nbytes, ticket, progress)
                                : engine->SubmitOnDevice(channel, tensors[i], bytes.data(), nbytes, stream, ticket));
  }
  return Status::Ok();
}

class SubmitOp : public ChannelOp<OpKernel> {
 public:
  explicit SubmitOp(OpKernelConstruction* construction) : ChannelOp(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("tensors", &tensors_));
    OP_REQUIRES_OK(construction, SameLength("tensors and gradients", static_cast<int64_t>(tensors_.size()),
                                            construction->num_inputs()));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<Engine> engine;
    int64_t channel = channel_, ticket = 0;
    OP_REQUIRES_OK(context, ToTensorFlow(Engine::OfSuccessor(&channel, &engine)));
    OP_REQUIRES_OK(context, ToTensorFlow(SubmitAll(engine.get(), channel, tensors_, InputsOf(context),
                                                   StreamOf(context), &ticket)));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    output->scalar<int64_t>()() = ticket;
  }

 private:
  std::vector<int64_t> tensors_;
};

// Results from this size on are not copied. A smaller one would keep a bucket of many times its size.
constexpr int64_t kKeptNbytes = 1 << 20;

// A tensor's memory that is a part of a bucket.
class Kept : public tensorflow::TensorBuffer {
 public:
  Kept(void* data, size_t nbytes, Memory memory) : TensorBuffer(data), nbytes_(nbytes), memory_(std::move(memory)) {}

  size_t size() const override { return nbytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(nbytes_));
  }

 private:
  const size_t nbytes_;
  const Memory memory_;
};

// What an op collects. The kernel may be gone when it comes: a cancelled step is done at once.
struct Wanted {
  std::vector<int64_t> tensors;
  std::vector<TensorShape> shapes;
};

// Gives an output of an op. A large result stays where it is, and TensorFlow owns the bucket's memory as long as it
// keeps the result. What a GPU reads is copied to where TensorFlow wants it: TensorFlow's kernels may read it after the
// tensor is gone.
void Give(Device* device, OpKernelContext* context, size_t index, const TensorShape& shape, const void* data,
          const Memory& memory) {
  const int output_index = static_cast<int>(index);
  const tensorflow::DataType dtype = context->expected_output_dtype(output_index);
  const int64_t nbytes = shape.num_elements() * tensorflow::DataTypeSize(dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(data) % EIGEN_MAX_ALIGN_BYTES == 0;
  void* stream = StreamOf(context);
  if (stream == nullptr && nbytes >= kKeptNbytes && aligned &&
      !context->output_alloc_attr(output_index).gpu_compatible()) {
    auto* kept = new Kept(const_cast<void*>(data), static_cast<size_t>(nbytes), memory);
    context->set_output(output_index, Tensor(dtype, shape, kept));
    kept->Unref();
    return;
  }
  Tensor* output = nullptr;
  const absl::Status allocated = context->allocate_output(output_index, shape, &output);
  if (!allocated.ok()) return context->SetStatus(allocated);  // OP_REQUIRES_OK aborts in an asynchronous op
  const auto bytes = output->tensor_data();
  char* to = const_cast<char*>(bytes.data());
  if (stream == nullptr) {
    if (!bytes.empty()) std::memcpy(to, data, bytes.size());
    return;
  }
  try {
    Queue* queue = device->inputs();
    queue->Follow(stream);
    queue->Copy(to, data, nbytes);
    queue->Lead(stream);
  } catch (const std::exception& e) {
    context->SetStatus(absl::InternalError(e.what()));
  }
}

// Ends an op when all that it wants of a step is there. Returns whether that is so, which callbacks set.
std::shared_ptr<std::atomic<bool>> CollectOutputs(Engine* engine, int64_t channel,
                                                  const std::shared_ptr<Pending>& pending,
                                                  const std::shared_ptr<const Wanted>& wanted, int64_t ticket) {
  struct Left {
    std::atomic<int64_t> results;
    std::atomic<bool> ended{false};
  };
  auto left = std::make_shared<Left>();
  left->results = static_cast<int64_t>(wanted->tensors.size());
  const std::shared_ptr<Device> device = engine->device();
  const auto end = [pending, left](const Status& status) {
    left->ended = true;
    pending->End(status);
  };
  for (size_t i = 0; i < wanted->tensors.size(); ++i) {
    engine->Collect(
        channel, wanted->tensors[i], ticket, [=](const Status& status, const void* data, const Memory& memory) {
          if (!status.ok()) return end(status);
          pending->While([&](OpKernelContext* c) { Give(device.get(), c, i, wanted->shapes[i], data, memory); });
          if (left->results.fetch_sub(1) == 1) end(status);
        });
  }
  return {left, &left->ended};
}

class CollectOp : public ChannelOp<tensorflow::AsyncOpKernel> {
 public:
  explicit CollectOp(OpKernelConstruction* construction) : ChannelOp(construction) {
    auto wanted = std::make_shared<Wanted>();
    OP_REQUIRES_OK(construction, construction->GetAttr("tensors", &wanted->tensors));
    OP_REQUIRES_OK(construction, construction->GetAttr("shapes", &wanted->shapes));
    OP_REQUIRES_OK(construction, SameLength("tensors and outputs", static_cast<int64_t>(wanted->tensors.size()),
                                            construction->num_outputs()));
    wanted_ = std::move(wanted);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<Engine> engine;
    int64_t channel = channel_;
    OP_REQUIRES_OK_ASYNC(context, ToTensorFlow(Engine::OfSuccessor(&channel, &engine)), done);
    const int64_t ticket = context->input(0).scalar<int64_t>()();
    for (int i = 1; i < context->num_inputs(); ++i) {
      const int64_t other = context->input(i).scalar<int64_t>()();
      OP_REQUIRES_OK_ASYNC(context, other == ticket ? absl::OkStatus() : ToTensorFlow(OtherStep(ticket, other)), done);
    }
    const std::shared_ptr<const Wanted> wanted = wanted_;
    auto pending = Pending::Begin(context, std::move(done));
    CollectOutputs(engine.get(), channel, pending, wanted, ticket);
    pending->WaitIfEager();
  }

 private:
  static Status OtherStep(int64_t one, int64_t other) {
    return Invalid("gradients of steps " + std::to_string(one) + " and " + std::to_string(other) +
                   " are collected together; a collect takes those of one step");
  }

  std::shared_ptr<const Wanted> wanted_;
};

// Each hand-over between threads takes longer than a small bucket, so the thread that runs the op also makes the
// engine's progress. It does so for a short time only: two steps may each wait for the other one on some other rank.
constexpr double kMostProgress_s = 10e-3;

class ReduceStepOp : public ChannelOp<tensorflow::AsyncOpKernel> {
 public:
  explicit ReduceStepOp(OpKernelConstruction* construction) : ChannelOp(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("tensors", &tensors_));
    OP_REQUIRES_OK(construction, SameLength("tensors and gradients", static_cast<int64_t>(tensors_.size()),
                                            construction->num_inputs()));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const std::vector<Tensor> gradients = InputsOf(context);
    auto wanted = std::make_shared<Wanted>(Wanted{tensors_, {}});
    for (const Tensor& gradient : gradients) wanted->shapes.push_back(gradient.shape());
    const auto pending = Pending::Begin(context, std::move(done));
    void* stream = StreamOf(context);
    RunBegin(channel_, [channel = channel_, pending, wanted, gradients, stream]() mutable {
      std::shared_ptr<Engine> engine;
      Status status = Engine::OfStep(&channel, &engine);
      if (status.ok()) status = engine->BeginStep(channel);
      if (!status.ok()) return pending->End(status);
      Engine::CallerProgress progress(engine.get());
      int64_t ticket = 0;
      status = SubmitAll(engine.get(), channel, wanted->tensors, gradients, stream, &ticket, &progress);
      if (!status.ok()) return pending->End(status);
      const auto ended = CollectOutputs(engine.get(), channel, pending, wanted, ticket);
      progress.Until(*ended, kMostProgress_s);
    });
    pending->WaitIfEager();
  }

 private:
  std::vector<int64_t> tensors_;
};

class TogetherOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
  }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>BeginStep").Device(tensorflow::DEVICE_CPU), BeginStepOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>BeginTopKStep").Device(tensorflow::DEVICE_CPU), BeginTopKStepOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>EndStep").Device(tensorflow::DEVICE_CPU), EndStepOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Submit").Device(tensorflow::DEVICE_CPU), SubmitOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Collect").Device(tensorflow::DEVICE_CPU), CollectOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>ReduceStep").Device(tensorflow::DEVICE_CPU), ReduceStepOp);
// On a GPU, for channels with `on_device`: nothing of a gradient goes through TensorFlow's copies to the host.
REGISTER_KERNEL_BUILDER(Name("HvdExt>Submit").Device(tensorflow::DEVICE_GPU).HostMemory("ticket"), SubmitOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Collect").Device(tensorflow::DEVICE_GPU).HostMemory("tickets"), CollectOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>ReduceStep").Device(tensorflow::DEVICE_GPU), ReduceStepOp);
// It touches no data, so it runs where the tensors are.
REGISTER_KERNEL_BUILDER(Name("HvdExt>Together").Device(tensorflow::DEVICE_CPU), TogetherOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Together").Device(tensorflow::DEVICE_DEFAULT), TogetherOp);

}  // namespace
}  // namespace hvd_ext

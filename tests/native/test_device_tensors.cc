// Channels whose tensors lie in memory of the engine's device: on the host, on the device that finds missing copies and
// waits, and on the stand-in for a GPU.
#include <random>

#include "engine/buffer_pool.h"
#include "engine/device_gpu.h"
#include "engines.h"
#include "far_device.h"
#include "gpu/cuda_stand_in.h"

namespace hvd_ext::test {
namespace {

// A rank's tensors of one step on its device, and their results.
class Tensors {
 public:
  Tensors(Engine* engine, const ChannelSpec& spec) : engine_(engine), spec_(spec) {
    const std::shared_ptr<Device>& device = engine->device();
    messages_ = std::make_unique<BufferPool>(nullptr, device);
    BufferPool pool = BufferPool::Of(device);
    for (size_t i = 0; i < spec.elements.size(); ++i) {
      const int64_t nbytes = NbytesOf(i);
      inputs_.push_back(pool.Take(nbytes));
      staged_.push_back(messages_->Take(nbytes));
      results_.push_back(messages_->Take(nbytes));
    }
  }

  int64_t NbytesOf(size_t tensor) const {
    const DType dtype = BucketOf(spec_, static_cast<int64_t>(tensor)).dtype;
    return spec_.elements[tensor] * static_cast<int64_t>(SizeOf(dtype));
  }

  // Runs a step whose tensors are handed over in a random order, and checks its results.
  void Step(int64_t channel, int step) {
    Queue* queue = engine_->device()->inputs();
    std::vector<size_t> order(inputs_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(step + 100 * engine_->rank())));
    CHECK_OK(engine_->BeginStep(channel));
    int64_t ticket = 0;
    for (size_t tensor : order) {
      const BucketSpec& bucket = BucketOf(spec_, static_cast<int64_t>(tensor));
      const std::string input =
          Input(bucket.dtype, spec_.elements[tensor], engine_->rank(), step + static_cast<int>(tensor));
      std::memcpy(staged_[tensor].data(), input.data(), input.size());
      queue->Copy(inputs_[tensor].data(), staged_[tensor].data(), NbytesOf(tensor));
      CHECK_OK(engine_->SubmitOnDevice(channel, static_cast<int64_t>(tensor), inputs_[tensor].data(), NbytesOf(tensor),
                                       nullptr, &ticket));
    }
    std::vector<std::future<std::pair<Status, int64_t>>> copied;
    for (size_t tensor = 0; tensor < inputs_.size(); ++tensor) {
      auto promise = std::make_shared<std::promise<std::pair<Status, int64_t>>>();
      copied.push_back(promise->get_future());
      engine_->Collect(channel, static_cast<int64_t>(tensor), ticket,
                       [this, tensor, queue, promise](const Status& status, const void* data, const Memory&) {
                         // the memory may go: it is not handed out again before the copy has ended
                         if (status.ok()) queue->Copy(results_[tensor].data(), data, NbytesOf(tensor));
                         promise->set_value({status, queue->Last()});
                       });
    }
    for (size_t tensor = 0; tensor < inputs_.size(); ++tensor) {
      const auto [status, number] = Await(std::move(copied[tensor]), "tensor " + std::to_string(tensor));
      CHECK_OK(status);
      Until("the copy of a result", [&, number = number] { return queue->Done(number); });
      const BucketSpec& bucket = BucketOf(spec_, static_cast<int64_t>(tensor));
      const std::string expected =
          Reduced(bucket.dtype, bucket.op, spec_.elements[tensor], engine_->size(), step + static_cast<int>(tensor));
      CHECK(std::memcmp(results_[tensor].data(), expected.data(), expected.size()) == 0);
    }
  }

 private:
  Engine* const engine_;
  const ChannelSpec& spec_;
  std::unique_ptr<BufferPool> messages_;
  std::vector<Buffer> inputs_, staged_, results_;
};

ChannelSpec ManyBuckets(int64_t plan) {
  ChannelSpec spec = ChannelOf("on device", {5000, 1, 700, 0, 3000, 40000},
                               {{DType::kFloat32, {}, ReduceOp::kAverage, plan, 8192, {5}},
                                {DType::kFloat32, DType::kFloat16, ReduceOp::kSum, plan, 4096, {0, 3}},
                                {DType::kBFloat16, {}, ReduceOp::kSum, plan, 512, {2}},
                                {DType::kInt64, {}, ReduceOp::kSum, plan, 0, {1, 4}}});
  spec.on_device = true;
  return spec;
}

void RunSteps(MakeDevice device) {
  const Over over(MakeThreadTransports, device);
  for (int size : Sizes(4)) {
    OnEngines(size, [&](int rank, Engine* engine) {
      const int64_t plan = AddPlan(engine, RingAllreduce(rank, size));
      const ChannelSpec spec = ManyBuckets(plan);
      const int64_t channel = OpenChannel(engine, spec);
      Tensors tensors(engine, spec);
      for (int step = 1; step <= 5; ++step) tensors.Step(channel, step);
    });
  }
}

std::shared_ptr<Device> MakeGpu() { return MakeGpuDevice(0); }

TEST("device tensors: steps of several buckets on the host") { RunSteps(nullptr); }

TEST("device tensors: steps of several buckets on a device that finds missing copies and waits") {
  FarDevice::TakeErrors();
  RunSteps(MakeFarDevice);
  CHECK_EQ(FarDevice::TakeErrors(), "");
}

TEST("device tensors: steps of several buckets on a GPU leave nothing behind") {
  const std::string before = gpu::stand_in::Left();
  RunSteps(MakeGpu);
  CHECK_EQ(gpu::stand_in::Left(), before);
}

TEST("device tensors: copies wait for the caller's stream, which waits for them") {
  const std::string before = gpu::stand_in::Left();
  const Over over(MakeThreadTransports, MakeGpu);
  constexpr int64_t kElements = 3000, kNbytes = 4 * kElements;
  OnEngines(2, [&](int rank, Engine* engine) {
    ChannelSpec spec = ChannelOf("a", {kElements}, {SumOf(AddPlan(engine, RingAllreduce(rank, 2)), 4096, {0})});
    spec.on_device = true;
    const int64_t channel = OpenChannel(engine, spec);
    BufferPool messages(nullptr, engine->device()), pool = BufferPool::Of(engine->device());
    Buffer tensor = pool.Take(kNbytes), staged = messages.Take(kNbytes), result = messages.Take(kNbytes);
    cudaStream_t stream = nullptr;
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (int step = 1; step <= 20; ++step) {
      const std::string input = Input(DType::kFloat32, kElements, rank, step);
      std::memcpy(staged.data(), input.data(), input.size());
      int64_t ticket = 0;
      CHECK_OK(engine->BeginStep(channel));
      // as a framework does: a kernel makes the tensor, and the next one overwrites its memory
      CHECK_EQ(cudaMemcpyAsync(tensor.data(), staged.data(), kNbytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
      CHECK_OK(engine->SubmitOnDevice(channel, 0, tensor.data(), kNbytes, stream, &ticket));
      CHECK_EQ(cudaMemsetAsync(tensor.data(), 0xff, kNbytes, stream), cudaSuccess);
      std::promise<Status> delivered;
      engine->Collect(channel, 0, ticket, [&](const Status& status, const void* data, const Memory&) {
        Queue* queue = engine->device()->inputs();
        if (status.ok()) {
          queue->Follow(stream);
          queue->Copy(tensor.data(), data, kNbytes);
          queue->Lead(stream);
        }
        delivered.set_value(status);
      });
      CHECK_OK(Await(delivered.get_future(), "a result"));
      CHECK_EQ(cudaMemcpyAsync(result.data(), tensor.data(), kNbytes, cudaMemcpyDeviceToHost, stream), cudaSuccess);
      CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      const std::string expected = Reduced(DType::kFloat32, ReduceOp::kSum, kElements, 2, step);
      CHECK(std::memcmp(result.data(), expected.data(), expected.size()) == 0);
    }
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
  });
  CHECK_EQ(gpu::stand_in::Left(), before);
}

TEST("device tensors: what a channel on the device has no place for is refused in words") {
  OnEngines(1, [](int, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(0, 1));
    ChannelSpec spec = ChannelOf("a", {4}, {SumOf(plan, 0, {0})});
    const int64_t on_host = OpenChannel(engine, spec);
    spec.on_device = true;
    const int64_t on_device = OpenChannel(engine, spec);
    int64_t ticket = 0;
    const float x[4] = {};
    CHECK_OK(engine->BeginStep(on_host));
    CHECK_FAILS(engine->SubmitOnDevice(on_host, 0, x, sizeof(x), nullptr, &ticket), Code::kInvalid,
                "its tensors lie in the host's memory");
    CHECK_FAILS(engine->GiveResult(on_device, 0, x, sizeof(x)), Code::kInvalid, "its tensors lie on the device");
    spec.partial = PartialSpec{};
    spec.partial->plan = plan;
    spec.partial->quorum = 1;
    spec.partial->hosts = {0};
    CHECK_FAILS(engine->OpenChannel(spec, &ticket), Code::kInvalid, "keeps its results on the host");
  });
}

}  // namespace
}  // namespace hvd_ext::test

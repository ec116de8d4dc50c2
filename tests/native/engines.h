// The engines of a job as objects of one process, their plans, and blocking versions of their calls.
#pragma once

#include <algorithm>
#include <climits>
#include <cstring>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devices.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "harness.h"
#include "kernels/half.h"
#include "ranks.h"

namespace hvd_ext::test {

constexpr int64_t kSend = 1, kRecv = 2, kRecvReduce = 3;

struct Rows {
  int64_t units = 1;
  std::vector<int64_t> flat;

  void Add(int64_t round, int64_t opcode, int peer, int64_t begin, int64_t count) {
    for (int64_t column : {round, opcode, int64_t{peer}, begin, count}) flat.push_back(column);
  }
};

inline Rows RingAllreduce(int rank, int size) {
  Rows rows{size, {}};
  auto unit = [&](int u) { return (u % size + size) % size; };
  int next = unit(rank + 1), previous = unit(rank - 1);
  for (int i = 0; i + 1 < size; ++i) {
    rows.Add(i, kSend, next, unit(rank - i), 1);
    rows.Add(i, kRecvReduce, previous, unit(rank - i - 1), 1);
  }
  for (int i = 0; i + 1 < size; ++i) {
    rows.Add(size - 1 + i, kSend, next, unit(rank + 1 - i), 1);
    rows.Add(size - 1 + i, kRecv, previous, unit(rank - i), 1);
  }
  return rows;
}

// All ranks send to rank 0, which adds the parts in the order of the ranks and sends the sum back.
inline Rows StarAllreduce(int rank, int size) {
  Rows rows;
  for (int peer = 1; peer < size && rank == 0; ++peer) rows.Add(0, kRecvReduce, peer, 0, 1);
  for (int peer = 1; peer < size && rank == 0; ++peer) rows.Add(1, kSend, peer, 0, 1);
  if (rank > 0) rows.Add(0, kSend, 0, 0, 1);
  if (rank > 0) rows.Add(1, kRecv, 0, 0, 1);
  return rows;
}

inline Rows RingAllgather(int rank, int size) {
  Rows rows{size, {}};
  for (int i = 0; i + 1 < size; ++i) {
    rows.Add(i, kSend, (rank + 1) % size, (rank - i + size) % size, 1);
    rows.Add(i, kRecv, (rank + size - 1) % size, (rank - i - 1 + size) % size, 1);
  }
  return rows;
}

// A chain from the root on.
inline Rows ChainBroadcast(int rank, int size, int root) {
  Rows rows;
  int place = (rank - root + size) % size;
  if (place > 0) rows.Add(0, kRecv, (rank - 1 + size) % size, 0, 1);
  if (place + 1 < size) rows.Add(1, kSend, (rank + 1) % size, 0, 1);
  return rows;
}

inline int64_t AddPlan(Engine* engine, const Rows& rows) {
  int64_t plan = -1;
  CHECK_OK(engine->AddPlan(rows.flat.data(), static_cast<int64_t>(rows.flat.size() / 5), rows.units, &plan));
  return plan;
}

// The time-outs of a stop allow for a loaded machine; a test in which a peer never comes sets its own.
inline Config QuickConfig() {
  Config config;
  config.leave_grace_s = 0.5;
  config.drain_s = 60;
  config.handshake_s = 60;
  return config;
}

using MakeTransports = Transports (*)(int size);

// Makes the transports between the ranks of Engines.
inline MakeTransports& TransportsOfEngines() {
  static MakeTransports make = MakeThreadTransports;
  return make;
}

// While an object of this class lives, Engines have these transports, and devices of this kind.
class Over {
 public:
  explicit Over(MakeTransports transports, MakeDevice device = nullptr)
      : transports_(std::exchange(TransportsOfEngines(), transports)),
        device_(std::exchange(DeviceOfEngines(), device)) {}
  ~Over() {
    TransportsOfEngines() = transports_;
    DeviceOfEngines() = device_;
  }

 private:
  const MakeTransports transports_;
  const MakeDevice device_;
};

inline std::shared_ptr<Engine> StartEngine(const std::shared_ptr<Transport>& transport, Config config,
                                           int64_t generation = 1) {
  std::shared_ptr<Engine> engine;
  config.device = KnownDevices::Take(transport.get());
  CHECK_OK(Engine::Start(transport, config, generation, &engine));
  return engine;
}

// Whether tests show less than every case: under sanitizers, and over other transports than that between threads.
inline bool ShowsLess() { return IsSanitized() || TransportsOfEngines() != MakeThreadTransports; }

// Numbers of ranks for what must hold for any: all up to `most`; where tests show less, and on other devices than the
// host, 1, 2, 3 and `most`, or 5 under sanitizers, which find the same among fewer threads.
inline std::vector<int> Sizes(int most) {
  const bool few = ShowsLess() || DeviceOfEngines() != nullptr;
  if (IsSanitized()) most = std::min(most, 5);
  std::vector<int> sizes;
  for (int size = 1; size <= most; ++size) {
    if (!few || size < 4 || size == most) sizes.push_back(size);
  }
  return sizes;
}

class Engines {
 public:
  explicit Engines(int size, const Config& config = QuickConfig(), int64_t generation = 1)
      : transports_(TransportsOfEngines()(size)) {
    for (const auto& transport : transports_) engines_.push_back(StartEngine(transport, config, generation));
  }
  ~Engines() { StopAll(); }

  int size() const { return static_cast<int>(engines_.size()); }
  Engine* operator[](int rank) { return engines_[rank].get(); }
  Transport* transport(int rank) { return transports_[rank].get(); }

  // Runs `rank_main` in a thread for each rank.
  void Each(const std::function<void(int, Engine*)>& rank_main) {
    RunThreads(size(), [&](int rank) { rank_main(rank, engines_[rank].get()); }, [&] { transports_[0]->Abort(1); });
  }

  // Stops all engines at the same time, because they wait for each other's last message. Returns which of them stopped
  // alone.
  std::vector<char> StopAll() {
    std::vector<char> alone(engines_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < engines_.size(); ++i) threads.emplace_back([&, i] { alone[i] = engines_[i]->Stop(); });
    for (std::thread& thread : threads) thread.join();
    const bool quiet =
        std::all_of(engines_.begin(), engines_.end(), [](const auto& engine) { return engine->quiet(); });
    for (size_t i = 0; quiet && i < transports_.size(); ++i) transports_[i]->Release();
    return alone;
  }

 private:
  std::vector<std::shared_ptr<Transport>> transports_;
  std::vector<std::shared_ptr<Engine>> engines_;
};

// Runs `rank_main` in a thread for each rank of a job that exists meanwhile.
inline void OnEngines(int size, const Config& config, const std::function<void(int, Engine*)>& rank_main) {
  Engines engines(size, config);
  engines.Each(rank_main);
}
inline void OnEngines(int size, const std::function<void(int, Engine*)>& rank_main) {
  OnEngines(size, QuickConfig(), rank_main);
}

template <typename T>
T Await(std::future<T> future, const std::string& what) {
  if (future.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
    throw Failure(what + " did not end in 60 s");
  }
  return future.get();
}

struct Result {
  Status status;
  std::vector<int64_t> shape;
  std::string data;
};

// Starts a call; its result is asked for later. `input` is copied, and the copy lives as long as the call.
inline std::future<Result> StartCall(Engine* engine, const CallSpec& spec, std::string input) {
  struct Open {
    std::string input;
    Result result;
    std::promise<Result> promise;
  };
  auto open = std::make_shared<Open>();
  open->input = std::move(input);
  std::future<Result> future = open->promise.get_future();
  engine->Call(
      spec, open->input.data(),
      [open, spec](const std::vector<int64_t>& shape, void** memory) {
        int64_t nbytes = static_cast<int64_t>(SizeOf(spec.dtype));
        for (int64_t n : shape) nbytes *= n;
        open->result.shape = shape;
        open->result.data.resize(static_cast<size_t>(nbytes));
        *memory = open->result.data.data();
        return Status::Ok();
      },
      [open](const Status& status) {
        open->result.status = status;
        open->promise.set_value(std::move(open->result));
      });
  return future;
}

inline Result Call(Engine* engine, const CallSpec& spec, std::string input) {
  return Await(StartCall(engine, spec, std::move(input)), spec.name);
}

inline CallSpec AllreduceSpec(std::string name, int64_t plan, int64_t elements, DType dtype = DType::kFloat32,
                              ReduceOp op = ReduceOp::kSum) {
  CallSpec spec;
  spec.kind = Kind::kAllreduce;
  spec.name = std::move(name);
  spec.plan = plan;
  spec.shape = {elements};
  spec.dtype = dtype;
  spec.op = op;
  return spec;
}

inline CallSpec SpecOf(Kind kind, std::string name, int64_t plan, std::vector<int64_t> shape,
                       DType dtype = DType::kFloat32) {
  CallSpec spec = AllreduceSpec(std::move(name), plan, 0, dtype);
  spec.kind = kind;
  spec.shape = std::move(shape);
  return spec;
}

inline CallSpec BarrierSpec(std::string name) {
  CallSpec spec;
  spec.kind = Kind::kBarrier;
  spec.name = std::move(name);
  return spec;
}

inline std::pair<Status, std::vector<std::string>> Exchange(Engine* engine, std::string name, std::string payload) {
  auto promise = std::make_shared<std::promise<std::pair<Status, std::vector<std::string>>>>();
  engine->Exchange(name, std::move(payload), [promise](const Status& status, const std::vector<std::string>& payloads) {
    promise->set_value({status, payloads});
  });
  return Await(promise->get_future(), name);
}

// Starts to collect one result of a channel's step, as bytes.
inline std::future<Result> StartCollect(Engine* engine, int64_t channel, int64_t tensor, int64_t ticket,
                                        int64_t nbytes) {
  auto promise = std::make_shared<std::promise<Result>>();
  engine->Collect(channel, tensor, ticket, [promise, nbytes](const Status& status, const void* data, const Memory&) {
    Result result;
    result.status = status;
    if (status.ok()) result.data.assign(static_cast<const char*>(data), static_cast<size_t>(nbytes));
    promise->set_value(std::move(result));
  });
  return promise->get_future();
}

// Small whole numbers, exact in every dtype (sums over 8 ranks stay below 256), different by rank, index and seed.
inline int Value(int rank, int64_t index, int seed = 0) {
  return static_cast<int>((rank * 11 + index * 7 + index / 13 + seed * 5) % 29) - 6;
}

template <typename Value>
std::string Tensor(DType dtype, int64_t elements, const Value& value) {
  std::string bytes;
  bytes.reserve(static_cast<size_t>(elements) * SizeOf(dtype));
  auto put = [&](auto x) { bytes.append(reinterpret_cast<const char*>(&x), sizeof(x)); };
  for (int64_t i = 0; i < elements; ++i) {
    const int v = value(i);
    if (dtype == DType::kFloat32) put(static_cast<float>(v));
    if (dtype == DType::kFloat64) put(static_cast<double>(v));
    if (dtype == DType::kFloat16) put(ToFloat16(static_cast<float>(v)));
    if (dtype == DType::kBFloat16) put(ToBFloat16(static_cast<float>(v)));
    if (dtype == DType::kInt32) put(static_cast<int32_t>(v));
    if (dtype == DType::kInt64) put(static_cast<int64_t>(v));
    if (dtype == DType::kBytes) put(static_cast<uint8_t>(v));
  }
  return bytes;
}

inline std::string Input(DType dtype, int64_t elements, int rank, int seed = 0) {
  return Tensor(dtype, elements, [=](int64_t i) { return Value(rank, i, seed); });
}

// Values whose product over 8 ranks is exact in every dtype.
inline std::string Factors(DType dtype, int64_t elements, int rank) {
  return Tensor(dtype, elements,
                [=](int64_t i) { return (rank + i) % 3 == 0 ? -1 : static_cast<int>((rank + i) % 3); });
}

// The result that an allreduce of Input over the ranks must have (or of Factors for a product).
inline std::string Reduced(DType dtype, ReduceOp op, int64_t elements, int size, int seed = 0) {
  std::string sum = Tensor(dtype, elements, [=](int64_t i) {
    int result = op == ReduceOp::kProduct ? 1 : op == ReduceOp::kMin ? INT_MAX : op == ReduceOp::kMax ? INT_MIN : 0;
    for (int rank = 0; rank < size; ++rank) {
      const int value = Value(rank, i, seed);
      const int factor = (rank + i) % 3 == 0 ? -1 : static_cast<int>((rank + i) % 3);
      result = op == ReduceOp::kProduct ? result * factor
               : op == ReduceOp::kMin   ? std::min(result, value)
               : op == ReduceOp::kMax   ? std::max(result, value)
                                        : result + value;
    }
    return result;
  });
  if (op == ReduceOp::kAverage) Divide(dtype, sum.data(), size, elements);
  return sum;
}

constexpr DType kReducible[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                DType::kBFloat16, DType::kInt32,   DType::kInt64};

// Waits for an allreduce of Input, and checks its result.
inline void CheckReduced(std::future<Result> call, const CallSpec& spec, int size, int seed = 0) {
  Result result = Await(std::move(call), spec.name);
  CHECK_OK(result.status);
  CHECK(result.shape == spec.shape);
  int64_t elements = 1;
  for (int64_t n : spec.shape) elements *= n;
  CHECK(result.data == Reduced(spec.dtype, spec.op, elements, size, seed));
}

inline std::future<Result> StartAllreduce(Engine* engine, const CallSpec& spec, int seed = 0) {
  int64_t elements = 1;
  for (int64_t n : spec.shape) elements *= n;
  return StartCall(engine, spec,
                   spec.op == ReduceOp::kProduct ? Factors(spec.dtype, elements, engine->rank())
                                                 : Input(spec.dtype, elements, engine->rank(), seed));
}

inline void CheckAllreduce(Engine* engine, const CallSpec& spec, int seed = 0) {
  CheckReduced(StartAllreduce(engine, spec, seed), spec, engine->size(), seed);
}

// A bucket of float32 that is summed.
inline BucketSpec SumOf(int64_t plan, int64_t segment_nbytes, std::vector<int64_t> tensors) {
  return {DType::kFloat32, {}, ReduceOp::kSum, plan, segment_nbytes, std::move(tensors)};
}

// The tensors are named a, b, ...
inline ChannelSpec ChannelOf(std::string name, std::vector<int64_t> elements, std::vector<BucketSpec> buckets) {
  ChannelSpec spec;
  spec.name = std::move(name);
  for (size_t i = 0; i < elements.size(); ++i) spec.tensor_names.push_back(std::string(1, static_cast<char>('a' + i)));
  spec.elements = std::move(elements);
  spec.buckets = std::move(buckets);
  return spec;
}

inline int64_t OpenChannel(Engine* engine, const ChannelSpec& spec) {
  int64_t channel = -1;
  CHECK_OK(engine->OpenChannel(spec, &channel));
  return channel;
}

// The bucket that holds a tensor.
inline const BucketSpec& BucketOf(const ChannelSpec& spec, int64_t tensor) {
  for (const BucketSpec& bucket : spec.buckets) {
    if (std::find(bucket.tensors.begin(), bucket.tensors.end(), tensor) != bucket.tensors.end()) return bucket;
  }
  throw Failure("tensor " + std::to_string(tensor) + " is in no bucket");
}

// Submits a tensor of a step: Input, which differs by rank, step and tensor.
inline Status SubmitInput(Engine* engine, int64_t channel, const ChannelSpec& spec, int64_t tensor, int step,
                          int64_t* ticket, Engine::CallerProgress* progress = nullptr) {
  const std::string input = Input(BucketOf(spec, tensor).dtype, spec.elements[static_cast<size_t>(tensor)],
                                  engine->rank(), step + static_cast<int>(tensor));
  return engine->Submit(channel, tensor, input.data(), static_cast<int64_t>(input.size()), ticket, progress);
}

inline std::future<Result> StartCollect(Engine* engine, int64_t channel, const ChannelSpec& spec, int64_t tensor,
                                        int64_t ticket) {
  const size_t width = SizeOf(BucketOf(spec, tensor).dtype);
  return StartCollect(engine, channel, tensor, ticket,
                      spec.elements[static_cast<size_t>(tensor)] * static_cast<int64_t>(width));
}

using Collects = std::vector<std::future<Result>>;  // by tensor

inline Collects CollectAll(Engine* engine, int64_t channel, const ChannelSpec& spec, int64_t ticket) {
  Collects results;
  for (size_t i = 0; i < spec.elements.size(); ++i) {
    results.push_back(StartCollect(engine, channel, spec, static_cast<int64_t>(i), ticket));
  }
  return results;
}

// Begins a step, submits its tensors in the order of `order` (the last ones first without it), and starts to collect.
inline Collects StartStep(Engine* engine, int64_t channel, const ChannelSpec& spec, int step,
                          std::vector<int64_t> order = {}) {
  const int64_t tensors = static_cast<int64_t>(spec.elements.size());
  if (order.empty()) {
    for (int64_t i = tensors; i-- > 0;) order.push_back(i);
  }
  CHECK_OK(engine->BeginStep(channel));
  int64_t ticket = 0;
  for (int64_t tensor : order) CHECK_OK(SubmitInput(engine, channel, spec, tensor, step, &ticket));
  return CollectAll(engine, channel, spec, ticket);
}

inline void CheckStep(Collects results, const ChannelSpec& spec, int size, int step) {
  for (size_t i = 0; i < results.size(); ++i) {
    Result result = Await(std::move(results[i]), "tensor " + std::to_string(i));
    CHECK_OK(result.status);
    const BucketSpec& bucket = BucketOf(spec, static_cast<int64_t>(i));
    CHECK(result.data == Reduced(bucket.dtype, bucket.op, spec.elements[i], size, step + static_cast<int>(i)));
  }
}

// The progress of an engine, whose thread may be in the middle of a pass.
inline std::unique_ptr<Engine::CallerProgress> TakeProgress(Engine* engine) {
  std::unique_ptr<Engine::CallerProgress> progress;
  Until("the progress lock", [&] {
    progress.reset();
    progress = std::make_unique<Engine::CallerProgress>(engine);
    return progress->has_lock();
  });
  return progress;
}

// Runs tests of other files again, over other transports or on another device.
inline void Again(MakeTransports transports, const std::vector<std::string>& beginnings, MakeDevice device = nullptr) {
  const Over over(transports, device);
  int run = 0;
  std::string failed;
  for (const Test& test : Tests()) {
    for (const std::string& beginning : beginnings) {
      if (std::strncmp(test.name, beginning.c_str(), beginning.size()) != 0) continue;
      ++run;
      try {
        test.run();
      } catch (const std::exception& error) {
        failed += std::string("\n    '") + test.name + "': " + error.what();
      }
    }
  }
  if (!failed.empty()) throw Failure("over another transport, or on another device:" + failed);
  CHECK(run >= static_cast<int>(beginnings.size()));
}

}  // namespace hvd_ext::test

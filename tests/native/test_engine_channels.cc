// Channels: several buckets in flight, steps, any order of the tensors, and what a caller can do wrong.
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "engines.h"
#include "slow_transport.h"

namespace hvd_ext::test {
namespace {

const std::vector<int64_t> kElements = {3, 0, 100, 1, 57, 1024, 5, 33};
const char kNames[] = "abcdefgh";

// Buckets over the tensors from the last to the first, in the order of back-propagation, with the dtypes in turn.
ChannelSpec Spec(int64_t plan, ReduceOp op = ReduceOp::kSum, int64_t segment_nbytes = 128) {
  ChannelSpec spec;
  spec.name = "Adam";
  spec.elements = kElements;
  for (size_t i = 0; i < kElements.size(); ++i) spec.tensor_names.push_back(std::string(1, kNames[i]));
  spec.buckets = {{DType::kFloat32, op, plan, segment_nbytes, {7, 6}},
                  {DType::kBFloat16, op, plan, segment_nbytes, {5}},
                  {DType::kFloat32, op, plan, 0, {4, 3, 2}},
                  {DType::kInt64, op, plan, segment_nbytes, {1, 0}}};
  return spec;
}

DType DTypeOf(int64_t tensor) {
  if (tensor == 5) return DType::kBFloat16;
  return tensor < 2 ? DType::kInt64 : DType::kFloat32;
}

std::string InputOf(int64_t tensor, int rank, int step) {
  return Input(DTypeOf(tensor), kElements[tensor], rank, step + static_cast<int>(tensor));
}

Status SubmitTensor(Engine* engine, int64_t channel, int64_t tensor, int rank, int step, int64_t* ticket) {
  std::string input = InputOf(tensor, rank, step);
  return engine->Submit(channel, tensor, input.data(), static_cast<int64_t>(input.size()), ticket);
}

std::future<Result> CollectTensor(Engine* engine, int64_t channel, int64_t tensor, int64_t ticket) {
  int64_t nbytes = kElements[tensor] * static_cast<int64_t>(SizeOf(DTypeOf(tensor)));
  return StartCollect(engine, channel, tensor, ticket, nbytes);
}

// Runs one whole step, with the tensors in the order of `order`; returns the results by tensor.
std::vector<std::future<Result>> WholeStep(Engine* engine, int64_t channel, int rank, int step,
                                           const std::vector<int64_t>& order) {
  CHECK_OK(engine->BeginStep(channel));
  int64_t ticket = 0;
  for (int64_t tensor : order) CHECK_OK(SubmitTensor(engine, channel, tensor, rank, step, &ticket));
  std::vector<std::future<Result>> results;
  for (size_t i = 0; i < kElements.size(); ++i) {
    results.push_back(CollectTensor(engine, channel, static_cast<int64_t>(i), ticket));
  }
  return results;
}

void CheckStep(std::vector<std::future<Result>> results, int size, int step, ReduceOp op = ReduceOp::kSum) {
  for (size_t i = 0; i < results.size(); ++i) {
    Result result = Await(std::move(results[i]), "tensor " + std::to_string(i));
    CHECK_OK(result.status);
    int64_t tensor = static_cast<int64_t>(i);
    CHECK(result.data == Reduced(DTypeOf(tensor), op, kElements[i], size, step + static_cast<int>(i)));
  }
}

const std::vector<int64_t> kBackwards = {7, 6, 5, 4, 3, 2, 1, 0};

std::vector<int64_t> Shuffled(int seed) {
  std::vector<int64_t> order = kBackwards;
  for (size_t i = 0; i < order.size(); ++i)
    std::swap(order[i], order[(i * 3 + static_cast<size_t>(seed) * 5) % order.size()]);
  return order;
}

TEST("channel: steps of several buckets reduce all tensors, submitted in any order, for 1 to 8 ranks") {
  for (int size = 1; size <= 8; ++size) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      Config config = QuickConfig();
      config.window = 1 + size % 4;
      Engines engines(size, config);
      engines.Each([&](int rank, Engine* engine) {
        int64_t channel = -1;
        CHECK_OK(engine->OpenChannel(Spec(AddPlan(engine, RingAllreduce(rank, size)), op), &channel));
        for (int step = 0; step < 6; ++step) {
          CheckStep(WholeStep(engine, channel, rank, step, Shuffled(step + rank)), size, step, op);
        }
        CHECK_EQ(engine->GetStatistics().buckets, 24);
        CHECK_OK(engine->CloseChannel(channel));
      });
      for (char alone : engines.StopAll()) CHECK(!alone);
    }
  }
}

TEST("channel: a step may begin while the last one is collected") {
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(Spec(AddPlan(engine, RingAllreduce(rank, 3))), &channel));
    std::vector<std::vector<std::future<Result>>> steps;
    for (int step = 0; step < 5; ++step) steps.push_back(WholeStep(engine, channel, rank, step, kBackwards));
    for (int step = 0; step < 5; ++step) CheckStep(std::move(steps[step]), 3, step);
  });
}

TEST("channel: two channels and calls run side by side, in different order on each rank") {
  constexpr int kSize = 4;
  Engines engines(kSize);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, kSize)), star = AddPlan(engine, StarAllreduce(rank, kSize));
    int64_t first = -1, second = -1;
    CHECK_OK(engine->OpenChannel(Spec(plan), &first));
    CHECK_OK(engine->OpenChannel(Spec(star), &second));
    for (int step = 0; step < 5; ++step) {
      std::vector<std::future<Result>> of_first, of_second;
      std::future<Result> call;
      for (int i = 0; i < 3; ++i) {
        switch ((i + rank) % 3) {
          case 0:
            of_first = WholeStep(engine, first, rank, step, Shuffled(rank));
            break;
          case 1:
            of_second = WholeStep(engine, second, rank, step + 100, Shuffled(step));
            break;
          case 2:
            call = StartCall(engine, AllreduceSpec("metric", plan, 9), Input(DType::kFloat32, 9, rank, step));
            break;
        }
      }
      CheckStep(std::move(of_second), kSize, step + 100);
      CheckStep(std::move(of_first), kSize, step);
      CHECK(Await(std::move(call), "metric").data == Reduced(DType::kFloat32, ReduceOp::kSum, 9, kSize, step));
    }
  });
}

TEST("channel: tensors may be submitted and collected by many threads at once, collects first") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(Spec(AddPlan(engine, RingAllreduce(rank, 2))), &channel));
    for (int step = 0; step < 20; ++step) {
      CHECK_OK(engine->BeginStep(channel));
      std::vector<std::future<Result>> results;
      for (int64_t i = 0; i < 8; ++i) results.push_back(CollectTensor(engine, channel, i, step + 1));
      std::vector<std::thread> threads;
      for (int64_t i = 0; i < 8; ++i) {
        threads.emplace_back([&, i] {
          int64_t ticket = 0;
          SubmitTensor(engine, channel, i, rank, step, &ticket);
        });
      }
      for (std::thread& thread : threads) thread.join();
      CheckStep(std::move(results), 2, step);
    }
  });
}

TEST("channel: threads that fill buckets at the same moment do not change the order of the buckets, on any rank") {
  constexpr int kThreads = 8, kSteps = 60;
  Engines job(2);
  job.Each([&](int rank, Engine* engine) {
    ChannelSpec spec;
    spec.name = "racing";
    int64_t plan = AddPlan(engine, StarAllreduce(rank, 2));
    for (int64_t tensor = 0; tensor < kThreads; ++tensor) {
      spec.elements.push_back(1 + tensor);
      spec.tensor_names.push_back(std::string(1, kNames[tensor]));
      spec.buckets.push_back({DType::kFloat32, ReduceOp::kSum, plan, 128, {tensor}});
    }
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(std::move(spec), &channel));
    for (int step = 0; step < kSteps; ++step) {
      CHECK_OK(engine->BeginStep(channel));
      std::atomic<int> ready{0};
      std::vector<int64_t> tickets(kThreads);
      std::vector<std::thread> threads;
      for (int64_t tensor = 0; tensor < kThreads; ++tensor) {
        threads.emplace_back([&, tensor] {
          std::string input = Input(DType::kFloat32, 1 + tensor, rank, step + static_cast<int>(tensor));
          ++ready;
          while (ready < kThreads) {
          }
          CHECK_OK(engine->Submit(channel, tensor, input.data(), static_cast<int64_t>(input.size()), &tickets[tensor]));
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (int64_t tensor = 0; tensor < kThreads; ++tensor) {
        std::future<Result> result = StartCollect(engine, channel, tensor, tickets[tensor], 4 * (1 + tensor));
        CHECK_OK(result.get().status);
      }
    }
  });
}

// Bucket 0 has a large tensor between two small ones, and bucket 1 is one large tensor.
ChannelSpec LargeSpec(int64_t plan) {
  ChannelSpec spec;
  spec.name = "large";
  spec.elements = {150001, 5, 140003, 7};
  spec.tensor_names = {"a", "b", "c", "d"};
  spec.buckets = {{DType::kFloat32, ReduceOp::kSum, plan, 40000, {1, 2, 3}},
                  {DType::kFloat32, ReduceOp::kSum, plan, 64000, {0}}};
  return spec;
}

TEST("channel: the last tensor of a bucket travels while it is copied, whichever it is") {
  const std::vector<std::vector<int64_t>> orders = {{1, 3, 2, 0}, {0, 1, 2, 3}, {2, 3, 1, 0}, {3, 0, 1, 2}};
  for (int size : {1, 3}) {
    std::vector<std::string> sums;
    for (int64_t elements : LargeSpec(0).elements) {
      sums.push_back(Reduced(DType::kFloat32, ReduceOp::kSum, elements, size, 0));
    }
    Engines engines(size);
    engines.Each([&](int rank, Engine* engine) {
      int64_t channel = -1;
      ChannelSpec spec = LargeSpec(AddPlan(engine, RingAllreduce(rank, size)));
      CHECK_OK(engine->OpenChannel(spec, &channel));
      std::vector<std::string> inputs;
      for (int64_t elements : spec.elements) inputs.push_back(Input(DType::kFloat32, elements, rank, 0));
      for (size_t step = 0; step < 4; ++step) {
        CHECK_OK(engine->BeginStep(channel));
        int64_t ticket = 0;
        for (int64_t tensor : orders[(step + static_cast<size_t>(rank)) % orders.size()]) {
          const std::string& input = inputs[static_cast<size_t>(tensor)];
          CHECK_OK(engine->Submit(channel, tensor, input.data(), static_cast<int64_t>(input.size()), &ticket));
        }
        for (int64_t tensor = 0; tensor < 4; ++tensor) {
          const std::string& sum = sums[static_cast<size_t>(tensor)];
          Result result = StartCollect(engine, channel, tensor, ticket, static_cast<int64_t>(sum.size())).get();
          CHECK_OK(result.status);
          CHECK(result.data == sum);
        }
      }
    });
  }
}

TEST("channel: a bucket starts before its last large tensor has been copied, and only then") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1, ticket = 0;
    ChannelSpec spec = LargeSpec(AddPlan(engine, RingAllreduce(rank, 2)));
    CHECK_OK(engine->OpenChannel(spec, &channel));
    CHECK_OK(engine->BeginStep(channel));
    std::vector<std::string> inputs;
    for (int64_t elements : spec.elements) inputs.push_back(Input(DType::kFloat32, elements, rank, 0));
    {
      std::unique_ptr<Engine::CallerProgress> progress = TakeProgress(engine);  // nobody else makes progress
      auto submit = [&](int64_t tensor) {
        const std::string& input = inputs[static_cast<size_t>(tensor)];
        CHECK_OK(
            engine->Submit(channel, tensor, input.data(), static_cast<int64_t>(input.size()), &ticket, progress.get()));
        return engine->GetStatistics().bytes_sent;
      };
      CHECK_EQ(submit(1), 0);
      CHECK_EQ(submit(0), 0);  // its bucket is full, the one before is not
      CHECK_EQ(submit(3), 0);
      CHECK(submit(2) > 0);
    }
    for (int64_t tensor = 0; tensor < 4; ++tensor) {
      const int64_t elements = spec.elements[static_cast<size_t>(tensor)];
      Result result = StartCollect(engine, channel, tensor, ticket, 4 * elements).get();
      CHECK_OK(result.status);
      CHECK(result.data == Reduced(DType::kFloat32, ReduceOp::kSum, elements, 2, 0));
    }
  });
}

TEST("channel: a plan is kept while a channel uses it, and goes when it is closed") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 2)), channel = -1;
    CHECK_OK(engine->OpenChannel(Spec(plan), &channel));
    CHECK_FAILS(engine->RemovePlan(plan), Code::kInvalid, "is used by channel 'Adam'; close it first");
    CheckStep(WholeStep(engine, channel, rank, 0, kBackwards), 2, 0);
    CHECK_OK(engine->CloseChannel(channel));
    CHECK_OK(engine->RemovePlan(plan));
    CHECK_FAILS(engine->RemovePlan(plan), Code::kInvalid, "has been removed");
    CHECK_FAILS(engine->BeginStep(channel), Code::kStopped, "has been closed");
    CHECK_FAILS(engine->CloseChannel(channel), Code::kStopped, "has been closed");
  });
}

TEST("channel: wrong submits and collects are refused with words, and the step goes on") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1, ticket = 0;
    CHECK_OK(engine->OpenChannel(Spec(AddPlan(engine, RingAllreduce(rank, 2))), &channel));
    CHECK_FAILS(SubmitTensor(engine, channel, 0, rank, 0, &ticket), Code::kInvalid,
                "'a' of 'Adam' was submitted before");
    CHECK_OK(engine->BeginStep(channel));
    CHECK_FAILS(engine->Submit(channel, 2, "x", 1, &ticket), Code::kInvalid, "'c' of 'Adam' must have 400 bytes");
    CHECK_FAILS(engine->Submit(channel, 8, "x", 1, &ticket), Code::kInvalid, "tensor (8) of 'Adam' must be in [0, 8)");
    CHECK_OK(SubmitTensor(engine, channel, 0, rank, 0, &ticket));
    CHECK_FAILS(SubmitTensor(engine, channel, 0, rank, 0, &ticket), Code::kInvalid, "submitted twice in step 1");
    auto collected = [&](int64_t tensor, int64_t t) {
      return Await(CollectTensor(engine, channel, tensor, t), "collect").status;
    };
    CHECK_FAILS(collected(0, ticket + 1), Code::kInvalid, "'a' of 'Adam': step 2 is not under way");
    std::future<Result> waits = CollectTensor(engine, channel, 0, ticket);
    CHECK_FAILS(collected(0, ticket), Code::kInvalid, "collected twice");
    for (int64_t tensor = 1; tensor < 8; ++tensor) CHECK_OK(SubmitTensor(engine, channel, tensor, rank, 0, &ticket));
    CHECK_OK(Await(std::move(waits), "collect").status);
    CHECK_FAILS(collected(0, ticket), Code::kInvalid, "collected twice");
    CHECK_OK(collected(5, ticket));
    // Results that nobody has collected are dropped when the next step but one begins.
    for (int step = 1; step < 3; ++step) CheckStep(WholeStep(engine, channel, rank, step, kBackwards), 2, step);
    CHECK_FAILS(collected(4, 1), Code::kInvalid, "step 1 is not under way");
  });
}

TEST("channel: a step of which nothing was sent fails when left half-way, and the next step works") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1, ticket = 0;
    CHECK_OK(engine->OpenChannel(Spec(AddPlan(engine, RingAllreduce(rank, 2))), &channel));
    CheckStep(WholeStep(engine, channel, rank, 0, kBackwards), 2, 0);
    CHECK_OK(engine->BeginStep(channel));
    for (int64_t tensor : {7, 0, 2}) CHECK_OK(SubmitTensor(engine, channel, tensor, rank, 1, &ticket));
    std::future<Result> waits = CollectTensor(engine, channel, 7, ticket);
    const char* words =
        "step 2 of 'Adam' was left half-way: 3 of 8 tensors were submitted ('b', 'd', 'e', 'f', 'g' were not); nothing "
        "of it "
        "has been sent, the next step starts afresh";
    CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, words);
    CHECK_FAILS(Await(std::move(waits), "collect").status, Code::kInvalid, words);
    CheckStep(WholeStep(engine, channel, rank, 2, kBackwards), 2, 2);
  });
}

TEST("channel: a step left half-way after parts were sent fails the channel on all ranks, and only it") {
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 3)), channel = -1, other = -1, ticket = 0;
    CHECK_OK(engine->OpenChannel(Spec(plan), &channel));
    CHECK_OK(engine->OpenChannel(Spec(plan), &other));
    CHECK_OK(engine->BeginStep(channel));
    // All ranks begin the step before rank 1 fails, because its failure would make the others' begin fail too.
    Call(engine, AllreduceSpec("all have begun", plan, 7), Input(DType::kFloat32, 7, rank));
    std::string words =
        "step 1 of 'Adam' was left half-way: 2 of 8 tensors were submitted ('a', 'b', 'c', 'd', 'e' and 1 more";
    if (rank == 1) {
      for (int64_t tensor : {7, 6}) CHECK_OK(SubmitTensor(engine, channel, tensor, rank, 0, &ticket));
      std::future<Result> never = CollectTensor(engine, channel, 0, ticket);
      CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, words);
      CHECK_FAILS(engine->BeginStep(channel), Code::kCommunication, "the ranks no longer agree");
      CHECK_FAILS(Await(std::move(never), "collect").status, Code::kCommunication, words);
    } else {  // rank 1's failure may come while they submit
      for (int64_t tensor : kBackwards) SubmitTensor(engine, channel, tensor, rank, 0, &ticket);
      Status status = Await(CollectTensor(engine, channel, 0, 1), "collect").status;
      CHECK_FAILS(status, Code::kCommunication, "rank 1: " + words);
      CHECK_FAILS(engine->BeginStep(channel), Code::kCommunication, "rank 1: " + words);
    }
    CheckStep(WholeStep(engine, other, rank, 4, kBackwards), 3, 4);
    CHECK(Call(engine, AllreduceSpec("x", plan, 7), Input(DType::kFloat32, 7, rank)).data ==
          Reduced(DType::kFloat32, ReduceOp::kSum, 7, 3));
  });
}

TEST("channel: closing ends open collects, and the peers' work beyond that fails with words") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1, ticket = 0;
    CHECK_OK(engine->OpenChannel(Spec(AddPlan(engine, RingAllreduce(rank, 2))), &channel));
    CheckStep(WholeStep(engine, channel, rank, 0, kBackwards), 2, 0);
    if (rank == 1) {
      CHECK_OK(engine->BeginStep(channel));
      CHECK_OK(SubmitTensor(engine, channel, 0, rank, 1, &ticket));
      std::future<Result> open = CollectTensor(engine, channel, 0, ticket);
      CHECK_OK(engine->CloseChannel(channel));
      CHECK_FAILS(Await(std::move(open), "collect").status, Code::kStopped, "channel 'Adam' has been closed");
    } else {
      CHECK_OK(engine->BeginStep(channel));
      for (int64_t tensor : kBackwards)
        SubmitTensor(engine, channel, tensor, rank, 1, &ticket);  // may fail, if rank 1's failure has arrived
      for (int64_t tensor : kBackwards) {
        CHECK_FAILS(Await(CollectTensor(engine, channel, tensor, 2), "collect").status, Code::kCommunication,
                    "rank 1 has closed the channel after 4 buckets");
      }
    }
  });
}

TEST("channel: a channel that is not sound is refused with words") {
  Engines engines(1);
  Engine* engine = engines[0];
  int64_t plan = AddPlan(engine, Rows{}), channel = -1;
  auto refuses = [&](const std::string& words, const std::function<void(ChannelSpec*)>& change) {
    ChannelSpec spec = Spec(plan);
    change(&spec);
    CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, words);
  };
  refuses("as many tensor names (7) as tensor sizes (8)", [](ChannelSpec* s) { s->tensor_names.pop_back(); });
  refuses("tensor 'a' must be in exactly one bucket, it is in 0", [](ChannelSpec* s) { s->buckets[3].tensors = {1}; });
  refuses("tensor 'a' must be in exactly one bucket, it is in 2",
          [](ChannelSpec* s) { s->buckets[1].tensors = {5, 0}; });
  refuses("bucket 3: tensor (8) must be in [0, 8)", [](ChannelSpec* s) { s->buckets[3].tensors = {8}; });
  refuses("bucket 1: it must hold a tensor", [](ChannelSpec* s) { s->buckets[1].tensors.clear(); });
  refuses("dtype (6) must be one that can be summed", [](ChannelSpec* s) { s->buckets[0].dtype = DType::kBytes; });
  refuses("op (5) must be sum (0) or average (1)", [](ChannelSpec* s) { s->buckets[0].op = static_cast<ReduceOp>(5); });
  refuses("tensor 'c': elements (-1) must not be negative", [](ChannelSpec* s) { s->elements[2] = -1; });
  refuses("was never added", [](ChannelSpec* s) { s->buckets[0].plan += 1; });
}

TEST("channel: a bucket that counts for all ends for all, though a rank has closed the channel and another gave more") {
  constexpr int kSize = 3;  // a chain: rank 0 gives to 1, and 1 to 2 in two rounds
  Engines engines(kSize);
  std::atomic<int> phase{0};
  engines.Each([&](int rank, Engine* engine) {
    Rows rows;
    rows.units = 2;
    if (rank == 0) rows.Add(0, kSend, 1, 0, 2);
    if (rank == 1) {
      rows.Add(0, kRecv, 0, 0, 2);
      rows.Add(1, kSend, 2, 0, 1);
      rows.Add(2, kSend, 2, 1, 1);
    }
    if (rank == 2) {
      rows.Add(0, kRecv, 1, 0, 1);
      rows.Add(1, kRecv, 1, 1, 1);
    }
    ChannelSpec spec;
    spec.name = "SGD";
    spec.tensor_names = {"kernel"};
    spec.elements = {64};
    spec.buckets = {{DType::kFloat32, ReduceOp::kSum, AddPlan(engine, rows), 1 << 20, {0}}};
    int64_t channel = -1, ticket = 0;
    CHECK_OK(engine->OpenChannel(spec, &channel));
    auto step = [&] {
      CHECK_OK(engine->BeginStep(channel));
      CHECK_OK(engine->Submit(channel, 0, Input(DType::kFloat32, 64, rank).data(), 256, &ticket));
      return StartCollect(engine, channel, 0, ticket, 256);
    };
    if (rank == 2) Until("more than counts", [&] { return phase == 2; });
    std::future<Result> first = step();
    if (rank == 0) {
      CHECK_OK(Await(std::move(first), "step 1 of rank 0").status);
      CHECK_OK(engine->CloseChannel(channel));
      phase = 1;
      return;
    }
    if (rank == 1) {
      Until("the close", [&] { return phase == 1; });
      std::future<Result> second = step();
      phase = 2;
      CHECK_OK(Await(std::move(first), "step 1 of rank 1").status);
      CHECK_FAILS(Await(std::move(second), "step 2 of rank 1").status, Code::kCommunication,
                  "rank 0 has closed the channel after 1 buckets");
      return;
    }
    CHECK_OK(Await(std::move(first), "step 1 of rank 2").status);
  });
}

// A transport with few tags.
class FewTags : public SlowTransport {
 public:
  explicit FewTags(std::shared_ptr<Transport> inner) : SlowTransport(std::move(inner), 0, 0) {}
  int64_t largest_tag() const override { return 23; }
};

TEST("channel: one whose tags the transport does not have is refused, and so is an engine") {
  Config config = QuickConfig();
  config.window = 8;
  std::shared_ptr<Engine> engine;
  CHECK_OK(Engine::Start(std::make_shared<FewTags>(MakeThreadTransports(1)[0]), config, 1, &engine));
  const ChannelSpec spec = Spec(AddPlan(engine.get(), RingAllreduce(0, 1)));
  int64_t channel = -1;
  for (int lane : {1, 2}) {
    CHECK_OK(engine->OpenChannel(spec, &channel));
    CHECK_EQ(channel & 0xff, lane - 1);
  }
  CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid,
              "lane (3) with a window of 8 segments needs tags above 23");
  config.window = 25;
  CHECK_FAILS(Engine::Start(std::make_shared<FewTags>(MakeThreadTransports(1)[0]), config, 1, &engine), Code::kInvalid,
              "lane (0) with a window of 25 segments needs tags above 23");
}

}  // namespace
}  // namespace hvd_ext::test

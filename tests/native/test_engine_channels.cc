// Channels: several buckets in flight, steps, any order of the tensors, and what a caller can do wrong.
#include "engines.h"
#include "slow_transport.h"

namespace hvd_ext::test {
namespace {

// Buckets over the tensors from the last to the first, in the order of back-propagation, with the dtypes in turn.
ChannelSpec Spec(int64_t plan, ReduceOp op = ReduceOp::kSum) {
  return ChannelOf("Adam", {3, 0, 100, 1, 57, 1024, 5, 33},
                   {{DType::kFloat32, op, plan, 128, {7, 6}},
                    {DType::kBFloat16, op, plan, 128, {5}},
                    {DType::kFloat32, op, plan, 0, {4, 3, 2}},
                    {DType::kInt64, op, plan, 128, {1, 0}}});
}

std::vector<int64_t> Shuffled(int seed) {
  std::vector<int64_t> order = {7, 6, 5, 4, 3, 2, 1, 0};
  for (size_t i = 0; i < order.size(); ++i) std::swap(order[i], order[(i * 3 + seed * size_t{5}) % order.size()]);
  return order;
}

TEST("channel: steps of several buckets reduce all tensors, submitted in any order, also while steps before run") {
  for (int size : Sizes(8)) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      if (ShowsLess() && op == ReduceOp::kSum) continue;
      Config config = QuickConfig();
      config.window = 1 + size % 4;
      Engines engines(size, config);
      engines.Each([&](int rank, Engine* engine) {
        const ChannelSpec spec = Spec(AddPlan(engine, RingAllreduce(rank, size)), op);
        const int64_t channel = OpenChannel(engine, spec);
        std::vector<Collects> steps;
        for (int step = 0; step < 4; ++step) {
          CheckStep(StartStep(engine, channel, spec, step, Shuffled(step + rank)), spec, size, step);
        }
        for (int step = 4; step < 7; ++step) steps.push_back(StartStep(engine, channel, spec, step));
        for (int step = 4; step < 7; ++step) CheckStep(std::move(steps[step - 4]), spec, size, step);
        CHECK_EQ(engine->GetStatistics().buckets, 28);
        CHECK_OK(engine->CloseChannel(channel));
      });
      for (char alone : engines.StopAll()) CHECK(!alone);
    }
  }
}

TEST("channel: two channels and calls run side by side, in different order on each rank") {
  OnEngines(4, [](int rank, Engine* engine) {
    const int64_t ring = AddPlan(engine, RingAllreduce(rank, 4)), star = AddPlan(engine, StarAllreduce(rank, 4));
    const ChannelSpec first = Spec(ring), second = Spec(star);
    const int64_t first_channel = OpenChannel(engine, first), second_channel = OpenChannel(engine, second);
    const CallSpec metric = AllreduceSpec("metric", ring, 9);
    for (int step = 0; step < 5; ++step) {
      Collects of_first, of_second;
      std::future<Result> call;
      for (int i = 0; i < 3; ++i) {
        const int turn = (i + rank) % 3;
        if (turn == 0) of_first = StartStep(engine, first_channel, first, step, Shuffled(rank));
        if (turn == 1) of_second = StartStep(engine, second_channel, second, step + 100, Shuffled(step));
        if (turn == 2) call = StartAllreduce(engine, metric, step);
      }
      CheckStep(std::move(of_second), second, 4, step + 100);
      CheckStep(std::move(of_first), first, 4, step);
      CheckReduced(std::move(call), metric, 4, step);
    }
  });
}

TEST("channel: tensors may be submitted and collected by many threads at once, collects first") {
  OnEngines(2, [](int rank, Engine* engine) {
    const ChannelSpec spec = Spec(AddPlan(engine, RingAllreduce(rank, 2)));
    const int64_t channel = OpenChannel(engine, spec);
    for (int step = 0; step < 10; ++step) {
      CHECK_OK(engine->BeginStep(channel));
      Collects results = CollectAll(engine, channel, spec, step + 1);
      std::vector<std::thread> threads;
      for (int64_t tensor = 0; tensor < 8; ++tensor) {
        threads.emplace_back([&, tensor] {
          int64_t ticket = 0;
          SubmitInput(engine, channel, spec, tensor, step, &ticket);
        });
      }
      for (std::thread& thread : threads) thread.join();
      CheckStep(std::move(results), spec, 2, step);
    }
  });
}

TEST("channel: threads that fill buckets at the same moment do not change the order of the buckets, on any rank") {
  constexpr int kThreads = 8, kSteps = 30;
  OnEngines(2, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, StarAllreduce(rank, 2));
    ChannelSpec spec = ChannelOf("racing", {1, 2, 3, 4, 5, 6, 7, 8}, {});
    for (int64_t tensor = 0; tensor < kThreads; ++tensor) {
      spec.buckets.push_back({DType::kFloat32, {}, ReduceOp::kSum, plan, 128, {tensor}});
    }
    const int64_t channel = OpenChannel(engine, spec);
    for (int step = 0; step < kSteps; ++step) {
      CHECK_OK(engine->BeginStep(channel));
      std::atomic<int> ready{0};
      std::vector<std::thread> threads;
      for (int64_t tensor = 0; tensor < kThreads; ++tensor) {
        threads.emplace_back([&, tensor] {
          ++ready;
          while (ready < kThreads) std::this_thread::yield();
          int64_t ticket = 0;
          CHECK_OK(SubmitInput(engine, channel, spec, tensor, step, &ticket));
        });
      }
      for (std::thread& thread : threads) thread.join();
      CheckStep(CollectAll(engine, channel, spec, step + 1), spec, 2, step);
    }
  });
}

// Bucket 0 has a large tensor between two small ones, and bucket 1 is one large tensor.
ChannelSpec LargeSpec(int64_t plan) {
  return ChannelOf(
      "large", {150001, 5, 140003, 7},
      {{DType::kFloat32, {}, ReduceOp::kSum, plan, 40000, {1, 2, 3}}, {DType::kFloat32, {}, ReduceOp::kSum, plan, 64000, {0}}});
}

TEST("channel: the last tensor of a bucket travels while it is copied, whichever it is") {
  const std::vector<std::vector<int64_t>> orders = {{1, 3, 2, 0}, {0, 1, 2, 3}, {2, 3, 1, 0}, {3, 0, 1, 2}};
  for (int size : {1, 3}) {
    OnEngines(size, [&](int rank, Engine* engine) {
      const ChannelSpec spec = LargeSpec(AddPlan(engine, RingAllreduce(rank, size)));
      const int64_t channel = OpenChannel(engine, spec);
      for (int step = 0; step < 4; ++step) {
        const std::vector<int64_t>& order = orders[static_cast<size_t>(step + rank) % orders.size()];
        CheckStep(StartStep(engine, channel, spec, step, order), spec, size, step);
      }
    });
  }
}

TEST("early start: a bucket starts before its last large tensor has been copied, and only then") {
  OnEngines(2, [](int rank, Engine* engine) {
    const ChannelSpec spec = LargeSpec(AddPlan(engine, RingAllreduce(rank, 2)));
    const int64_t channel = OpenChannel(engine, spec);
    CHECK_OK(engine->BeginStep(channel));
    int64_t ticket = 0;
    {
      std::unique_ptr<Engine::CallerProgress> progress = TakeProgress(engine);  // nobody else makes progress
      auto sent_after = [&](int64_t tensor) {
        CHECK_OK(SubmitInput(engine, channel, spec, tensor, 0, &ticket, progress.get()));
        return engine->GetStatistics().bytes_sent;
      };
      CHECK_EQ(sent_after(1), 0);
      CHECK_EQ(sent_after(0), 0);  // its bucket is full, the one before is not
      CHECK_EQ(sent_after(3), 0);
      CHECK(sent_after(2) > 0);
    }
    CheckStep(CollectAll(engine, channel, spec, ticket), spec, 2, 0);
  });
}

TEST("channel: a plan is kept while a channel uses it, and goes when it is closed") {
  OnEngines(2, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    const ChannelSpec spec = Spec(plan);
    const int64_t channel = OpenChannel(engine, spec);
    CHECK_FAILS(engine->RemovePlan(plan), Code::kInvalid, "is used by channel 'Adam'; close it first");
    CheckStep(StartStep(engine, channel, spec, 0), spec, 2, 0);
    CHECK_OK(engine->CloseChannel(channel));
    CHECK_OK(engine->RemovePlan(plan));
    CHECK_FAILS(engine->RemovePlan(plan), Code::kInvalid, "has been removed");
    CHECK_FAILS(engine->BeginStep(channel), Code::kStopped, "has been closed");
    CHECK_FAILS(engine->CloseChannel(channel), Code::kStopped, "has been closed");
  });
}

TEST("channel: wrong submits and collects are refused with words, and the step goes on") {
  OnEngines(2, [](int rank, Engine* engine) {
    const ChannelSpec spec = Spec(AddPlan(engine, RingAllreduce(rank, 2)));
    const int64_t channel = OpenChannel(engine, spec);
    int64_t ticket = 0;
    auto submit = [&](int64_t tensor) { return SubmitInput(engine, channel, spec, tensor, 0, &ticket); };
    CHECK_FAILS(submit(0), Code::kInvalid, "'a' of 'Adam' was submitted before");
    CHECK_OK(engine->BeginStep(channel));
    CHECK_FAILS(engine->Submit(channel, 2, "x", 1, &ticket), Code::kInvalid, "'c' of 'Adam' must have 400 bytes");
    CHECK_FAILS(engine->Submit(channel, 8, "x", 1, &ticket), Code::kInvalid, "tensor (8) of 'Adam' must be in [0, 8)");
    CHECK_OK(submit(0));
    CHECK_FAILS(submit(0), Code::kInvalid, "submitted twice in step 1");
    auto collected = [&](int64_t tensor, int64_t t) {
      return Await(StartCollect(engine, channel, spec, tensor, t), "collect").status;
    };
    CHECK_FAILS(collected(0, ticket + 1), Code::kInvalid, "'a' of 'Adam': step 2 is not under way");
    std::future<Result> waits = StartCollect(engine, channel, spec, 0, ticket);
    CHECK_FAILS(collected(0, ticket), Code::kInvalid, "collected twice");
    for (int64_t tensor = 1; tensor < 8; ++tensor) CHECK_OK(submit(tensor));
    CHECK_OK(Await(std::move(waits), "collect").status);
    CHECK_FAILS(collected(0, ticket), Code::kInvalid, "collected twice");
    CHECK_OK(collected(5, ticket));
    // Results that nobody has collected are dropped when the next step but one begins.
    for (int step = 1; step < 3; ++step) CheckStep(StartStep(engine, channel, spec, step), spec, 2, step);
    CHECK_FAILS(collected(4, 1), Code::kInvalid, "step 1 is not under way");
  });
}

TEST("channel: a step of which nothing was sent fails when left half-way, and the next step works") {
  OnEngines(2, [](int rank, Engine* engine) {
    const ChannelSpec spec = Spec(AddPlan(engine, RingAllreduce(rank, 2)));
    const int64_t channel = OpenChannel(engine, spec);
    CheckStep(StartStep(engine, channel, spec, 0), spec, 2, 0);
    CHECK_OK(engine->BeginStep(channel));
    int64_t ticket = 0;
    for (int64_t tensor : {7, 0, 2}) CHECK_OK(SubmitInput(engine, channel, spec, tensor, 1, &ticket));
    std::future<Result> waits = StartCollect(engine, channel, spec, 7, ticket);
    const char* words =
        "step 2 of 'Adam' was left half-way: 3 of 8 tensors were submitted ('b', 'd', 'e', 'f', 'g' were not); nothing "
        "of it has been sent, the next step starts afresh";
    CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, words);
    CHECK_FAILS(Await(std::move(waits), "collect").status, Code::kInvalid, words);
    CheckStep(StartStep(engine, channel, spec, 2), spec, 2, 2);
  });
}

TEST("channel: a step left half-way after parts were sent fails the channel on all ranks, and only it") {
  OnEngines(3, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
    const ChannelSpec spec = Spec(plan);
    const int64_t channel = OpenChannel(engine, spec), other = OpenChannel(engine, spec);
    int64_t ticket = 0;
    CHECK_OK(engine->BeginStep(channel));
    // All ranks begin the step before rank 1 fails, because its failure would make the others' begin fail too.
    CheckAllreduce(engine, AllreduceSpec("all have begun", plan, 7));
    std::string words =
        "step 1 of 'Adam' was left half-way: 2 of 8 tensors were submitted ('a', 'b', 'c', 'd', 'e' and 1 more";
    if (rank == 1) {
      for (int64_t tensor : {7, 6}) CHECK_OK(SubmitInput(engine, channel, spec, tensor, 0, &ticket));
      std::future<Result> never = StartCollect(engine, channel, spec, 0, ticket);
      CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, words);
      CHECK_FAILS(engine->BeginStep(channel), Code::kCommunication, "the ranks no longer agree");
      CHECK_FAILS(Await(std::move(never), "collect").status, Code::kCommunication, words);
    } else {  // rank 1's failure may come while they submit
      for (int64_t tensor = 7; tensor >= 0; --tensor) SubmitInput(engine, channel, spec, tensor, 0, &ticket);
      Status status = Await(StartCollect(engine, channel, spec, 0, 1), "collect").status;
      CHECK_FAILS(status, Code::kCommunication, "rank 1: " + words);
      CHECK_FAILS(engine->BeginStep(channel), Code::kCommunication, "rank 1: " + words);
    }
    CheckStep(StartStep(engine, other, spec, 4), spec, 3, 4);
    CheckAllreduce(engine, AllreduceSpec("x", plan, 7));
  });
}

TEST("channel: closing ends open collects, and the peers' work beyond that fails with words") {
  OnEngines(2, [](int rank, Engine* engine) {
    const ChannelSpec spec = Spec(AddPlan(engine, RingAllreduce(rank, 2)));
    const int64_t channel = OpenChannel(engine, spec);
    int64_t ticket = 0;
    CheckStep(StartStep(engine, channel, spec, 0), spec, 2, 0);
    CHECK_OK(engine->BeginStep(channel));
    if (rank == 1) {
      CHECK_OK(SubmitInput(engine, channel, spec, 0, 1, &ticket));
      std::future<Result> open = StartCollect(engine, channel, spec, 0, ticket);
      CHECK_OK(engine->CloseChannel(channel));
      CHECK_FAILS(Await(std::move(open), "collect").status, Code::kStopped, "channel 'Adam' has been closed");
      return;
    }
    // Submits may fail, if rank 1's failure has arrived.
    for (int64_t tensor = 7; tensor >= 0; --tensor) SubmitInput(engine, channel, spec, tensor, 1, &ticket);
    for (std::future<Result>& result : CollectAll(engine, channel, spec, 2)) {
      CHECK_FAILS(Await(std::move(result), "collect").status, Code::kCommunication,
                  "rank 1 has closed the channel after 4 buckets");
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
  refuses("only float32 may be sent", [](ChannelSpec* s) { s->buckets[3].wire = DType::kFloat16; });
  refuses("was never added", [](ChannelSpec* s) { s->buckets[0].plan += 1; });
}

TEST("channel: a bucket that counts for all ends for all, though a rank has closed the channel and another gave more") {
  std::atomic<int> phase{0};
  OnEngines(3, [&](int rank, Engine* engine) {  // a chain: rank 0 gives to 1, and 1 to 2 in two rounds
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
    const ChannelSpec spec =
        ChannelOf("SGD", {64}, {{DType::kFloat32, {}, ReduceOp::kSum, AddPlan(engine, rows), 1 << 20, {0}}});
    const int64_t channel = OpenChannel(engine, spec);
    auto step = [&] { return std::move(StartStep(engine, channel, spec, 0)[0]); };
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

// Ranks that leave, fail or are stopped while work is under way: every rank gets an error text, and none hangs.
#include "engine/message.h"
#include "engines.h"
#include "slow_transport.h"

namespace hvd_ext::test {
namespace {

ChannelSpec OneBucket(int64_t plan) {
  return ChannelOf("SGD", {64}, {{DType::kFloat32, {}, ReduceOp::kSum, plan, 64, {0}}});
}

Status Step(Engine* engine, int64_t channel) {
  HVD_EXT_RETURN_IF_ERROR(engine->BeginStep(channel));
  int64_t ticket = 0;
  HVD_EXT_RETURN_IF_ERROR(SubmitInput(engine, channel, OneBucket(0), 0, 0, &ticket));
  return Await(StartCollect(engine, channel, 0, ticket, 256), "a step").status;
}

Status StatusOf(Engine* engine, const std::string& name, int64_t plan, int64_t elements = 5) {
  return Await(StartAllreduce(engine, AllreduceSpec(name, plan, elements)), name).status;
}

TEST("leave: what a rank has begun ends for all although it is stopped at once") {
  Config config = QuickConfig();
  config.leave_grace_s = 60;
  for (int round = 0; round < 10; ++round) {
    OnEngines(4, config, [&](int rank, Engine* engine) {
      CallSpec spec = AllreduceSpec("x", AddPlan(engine, RingAllreduce(rank, 4)), 500);
      spec.segment_nbytes = 100;
      std::future<Result> result = StartAllreduce(engine, spec, round);
      CHECK(!engine->Stop());
      CheckReduced(std::move(result), spec, 4, round);
    });
  }
}

TEST("leave: a call that waits for a rank that leaves fails on all that wait") {
  for (int leaver : {0, 1, 2}) {
    std::atomic<int> told{0};
    OnEngines(3, [&](int rank, Engine* engine) {
      const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
      CHECK_OK(StatusOf(engine, "first", plan));
      std::string words =
          "rank " + std::to_string(leaver) + " has shut down: it called shutdown() or its program has ended";
      if (rank != leaver) {
        CHECK_FAILS(StatusOf(engine, "second", plan), Code::kCommunication, "allreduce 'second': " + words);
        CHECK_FAILS(Exchange(engine, "third", "x").first, Code::kCommunication, "exchange 'third': " + words);
        CHECK_FAILS(Call(engine, BarrierSpec("fourth"), "").status, Code::kCommunication, "barrier 'fourth': " + words);
        ++told;  // the survivors stay until all have heard of the first that left, not of each other
        Until("the other survivor", [&] { return told == 2; });
      }
      CHECK(!engine->Stop());
    });
  }
}

TEST("leave: a channel's step that needs a rank that has left fails on all ranks, direct neighbours or not") {
  OnEngines(5, [](int rank, Engine* engine) {
    const int64_t channel = OpenChannel(engine, OneBucket(AddPlan(engine, RingAllreduce(rank, 5))));
    for (int i = 0; i < 3; ++i) CHECK_OK(Step(engine, channel));
    if (rank != 2) {
      CHECK_FAILS(Step(engine, channel), Code::kCommunication, "bucket 0 of 'SGD' (step 4): rank 2 has shut down");
      CHECK_FAILS(Step(engine, channel), Code::kCommunication, "rank 2 has shut down");
    }
    engine->Stop();
  });
}

TEST("leave: messages sent before the last one are delivered to ranks that come late") {
  // Rank 0 sends to rank 1, which passes on to rank 2: rank 0 has finished and gone while the others still work.
  Config config = QuickConfig();
  config.leave_grace_s = 60;
  for (uint32_t round = 0; round < 8; ++round) {
    SlowJob(config, round, {0, 90, 90}).Each([](int rank, Engine* engine) {
      CallSpec spec = SpecOf(Kind::kBroadcast, "w", AddPlan(engine, ChainBroadcast(rank, 3, 0)), {100});
      spec.segment_nbytes = 40;
      Result result = Call(engine, spec, Input(DType::kFloat32, 100, rank));
      CHECK_OK(result.status);
      CHECK(result.data == Input(DType::kFloat32, 100, 0));
      engine->Stop();
    });
  }
}

TEST("stop: calls and data under way that cannot end any more get words, and the rank went down alone") {
  Config config = QuickConfig();
  config.drain_s = 0.05;
  for (bool data_under_way : {false, true}) {
    Engines engines(2, config);
    Engine* engine = engines[0];
    const int64_t plan = AddPlan(engine, RingAllreduce(0, 2)), channel = OpenChannel(engine, OneBucket(plan));
    CHECK_OK(engine->BeginStep(channel));
    int64_t ticket = 0;
    if (data_under_way) CHECK_OK(SubmitInput(engine, channel, OneBucket(plan), 0, 0, &ticket));
    std::future<Result> collect = StartCollect(engine, channel, 0, 1, 256);
    std::future<Result> call = StartAllreduce(engine, AllreduceSpec("x", plan, 5));
    std::future<bool> alone = std::async(std::launch::async, [&] { return engine->Stop(); });
    CHECK_FAILS(Await(std::move(call), "x").status, Code::kStopped,
                "allreduce 'x': the engine has been shut down before this ended");
    CHECK_FAILS(Await(std::move(collect), "collect").status, Code::kStopped, "the engine has been shut down");
    CHECK(!engines[1]->Stop());
    CHECK(Await(std::move(alone), "the stop"));
  }
}

TEST("stop: a rank whose peers go on has not gone down alone; stopping again changes nothing") {
  Config config = QuickConfig();
  config.handshake_s = 0.05;
  Engines engines(2, config);
  for (int rank : {0, 0, 1}) CHECK(!engines[rank]->Stop());
}

// Calls every function of the engine with handles of an engine that has been stopped.
void EveryDoorAnswers(Engine* engine, int64_t plan, int64_t channel, const std::string& words) {
  int64_t ticket = 0, other = -1;
  CHECK_FAILS(StatusOf(engine, "x", plan, 1), Code::kStopped, words);
  CHECK_FAILS(engine->OpenChannel(OneBucket(plan), &other), Code::kStopped, words);
  CHECK_FAILS(engine->BeginStep(channel), Code::kStopped, words);
  CHECK_FAILS(engine->Submit(channel, 0, "", 0, &ticket), Code::kStopped, words);
  CHECK_FAILS(Await(StartCollect(engine, channel, 0, 1, 0), "collect").status, Code::kStopped, words);
}

TEST("stop: every door of a stopped engine answers with words") {
  Engines engines(1);
  Engine* engine = engines[0];
  int64_t plan = AddPlan(engine, Rows{});
  const int64_t channel = OpenChannel(engine, OneBucket(plan));
  CHECK(!engine->Stop());
  const char* words = "the engine has been shut down";
  EveryDoorAnswers(engine, plan, channel, words);
  CHECK_FAILS(engine->AddPlan(nullptr, 0, 1, &plan), Code::kStopped, words);
  CHECK_FAILS(Exchange(engine, "x", "").first, Code::kStopped, words);
  CHECK_OK(engine->CloseChannel(channel));
}

TEST("start: engines start again in one process, and old handles are answered with words") {
  for (int64_t generation = 1; generation <= 3; ++generation) {
    Engines engines(2, QuickConfig(), generation);
    engines.Each([&](int rank, Engine* engine) {
      if (generation > 1) {
        const int64_t old = (generation - 1) << 32;  // the first plan, and the first channel, of the engine before
        const char* words = "belongs to an engine that has been shut down";
        EveryDoorAnswers(engine, old, old, words);
        CHECK_FAILS(engine->RemovePlan(old), Code::kStopped, words);
        CHECK_FAILS(engine->CloseChannel(old), Code::kStopped, words);
      }
      const int64_t channel = OpenChannel(engine, OneBucket(AddPlan(engine, RingAllreduce(rank, 2))));
      CHECK_FAILS(engine->BeginStep(channel + 1), Code::kInvalid, "was never opened");
      CHECK_OK(Step(engine, channel));
    });
    for (char alone : engines.StopAll()) CHECK(!alone);
  }
}

TEST("failure: an aborted job fails everything on all ranks with words") {
  Engines engines(3);
  std::atomic<int> past{0};
  engines.Each([&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3)), channel = OpenChannel(engine, OneBucket(plan));
    std::future<Result> waits;
    if (rank != 1) waits = StartAllreduce(engine, AllreduceSpec("x", plan, 5));
    CHECK_OK(Call(engine, BarrierSpec("all"), "").status);
    ++past;
    if (rank == 1) {
      Until("the barrier's end on all ranks", [&] { return past == 3; });
      engines.transport(1)->Abort(9);
      return;
    }
    CHECK_FAILS(Await(std::move(waits), "x").status, Code::kCommunication, "rank 1 has aborted the job with code 9");
    CHECK_FAILS(engine->BeginStep(channel), Code::kCommunication, "nothing works until shutdown() and init()");
    CHECK_FAILS(Call(engine, BarrierSpec("later"), "").status, Code::kCommunication, "has aborted the job");
  });
}

TEST("failure: a rank whose messages fail tells the others, whose work fails too") {
  SlowJob job(QuickConfig(), 1, {0, 0, 0});
  job.Each([&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
    CHECK_OK(StatusOf(engine, "good", plan, 50));
    if (rank == 1) job.transports[1]->broken = true;
    const char* words = "rank 1 has failed: allreduce 'bad': the cable is cut";
    Status status = StatusOf(engine, "bad", plan, 50);
    // A rank whose last message arrived before the news of the failure has its result.
    if (!status.ok() || rank == 1) CHECK_FAILS(status, Code::kCommunication, words);
    CHECK_FAILS(StatusOf(engine, "later", plan, 50), Code::kCommunication, words);
    engine->Stop();
  });
}

TEST("failure: bytes that are no message, and a start of a call that was never made, fail the engine with words") {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"nonsense", "do all ranks run the same build"},
      {Encode(CallStart{99, {}, {}}), "rank 0 has started a call (99) that this rank has not made"}};
  for (const auto& [bytes, words] : rows) {
    Engines engines(2);
    CHECK_OK(engines.transport(0)->SendControl(1, bytes));
    Until("the failure", [&] { return engines[1]->BeginStep(0).code == Code::kInternal; });
    CHECK_FAILS(engines[1]->BeginStep(0), Code::kInternal, words);
  }
}

TEST("failure: a call or bucket for which there is no memory fails with words on all ranks") {
  if (IsSanitized()) return;  // a sanitizer ends the program where memory is refused
  OnEngines(2, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    ChannelSpec spec = OneBucket(plan);
    spec.elements = {int64_t{1} << 48};
    const int64_t channel = OpenChannel(engine, spec);
    int64_t ticket = 0;
    CHECK_OK(engine->BeginStep(channel));
    CHECK_FAILS(engine->Submit(channel, 0, "", int64_t{1} << 50, &ticket), Code::kInternal,
                "no memory for a bucket of 'SGD'");
    CHECK_OK(Call(engine, BarrierSpec("all"), "").status);
    Status status = Call(engine, AllreduceSpec("x", plan, int64_t{1} << 48), "").status;
    CHECK_FAILS(status, Code::kInternal, "allreduce 'x': no memory for its buffer");
  });
}

TEST("engine: the last reference may go away on the engine's own thread") {
  std::promise<void> ended;
  std::shared_ptr<Engine> engine;
  CHECK_OK(Engine::Start(MakeThreadTransports(1)[0], QuickConfig(), 1, &engine));
  auto* owner = new std::shared_ptr<Engine>(engine);
  Engine* raw = engine.get();
  engine.reset();
  raw->Call(BarrierSpec("last"), nullptr, nullptr, [&ended, owner](const Status&) {
    delete owner;
    ended.set_value();
  });
  Await(ended.get_future(), "the barrier");
}

}  // namespace
}  // namespace hvd_ext::test

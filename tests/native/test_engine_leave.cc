// Ranks that leave, fail or are stopped while work is under way: every rank gets an error text, and none hangs.
#include <atomic>
#include <string>
#include <vector>

#include "engine/message.h"
#include "engines.h"
#include "slow_transport.h"

namespace hvd_ext::test {
namespace {

ChannelSpec OneBucket(int64_t plan) {
  ChannelSpec spec;
  spec.name = "SGD";
  spec.tensor_names = {"kernel"};
  spec.elements = {64};
  spec.buckets = {{DType::kFloat32, ReduceOp::kSum, plan, 64, {0}}};
  return spec;
}

Status Step(Engine* engine, int64_t channel, int rank) {
  HVD_EXT_RETURN_IF_ERROR(engine->BeginStep(channel));
  std::string input = Input(DType::kFloat32, 64, rank);
  int64_t ticket = 0;
  HVD_EXT_RETURN_IF_ERROR(engine->Submit(channel, 0, input.data(), 256, &ticket));
  Result result = Await(StartCollect(engine, channel, 0, ticket, 256), "a step of rank " + std::to_string(rank));
  return result.status;
}

TEST("leave: what a rank has begun ends for all although it is stopped at once") {
  for (int round = 0; round < 20; ++round) {
    Config config = QuickConfig();
    config.leave_grace_s = 60;
    Engines engines(4, config);
    engines.Each([&](int rank, Engine* engine) {
      int64_t plan = AddPlan(engine, RingAllreduce(rank, 4));
      CallSpec spec = AllreduceSpec("x", plan, 500);
      spec.segment_nbytes = 100;
      std::future<Result> result = StartCall(engine, spec, Input(DType::kFloat32, 500, rank, round));
      CHECK(!engine->Stop());
      CHECK(Await(std::move(result), "x").data == Reduced(DType::kFloat32, ReduceOp::kSum, 500, 4, round));
    });
  }
}

TEST("leave: a call that waits for a rank that leaves fails on all that wait") {
  for (int leaver : {0, 1, 2}) {
    Engines engines(3);
    std::atomic<int> told{0};
    engines.Each([&](int rank, Engine* engine) {
      int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
      CHECK_OK(Call(engine, AllreduceSpec("first", plan, 5), Input(DType::kFloat32, 5, rank)).status);
      std::string words =
          "rank " + std::to_string(leaver) + " has shut down: it called shutdown() or its program has ended";
      if (rank != leaver) {
        Status status = Call(engine, AllreduceSpec("second", plan, 5), Input(DType::kFloat32, 5, rank)).status;
        CHECK_FAILS(status, Code::kCommunication, "allreduce 'second': " + words);
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
  constexpr int kSize = 5;
  Engines engines(kSize);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(OneBucket(AddPlan(engine, RingAllreduce(rank, kSize))), &channel));
    for (int i = 0; i < 3; ++i) CHECK_OK(Step(engine, channel, rank));
    if (rank != 2) {
      CHECK_FAILS(Step(engine, channel, rank), Code::kCommunication,
                  "bucket 0 of 'SGD' (step 4): rank 2 has shut down");
      CHECK_FAILS(Step(engine, channel, rank), Code::kCommunication, "rank 2 has shut down");
    }
    engine->Stop();
  });
}

TEST("leave: messages sent before the last one are delivered to ranks that come late") {
  // Rank 0 sends to rank 1, which passes on to rank 2: rank 0 has finished and gone while the others still work.
  for (int round = 0; round < 10; ++round) {
    Config config = QuickConfig();
    config.leave_grace_s = 60;
    auto inner = MakeThreadTransports(3);
    std::vector<std::shared_ptr<Engine>> engines(3);
    for (int rank = 0; rank < 3; ++rank) {
      auto transport = std::make_shared<SlowTransport>(inner[rank], round, rank == 0 ? 0 : 90);
      CHECK_OK(Engine::Start(transport, config, 1, &engines[rank]));
    }
    RunThreads(
        3,
        [&](int rank) {
          CallSpec spec = AllreduceSpec("w", AddPlan(engines[rank].get(), ChainBroadcast(rank, 3, 0)), 100);
          spec.kind = Kind::kBroadcast;
          spec.segment_nbytes = 40;
          Result result = Call(engines[rank].get(), spec, Input(DType::kFloat32, 100, rank));
          CHECK_OK(result.status);
          CHECK(result.data == Input(DType::kFloat32, 100, 0));
          engines[rank]->Stop();
        },
        [&] { inner[0]->Abort(1); });
  }
}

TEST("stop: calls that cannot end any more get words, and the rank went down alone") {
  Config config = QuickConfig();
  config.drain_s = 0.05;
  Engines engines(2, config);
  int64_t plan = AddPlan(engines[0], RingAllreduce(0, 2)), channel = -1;
  CHECK_OK(engines[0]->OpenChannel(OneBucket(plan), &channel));
  CHECK_OK(engines[0]->BeginStep(channel));
  std::future<Result> collect = StartCollect(engines[0], channel, 0, 1, 256);
  std::future<Result> call = StartCall(engines[0], AllreduceSpec("x", plan, 5), Input(DType::kFloat32, 5, 0));
  std::future<bool> alone = std::async(std::launch::async, [&] { return engines[0]->Stop(); });
  CHECK_FAILS(Await(std::move(call), "x").status, Code::kStopped,
              "allreduce 'x': the engine has been shut down before this ended");
  CHECK_FAILS(Await(std::move(collect), "collect").status, Code::kStopped, "the engine has been shut down");
  CHECK(!engines[1]->Stop());
  CHECK(Await(std::move(alone), "the stop"));
}

TEST("stop: data under way is kept, and the rank went down alone") {
  Config config = QuickConfig();
  config.drain_s = 0.05;
  Engines engines(2, config);
  int64_t channel = -1, ticket = 0;
  CHECK_OK(engines[0]->OpenChannel(OneBucket(AddPlan(engines[0], RingAllreduce(0, 2))), &channel));
  CHECK_OK(engines[0]->BeginStep(channel));
  CHECK_OK(engines[0]->Submit(channel, 0, Input(DType::kFloat32, 64, 0).data(), 256, &ticket));
  std::future<Result> collect = StartCollect(engines[0], channel, 0, ticket, 256);
  CHECK(engines.StopAll()[0]);
  CHECK_FAILS(Await(std::move(collect), "collect").status, Code::kStopped, "the engine has been shut down");
}

TEST("stop: a rank whose peers go on has not gone down alone; stopping again changes nothing") {
  Config config = QuickConfig();
  config.handshake_s = 0.05;
  Engines engines(2, config);
  CHECK(!engines[0]->Stop());
  CHECK(!engines[0]->Stop());
  CHECK(!engines[1]->Stop());
}

TEST("stop: every door of a stopped engine answers with words") {
  Engines engines(1);
  Engine* engine = engines[0];
  int64_t plan = AddPlan(engine, Rows{}), channel = -1, ticket = 0;
  CHECK_OK(engine->OpenChannel(OneBucket(plan), &channel));
  CHECK(!engine->Stop());
  const char* words = "the engine has been shut down";
  CHECK_FAILS(engine->AddPlan(nullptr, 0, 1, &plan), Code::kStopped, words);
  CHECK_FAILS(engine->OpenChannel(OneBucket(plan), &channel), Code::kStopped, words);
  CHECK_FAILS(engine->BeginStep(channel), Code::kStopped, words);
  CHECK_FAILS(engine->Submit(channel, 0, "", 0, &ticket), Code::kStopped, words);
  CHECK_FAILS(Await(StartCollect(engine, channel, 0, 1, 0), "collect").status, Code::kStopped, words);
  CHECK_FAILS(Call(engine, AllreduceSpec("x", plan, 0), "").status, Code::kStopped, words);
  CHECK_FAILS(Exchange(engine, "x", "").first, Code::kStopped, words);
  CHECK_OK(engine->CloseChannel(channel));
}

TEST("start: engines start again in one process, and old handles are answered with words") {
  int64_t old_plan = 0, old_channel = 0;
  for (int64_t generation = 1; generation <= 3; ++generation) {
    Engines engines(2, QuickConfig(), generation);
    engines.Each([&](int rank, Engine* engine) {
      int64_t channel = -1, ticket = 0;
      if (generation > 1) {
        const char* words = "belongs to an engine that has been shut down";
        CHECK_FAILS(Call(engine, AllreduceSpec("x", old_plan, 1), "1234").status, Code::kStopped, words);
        CHECK_FAILS(engine->RemovePlan(old_plan), Code::kStopped, words);
        CHECK_FAILS(engine->OpenChannel(OneBucket(old_plan), &channel), Code::kStopped, words);
        CHECK_FAILS(engine->BeginStep(old_channel), Code::kStopped, words);
        CHECK_FAILS(engine->Submit(old_channel, 0, "", 0, &ticket), Code::kStopped, words);
        CHECK_FAILS(engine->CloseChannel(old_channel), Code::kStopped, words);
        CHECK_FAILS(Await(StartCollect(engine, old_channel, 0, 1, 0), "collect").status, Code::kStopped, words);
      }
      int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
      CHECK_OK(engine->OpenChannel(OneBucket(plan), &channel));
      CHECK_FAILS(engine->BeginStep(channel + 1), Code::kInvalid, "was never opened");
      CHECK_OK(Step(engine, channel, rank));
    });
    old_plan = generation << 32;
    old_channel = generation << 32;
    for (char alone : engines.StopAll()) CHECK(!alone);
  }
}

TEST("failure: an aborted job fails everything on all ranks with words") {
  Engines engines(3);
  std::atomic<int> past{0};
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 3)), channel = -1;
    CHECK_OK(engine->OpenChannel(OneBucket(plan), &channel));
    std::future<Result> waits;
    if (rank != 1) waits = StartCall(engine, AllreduceSpec("x", plan, 5), Input(DType::kFloat32, 5, rank));
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
  auto inner = MakeThreadTransports(3);
  std::vector<std::shared_ptr<SlowTransport>> transports;
  std::vector<std::shared_ptr<Engine>> engines(3);
  for (int rank = 0; rank < 3; ++rank) {
    transports.push_back(std::make_shared<SlowTransport>(inner[rank], 1, 0));
    CHECK_OK(Engine::Start(transports[rank], QuickConfig(), 1, &engines[rank]));
  }
  RunThreads(
      3,
      [&](int rank) {
        Engine* engine = engines[rank].get();
        int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
        CHECK_OK(Call(engine, AllreduceSpec("good", plan, 50), Input(DType::kFloat32, 50, rank)).status);
        if (rank == 1) transports[1]->broken = true;
        Status status = Call(engine, AllreduceSpec("bad", plan, 50), Input(DType::kFloat32, 50, rank)).status;
        // A rank whose last message arrived before the news of the failure has its result.
        if (!status.ok() || rank == 1) {
          CHECK_FAILS(status, Code::kCommunication, "rank 1 has failed: allreduce 'bad': the cable is cut");
        }
        status = Call(engine, AllreduceSpec("later", plan, 50), Input(DType::kFloat32, 50, rank)).status;
        CHECK_FAILS(status, Code::kCommunication, "rank 1 has failed: allreduce 'bad': the cable is cut");
        engine->Stop();
      },
      [&] { inner[0]->Abort(1); });
}

TEST("failure: bytes that are no message fail the engine with words") {
  Engines engines(2);
  CHECK_OK(engines.transport(1)->SendControl(0, "nonsense"));
  Until("the failure",
        [&] { return !engines[0]->BeginStep(0).ok() && engines[0]->BeginStep(0).code == Code::kInternal; });
  CHECK_FAILS(engines[0]->BeginStep(0), Code::kInternal, "do all ranks run the same build");
}

TEST("failure: a start of a call that was never made fails the engine with words") {
  Engines engines(2);
  CHECK_OK(engines.transport(0)->SendControl(1, Encode(CallStart{99, {}, {}})));
  Until("the failure", [&] { return engines[1]->BeginStep(0).code == Code::kInternal; });
  CHECK_FAILS(engines[1]->BeginStep(0), Code::kInternal, "rank 0 has started a call (99) that this rank has not made");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they end the program where memory is refused
TEST("failure: a call or bucket for which there is no memory fails with words on all ranks") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 2)), channel = -1, ticket = 0;
    ChannelSpec spec = OneBucket(plan);
    spec.elements = {int64_t{1} << 48};
    CHECK_OK(engine->OpenChannel(spec, &channel));
    CHECK_OK(engine->BeginStep(channel));
    CHECK_FAILS(engine->Submit(channel, 0, "", int64_t{1} << 50, &ticket), Code::kInternal,
                "no memory for a bucket of 'SGD'");
    CHECK_OK(Call(engine, BarrierSpec("all"), "").status);
    Status status = Call(engine, AllreduceSpec("x", plan, int64_t{1} << 48), "").status;
    CHECK_FAILS(status, Code::kInternal, "allreduce 'x': no memory for its buffer");
  });
}
#endif

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

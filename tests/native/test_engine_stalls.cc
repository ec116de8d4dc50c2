// Ranks that do not come: warnings with names, failures where they are asked for, and late ranks that still come.
#include <mutex>

#include "engine/stall.h"
#include "engines.h"

namespace hvd_ext::test {
namespace {

std::mutex warnings_mutex;
std::vector<std::string> warnings;

void Keep(const std::string& text) {
  std::lock_guard<std::mutex> lock(warnings_mutex);
  warnings.push_back(text);
}

// While an object of this class lives, warnings go to `warnings`.
struct Listening {
  Listening() {
    std::lock_guard<std::mutex> lock(warnings_mutex);
    warnings.clear();
    SetWarningSink(Keep);
  }
  ~Listening() { SetWarningSink(nullptr); }
};

// Returns how many lines of a rank begin with `begin` and end with `end`.
int Heard(int rank, const std::string& begin, const std::string& end) {
  std::lock_guard<std::mutex> lock(warnings_mutex);
  std::string head = "hvd_ext: [rank " + std::to_string(rank) + "] " + begin;
  return static_cast<int>(std::count_if(warnings.begin(), warnings.end(), [&](const std::string& text) {
    size_t tail = text.size() - std::min(text.size(), end.size() + 1);
    return text.rfind(head, 0) == 0 && text.compare(tail, std::string::npos, end + "\n") == 0;
  }));
}

void WaitUntilHeard(int rank, const std::string& begin, const std::string& end) {
  Until("'" + begin + "...', '..." + end + "'", [&] { return Heard(rank, begin, end) > 0; });
}

// Waits for the time of several further warnings, and checks that only rank 0 has said these words, and only once.
void CheckSaidOnce(const std::string& begin, const std::string& end) {
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK_EQ(Heard(0, begin, end), 1);
  for (int rank = 1; rank < 4; ++rank) CHECK_EQ(Heard(rank, begin, end), 0);
}

// Limits of engines whose warnings, or failures, a test waits for.
Config Impatient(double warn_s, double fatal_s) {
  Config config = QuickConfig();
  config.stall_warn_s = warn_s;
  config.stall_fatal_s = fatal_s;
  return config;
}

const Config kWarns = Impatient(0.05, 0), kFails = Impatient(0, 0.8);
const std::string kLimit = ", longer than the limit (0.8 s, HVD_EXT_STALL_FATAL_S)";

ChannelSpec TwoBuckets(int64_t plan) {
  return ChannelOf("Adam", {4, 4, 4, 4, 4, 4, 4, 4},
                   {{DType::kFloat32, {}, ReduceOp::kSum, plan, 0, {7}},
                    {DType::kFloat32, {}, ReduceOp::kSum, plan, 0, {6, 5, 4, 3, 2, 1, 0}}});
}

ChannelSpec PartialBuckets(int size, int64_t plan, Sync sync, int64_t quorum) {
  ChannelSpec spec = TwoBuckets(plan);
  spec.partial.emplace();
  spec.partial->sync = sync;
  spec.partial->quorum = quorum;
  spec.partial->staleness = 1;
  spec.partial->plan = plan;
  spec.partial->hosts.assign(static_cast<size_t>(size), 0);
  return spec;
}

const std::vector<int64_t> kAll = {7, 6, 5, 4, 3, 2, 1, 0};

Status Submit(Engine* engine, int64_t channel, const std::vector<int64_t>& tensors = kAll) {
  int64_t ticket = 0;
  for (int64_t tensor : tensors) {
    HVD_EXT_RETURN_IF_ERROR(engine->Submit(channel, tensor, "0123456789abcdef", 16, &ticket));
  }
  return Status::Ok();
}

Status Collect(Engine* engine, int64_t channel, int64_t tensor, int64_t step) {
  return Await(StartCollect(engine, channel, tensor, step, 16), "tensor " + std::to_string(tensor)).status;
}

// A step, all of whose results are collected; the first error.
Status WholeStep(Engine* engine, int64_t channel, int64_t step) {
  HVD_EXT_RETURN_IF_ERROR(engine->BeginStep(channel));
  HVD_EXT_RETURN_IF_ERROR(Submit(engine, channel));
  for (int64_t tensor : kAll) HVD_EXT_RETURN_IF_ERROR(Collect(engine, channel, tensor, step));
  return Status::Ok();
}

TEST("stall: rank 0 says once who has not come to a call, and again when fewer are missing; a late rank still comes") {
  Listening listening;
  OnEngines(4, kWarns, [](int rank, Engine* engine) {
    const CallSpec spec = AllreduceSpec("x", AddPlan(engine, RingAllreduce(rank, 4)), 9);
    const char* both = " s for ranks 2, 3 (they have not called it)";
    const char* last = " s for rank 3 (it has not called it)";
    if (rank >= 2) WaitUntilHeard(0, "allreduce 'x' has waited ", both);
    if (rank == 3) {
      WaitUntilHeard(0, "allreduce 'x' has waited ", last);
      CheckSaidOnce("allreduce 'x' has waited ", both);
      CheckSaidOnce("allreduce 'x' has waited ", last);
    }
    CheckAllreduce(engine, spec);
  });
}

TEST("stall: a call that waits too long fails everything with the same words, on late ranks too") {
  Listening listening;
  std::atomic<int> failed{0};
  OnEngines(3, kFails, [&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3)), channel = OpenChannel(engine, TwoBuckets(plan));
    if (rank == 1) Until("the failure", [&] { return failed == 2; });
    Status status = Await(StartAllreduce(engine, AllreduceSpec("x", plan, 9)), "x").status;
    CHECK_FAILS(status, Code::kCommunication, "allreduce 'x' has waited ");
    CHECK_FAILS(status, Code::kCommunication,
                " s for rank 1 (it has not called it)" + kLimit + "; nothing works until shutdown() and init()");
    CHECK_FAILS(engine->BeginStep(channel), Code::kCommunication, "for rank 1 (it has not called it)");
    ++failed;
  });
  CHECK_EQ(warnings.size(), 0u);
}

TEST("stall: a partial round that is not opened warns once for whose gradients it waits") {
  Listening listening;
  OnEngines(4, kWarns, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, StarAllreduce(rank, 4));
    const int64_t channel = OpenChannel(engine, PartialBuckets(4, plan, Sync::kQuorum, 3));
    const char* some = " s for 2 of ranks 1, 2, 3 (their gradients are not there)";
    if (rank > 0) WaitUntilHeard(0, "round 1 of 'Adam' has waited ", some);
    if (rank == 1) CheckSaidOnce("round 1 of 'Adam' has waited ", some);
    CHECK_OK(WholeStep(engine, channel, 1));
  });
}

TEST("stall: a partial round that waits too long to be opened fails everything with words that name the rank") {
  Listening listening;
  std::atomic<int> failed{0};
  OnEngines(3, kFails, [&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, StarAllreduce(rank, 3));
    const int64_t channel = OpenChannel(engine, PartialBuckets(3, plan, Sync::kFull, 1));
    if (rank == 2) Until("the failure", [&] { return failed == 2; });
    Status status = WholeStep(engine, channel, 1);
    CHECK_FAILS(status, Code::kCommunication, "round 1 of 'Adam' has waited ");
    CHECK_FAILS(status, Code::kCommunication, " s for rank 2 (its gradient is not there), longer than the limit");
    ++failed;
  });
}

TEST("stall: a rank at the bound of its staleness is named by those that wait for it") {
  Listening listening;
  OnEngines(3, kWarns, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, StarAllreduce(rank, 3));
    const int64_t channel = OpenChannel(engine, PartialBuckets(3, plan, Sync::kSolo, 1));
    for (int64_t step = 1; step <= 2; ++step) {
      if (rank == 2 && step == 1) {
        WaitUntilHeard(0, "bucket 0 of 'Adam' (step 2) has waited ",
                       " s for rank 2 (its next gradient is not there, and it is as far behind as its staleness "
                       "allows)");
      }
      CHECK_OK(WholeStep(engine, channel, step));
    }
  });
}

TEST("stall: a bucket that waits warns which ranks lack which tensors, on rank 0 and once") {
  Listening listening;
  OnEngines(3, kWarns, [](int rank, Engine* engine) {
    const int64_t channel = OpenChannel(engine, TwoBuckets(AddPlan(engine, StarAllreduce(rank, 3))));
    const char* begin = "bucket 1 of 'Adam' (step 1) has waited ";
    const char* end = " s for rank 2 ('a', 'b', 'c' not submitted)";
    CHECK_OK(engine->BeginStep(channel));
    CHECK_OK(Submit(engine, channel, {7, 6, 5}));
    if (rank == 2) {
      CHECK_OK(Submit(engine, channel, {4, 3}));
      WaitUntilHeard(0, begin, end);
      CheckSaidOnce(begin, end);
    } else {
      if (rank == 1) {
        WaitUntilHeard(0, begin,
                       " s for ranks 1 ('a', 'b', 'c', 'd', 'e' not submitted), 2 ('a', 'b', 'c' not submitted)");
      }
      CHECK_OK(Submit(engine, channel, {4, 3}));
    }
    CHECK_OK(Submit(engine, channel, {2, 1, 0}));
    CHECK_OK(Collect(engine, channel, 0, 1));
    if (rank == 2) {
      WaitUntilHeard(0, "bucket 0 of 'Adam' (step 2) has waited ", " s for rank 2 (it has not begun the step)");
    }
    CHECK_OK(WholeStep(engine, channel, 2));
  });
}

TEST("stall: a bucket waits for a rank that has not opened the channel, and says so") {
  Listening listening;
  OnEngines(2, kWarns, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    if (rank == 1) {
      WaitUntilHeard(0, "bucket 0 of 'Adam' (step 1) has waited ", " s for rank 1 (it has not opened the channel)");
    }
    CHECK_OK(WholeStep(engine, OpenChannel(engine, TwoBuckets(plan)), 1));
  });
}

TEST("stall: a bucket that waits too long fails everything with words, on late ranks too") {
  Listening listening;
  std::atomic<int> opened{0};
  OnEngines(3, kFails, [&](int rank, Engine* engine) {
    const int64_t channel = OpenChannel(engine, TwoBuckets(AddPlan(engine, RingAllreduce(rank, 3))));
    ++opened;
    Until("all channels", [&] { return opened == 3; });
    const std::string words = "(it has not begun the step)";
    if (rank == 0) {
      int64_t plan = -1;
      Until("the news of the failure", [&] { return !engine->AddPlan(nullptr, 0, 1, &plan).ok(); });
      CHECK_FAILS(engine->BeginStep(channel), Code::kCommunication, " s for rank 0 " + words + kLimit);
      return;
    }
    // A rank may be told of the other's failure before it has submitted all.
    Status status = WholeStep(engine, channel, 1);
    CHECK_FAILS(status, Code::kCommunication, "bucket 0 of 'Adam' (step 1) has waited ");
    CHECK_FAILS(status, Code::kCommunication, words);
  });
}

TEST("stall: a rank whose engine does not run is said not to answer") {
  Listening listening;
  Config config = kWarns;
  config.drain_s = config.handshake_s = 0.05;
  auto transports = MakeThreadTransports(3);  // nobody runs rank 2
  std::vector<std::shared_ptr<Engine>> engines(2);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_OK(Engine::Start(transports[rank], config, 1, &engines[rank]));
    Engine* engine = engines[rank].get();
    const int64_t channel = OpenChannel(engine, TwoBuckets(AddPlan(engine, RingAllreduce(rank, 3))));
    CHECK_OK(engine->BeginStep(channel));
    CHECK_OK(Submit(engine, channel, {7}));
  }
  WaitUntilHeard(0, "bucket 0 of 'Adam' (step 1) has waited ", " s for rank 2 (it does not answer)");
}

TEST("stall: a silent rank 0 is named by the ranks that wait for it, and its silence can be fatal") {
  Listening listening;
  Config config = Impatient(0.1, 0.5);
  config.drain_s = config.handshake_s = 0.05;
  // Two jobs of two ranks at once, in which nobody runs rank 0.
  std::shared_ptr<Engine> calls, steps;
  auto of_calls = MakeThreadTransports(2), of_steps = MakeThreadTransports(2);
  CHECK_OK(Engine::Start(of_calls[1], config, 1, &calls));
  CHECK_OK(Engine::Start(of_steps[1], config, 1, &steps));
  std::future<Result> call = StartCall(calls.get(), BarrierSpec("all"), "");
  const int64_t channel = OpenChannel(steps.get(), TwoBuckets(AddPlan(steps.get(), RingAllreduce(1, 2))));
  CHECK_OK(steps->BeginStep(channel));
  CHECK_OK(Submit(steps.get(), channel, {7}));
  WaitUntilHeard(1, "barrier 'all' has waited ", " s; rank 0, which knows who is missing, does not answer");
  CHECK_FAILS(
      Await(std::move(call), "the barrier").status, Code::kCommunication,
      "; rank 0, which knows who is missing, does not answer, longer than the limit (0.5 s, HVD_EXT_STALL_FATAL_S)");
  CHECK_FAILS(Collect(steps.get(), channel, 7, 1), Code::kCommunication,
              "; rank 0, which finds out who is missing, does not answer, longer than the limit");
}

TEST("stall: the words name at most five tensors and count the rest") {
  CHECK_EQ(NameList({"a", "b"}, 2), "'a', 'b'");
  CHECK_EQ(NameList({"a", "b", "c", "d", "e", "f"}, 9), "'a', 'b', 'c', 'd', 'e' and 4 more");
  CHECK_EQ(Seconds(0.25), "0.2 s");
  CHECK_EQ(Seconds(60.4), "60 s");
  CHECK_EQ(WaitsForCall("barrier 'all'", 60, {2, 3}),
           "barrier 'all' has waited 60 s for ranks 2, 3 (they have not called it)");
}

TEST("stall: the words for a lane name every rank that holds it up and why") {
  LaneReport has_it{true, LaneReport::kOpen, 5, 0, {}}, behind{true, LaneReport::kOpen, 4, 0, {}};
  LaneReport lacks{true, LaneReport::kOpen, 4, 7, {"a", "b", "c", "d", "e"}},
      closed{true, LaneReport::kClosed, 4, 0, {}};
  CHECK_EQ(
      WaitsForLane("bucket 1", 75, 4, {has_it, lacks, closed, behind, LaneReport{}}),
      "bucket 1 has waited 75 s for ranks 1 ('a', 'b', 'c', 'd', 'e' and 2 more not submitted), 2 (it has closed the "
      "channel), 3 (it has not reached this point), 4 (it does not answer)");
  CHECK_EQ(WaitsForLane("bucket 1", 75, 4, {has_it, has_it}),
           "bucket 1 has waited 75 s for messages: all ranks take part in it, but nothing arrives");
}

}  // namespace
}  // namespace hvd_ext::test

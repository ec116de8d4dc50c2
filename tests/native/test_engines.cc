// Several engines in one process: those of a rank in the job and in process sets.
#include "engine/api.h"
#include "engine/engines.h"
#include "engine/stall.h"
#include "engines.h"
#include "hosts.h"

namespace hvd_ext::test {
namespace {

Config Named(std::vector<int> numbers) {
  Config config = QuickConfig();
  config.numbers = std::move(numbers);
  return config;
}

TEST("engines: calls of two engines in any order on each rank do not meet") {
  for (MakeTransports make : {&MakeThreadTransports, &MakeHostTransports<kRoomyArena>}) {
    const Over over(make);
    Engines job(3, QuickConfig(), 1), set(3, QuickConfig(), 2);
    job.Each([&](int rank, Engine* engine) {
      Engine* other = set[rank];
      const int64_t ring = AddPlan(engine, RingAllreduce(rank, 3)), star = AddPlan(other, StarAllreduce(rank, 3));
      CHECK_EQ(ring >> 32, 1);
      CHECK_EQ(star >> 32, 2);
      const CallSpec of_job = AllreduceSpec("x", ring, 1003), of_set = AllreduceSpec("x", star, 501);
      for (int step = 0; step < 20; ++step) {
        std::future<Result> first, second;
        const bool job_first = (rank + step) % 2 == 0;
        if (job_first) first = StartAllreduce(engine, of_job, step);
        second = StartAllreduce(other, of_set, step + 7);
        if (!job_first) first = StartAllreduce(engine, of_job, step);
        CheckReduced(std::move(first), of_job, 3, step);
        CheckReduced(std::move(second), of_set, 3, step + 7);
      }
    });
  }
}

TEST("engines: one stops while the other works") {
  Engines job(2, QuickConfig(), 1), set(2, QuickConfig(), 2);
  std::promise<void> begun;
  bool quiet = false;
  std::thread stopper([&] {
    begun.get_future().wait();
    std::vector<char> alone = set.StopAll();
    quiet = !alone[0] && !alone[1] && set[0]->quiet() && set[1]->quiet();
  });
  job.Each([&](int rank, Engine* engine) {
    const CallSpec spec = AllreduceSpec("x", AddPlan(engine, RingAllreduce(rank, 2)), 1003);
    for (int step = 0; step < 100; ++step) {
      if (rank == 0 && step == 20) begun.set_value();
      CheckAllreduce(engine, spec, step);
    }
  });
  stopper.join();
  CHECK(quiet);
  CHECK_FAILS(Call(set[0], BarrierSpec("late"), "").status, Code::kStopped, "has been shut down");
}

TEST("engines: messages name ranks by the numbers that people know") {
  Engines set(3, Named({4, 7, 9}));
  set.Each([&](int rank, Engine* engine) {
    int64_t star = AddPlan(engine, StarAllreduce(rank, 3));
    int64_t elements = rank == 1 ? 5 : 4;
    Result result = Call(engine, AllreduceSpec("x", star, elements), Input(DType::kFloat32, elements, rank));
    CHECK_FAILS(result.status, Code::kMismatch, "rank 7 has float32[5], rank 4 has float32[4]");
    CallSpec spec = AllreduceSpec("b", AddPlan(engine, ChainBroadcast(rank, 3, 0)), 1);
    spec.kind = Kind::kBroadcast;
    spec.root = rank == 2 ? 1 : 0;
    result = Call(engine, spec, Input(DType::kFloat32, 1, rank));
    CHECK_FAILS(result.status, Code::kMismatch, "rank 9 has root rank 7, rank 4 has root rank 4");
    if (rank == 1) engine->Refuse("r", "no");
    if (rank != 1) {
      CHECK_FAILS(Call(engine, BarrierSpec("r"), "").status, Code::kMismatch, "rank 7 has refused it: no");
    }
  });
  std::thread leaver([&] { set[2]->Stop(); });
  set.Each([&](int rank, Engine* engine) {
    if (rank == 2) return;
    CHECK_FAILS(Call(engine, BarrierSpec("more"), "").status, Code::kCommunication, "rank 9 has shut down");
    CHECK_FAILS(Call(engine, BarrierSpec("again"), "").status, Code::kCommunication, "rank 9 has shut down");
  });
  set[0]->StopSoon();
  set[1]->StopSoon();
  leaver.join();
}

TEST("engines: a stall in a set is named by the job's numbers") {
  static std::string printed;
  printed.clear();
  Config config = Named({2, 5});
  config.stall_warn_s = 0.05;
  config.stall_fatal_s = 0.3;
  SetWarningSink([](const std::string& text) { printed += text; });
  {
    Engines set(2, config);
    Status failed = Call(set[0], BarrierSpec("all"), "").status;
    CHECK_FAILS(failed, Code::kCommunication, "for rank 5 (it has not called it)");
    CHECK_FAILS(failed, Code::kCommunication, "nothing works in the process set of ranks 2, 5 until all ranks remove");
  }
  SetWarningSink(nullptr);
  CHECK(printed.find("for rank 5") != std::string::npos);
  std::vector<LaneReport> reports(2);
  reports[0].answered = true;
  reports[0].runs = 9;
  CHECK(WaitsForLane("bucket 0 of 'Adam'", 60, 0, reports, {2, 5}) ==
        "bucket 0 of 'Adam' in the process set of ranks 2, 5 has waited 60 s for rank 5 (it does not answer)");
}

constexpr HvdExtConfig kConfig = {60, 0, 8, 1, 0, ""};

int64_t StartJob_() {
  int64_t job = 0;
  CHECK_EQ(hvd_ext_start_local(&kConfig, &job), 0);
  return job;
}

int64_t StartSet_(int64_t parent) {
  int64_t set = 0;
  int32_t rank = -1;
  const int32_t ranks[] = {0};
  CHECK_EQ(hvd_ext_start_set(parent, ranks, 1, 1, &kConfig, &set, &rank), 0);
  CHECK_EQ(rank, 0);
  return set;
}

std::string Exchanged(int64_t engine, const std::string& payload) {
  void* result = nullptr;
  const char* data = nullptr;
  const int64_t* offsets = nullptr;
  CHECK_EQ(
      hvd_ext_exchange(engine, "x", payload.data(), static_cast<int64_t>(payload.size()), 0, &result, &data, &offsets),
      0);
  std::string all(data, static_cast<size_t>(offsets[1]));
  hvd_ext_exchange_free(result);
  return all;
}

TEST("engines: a set runs beside its job, and stops alone or with it") {
  int64_t job = StartJob_(), first = StartSet_(job), second = StartSet_(job);
  CHECK(job < first && first < second);
  int64_t plan = 0, of_job = 0;
  CHECK_EQ(hvd_ext_plan_add(first, nullptr, 0, 1, &plan), 0);
  CHECK_EQ(hvd_ext_plan_add(0, nullptr, 0, 1, &of_job), 0);  // engine 0 is the job's
  CHECK_EQ(plan >> 32, first);
  CHECK_EQ(of_job >> 32, job);
  for (int64_t engine : {second, job, first})
    CHECK(Exchanged(engine, std::to_string(engine)) == std::to_string(engine));
  int32_t alone = 7;
  CHECK_EQ(hvd_ext_stop(first, 1, &alone), 0);
  CHECK_EQ(alone, 0);
  CHECK_EQ(hvd_ext_stop(first, 1, &alone), 0);  // a second stop is harmless
  std::shared_ptr<Engine> found;
  CHECK_FAILS(Engine::Find(first, &found), Code::kStopped, "its process set was removed");
  CHECK_FAILS(Engine::OfPlan(plan, &found), Code::kStopped, "plan (" + std::to_string(plan) + ") belongs to an engine");
  CHECK_FAILS(Engine::OfChannel(plan, &found), Code::kStopped, "open it again");
  CHECK_OK(Engine::OfPlan(of_job, &found));
  CHECK_EQ(found->generation(), job);
  found.reset();
  CHECK(Exchanged(second, "still here") == "still here");
  CHECK_EQ(hvd_ext_stop(job, 0, &alone), 0);
  CHECK_EQ(alone, 0);
  CHECK_FAILS(Engine::Find(second, &found), Code::kStopped, "no engine runs; call init() first");
  CHECK_FAILS(Engine::OfPlan(of_job, &found), Code::kStopped, "no engine runs; call init() first");
}

TEST("engines: a set of a set stops with the job, and 0 is the job as a parent too") {
  int64_t job = StartJob_(), set = StartSet_(0), inner = StartSet_(set);
  CHECK(Exchanged(0, "job") == "job");
  std::shared_ptr<Engine> found;
  CHECK_OK(Engine::Find(0, &found));
  CHECK_EQ(found->generation(), job);
  CHECK_OK(Engine::Find(inner, &found));
  int32_t alone = 7;
  CHECK_EQ(hvd_ext_stop(job, 0, &alone), 0);
  CHECK_EQ(alone, 0);
  CHECK_FAILS(Call(found.get(), BarrierSpec("late"), "").status, Code::kStopped, "has been shut down");
  job = StartJob_();
  for (int64_t number : {set, inner}) CHECK_FAILS(Engine::Find(number, &found), Code::kStopped, "has been shut down");
  CHECK_EQ(hvd_ext_stop(job, 0, &alone), 0);
}

TEST("engines: a set that its ranks do not make is refused") {
  int64_t job = StartJob_(), set = 0;
  for (std::vector<int> ranks : {std::vector<int>{}, {1}, {0, 0}, {0, 1}, {-1, 0}}) {
    std::shared_ptr<Engine> engine;
    CHECK_FAILS(StartSet(job, ranks, 1, Config(), &engine), Code::kInvalid, "must be ascending, in [0, 1)");
  }
  int32_t alone = 0, rank = 0, ranks[] = {0};
  CHECK_EQ(hvd_ext_start_set(job + 9, ranks, 1, 1, &kConfig, &set, &rank), static_cast<int>(Code::kStopped));
  CHECK_EQ(hvd_ext_stop(job, 0, &alone), 0);
}

}  // namespace
}  // namespace hvd_ext::test

// The trace: its ring buffer, and what an engine records in it.
#include <map>

#include "engine/trace.h"
#include "engines.h"

namespace hvd_ext::test {
namespace {

std::vector<TraceRecord> ReadAll(const Trace& trace, int64_t* dropped) {
  std::vector<TraceRecord> records(100000);
  records.resize(static_cast<size_t>(trace.Read(records.data(), 100000, dropped)));
  return records;
}

TEST("trace: the ring keeps the newest records in order and counts those that it drops") {
  Trace trace;
  trace.Start(5);
  for (int i = 0; i < 12; ++i) trace.Add(TraceKind::kRun, 1, i, 2 * i, i, i + 0.5);
  int64_t dropped = -1;
  std::vector<TraceRecord> records = ReadAll(trace, &dropped);
  CHECK_EQ(dropped, 7);
  CHECK_EQ(records.size(), 5u);
  for (int i = 0; i < 5; ++i) {
    CHECK_EQ(records[i].id, 7 + i);
    CHECK_EQ(records[i].part, 2 * (7 + i));
    CHECK_EQ(records[i].begin_ns, (7 + i) * int64_t{1000000000});
    CHECK_EQ(records[i].end_ns - records[i].begin_ns, 500000000);
  }
  TraceRecord two[2];
  CHECK_EQ(trace.Read(two, 2, &dropped), 2);
  CHECK_EQ(two[0].id, 10);
  CHECK_EQ(dropped, 10);
}

TEST("trace: what comes before a start or after a stop is not kept, a start forgets, and a long name is cut") {
  Trace trace;
  int64_t dropped = -1;
  trace.Add(TraceKind::kRun, 1, 1, 0, 0, 1);
  CHECK_EQ(ReadAll(trace, &dropped).size(), 0u);
  trace.Start(10);
  trace.Add(TraceKind::kRun, 1, 2, 0, 0, 1);
  trace.Stop();
  CHECK(!trace.on());
  trace.Add(TraceKind::kRun, 1, 3, 0, 0, 1);
  CHECK_EQ(ReadAll(trace, &dropped).size(), 1u);
  CHECK_EQ(dropped, 0);
  trace.Start(10);
  CHECK_EQ(ReadAll(trace, &dropped).size(), 0u);
  trace.AddCall(3, 77, std::string(200, 'x'), 1, 2);
  TraceRecord record = ReadAll(trace, &dropped).at(0);
  CHECK_EQ(std::string(record.name), std::string(63, 'x'));
  CHECK_EQ(record.plan, 77);
}

TEST("trace: records of several threads are all there, whole") {
  Trace trace;
  trace.Start(4000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) trace.Add(TraceKind::kRun, t, i, t * i, t, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t dropped = -1;
  std::vector<int> next(4);
  for (const TraceRecord& record : ReadAll(trace, &dropped)) {
    CHECK_EQ(record.id, next[record.lane]++);
    CHECK_EQ(record.part, record.lane * record.id);
  }
  CHECK_EQ(dropped, 0);
  for (int count : next) CHECK_EQ(count, 1000);
}

// Three tensors in two buckets: {2, 1} and {0}.
ChannelSpec Spec(int64_t plan) {
  return ChannelOf(
      "Adam", {300, 300, 300},
      {{DType::kFloat32, {}, ReduceOp::kSum, plan, 400, {2, 1}}, {DType::kFloat32, {}, ReduceOp::kSum, plan, 0, {0}}});
}

TEST("trace: an engine records each bucket from its first tensor to its last collect, and each round between") {
  for (int size : {1, 3}) {
    OnEngines(size, [&](int rank, Engine* engine) {
      const ChannelSpec spec = Spec(AddPlan(engine, RingAllreduce(rank, size)));
      const int64_t channel = OpenChannel(engine, spec);
      CHECK_OK(engine->StartTrace(1000));
      for (int step = 1; step <= 4; ++step) CheckStep(StartStep(engine, channel, spec, step), spec, size, step);
      engine->StopTrace();
      int64_t dropped = -1;
      std::map<std::pair<int64_t, TraceKind>, std::vector<TraceRecord>> found;
      for (const TraceRecord& record : ReadAll(engine->trace(), &dropped)) {
        CHECK(record.begin_ns > 0 && record.begin_ns <= record.end_ns);
        CHECK_EQ(record.lane, 1);
        found[{record.id, record.kind}].push_back(record);
      }
      CHECK_EQ(dropped, 0);
      for (int64_t step = 1; step <= 4; ++step) {
        auto& fills = found[{step, TraceKind::kFill}];
        auto& runs = found[{step, TraceKind::kRun}];
        auto& delivers = found[{step, TraceKind::kDeliver}];
        auto& rounds = found[{step, TraceKind::kRound}];
        CHECK_EQ((found[{step, TraceKind::kSubmitted}].size()), 1u);
        CHECK_EQ(fills.size(), 2u);
        CHECK_EQ(runs.size(), 2u);
        CHECK_EQ(delivers.size(), 2u);
        CHECK_EQ(rounds.size(), static_cast<size_t>(2 * 2 * (size - 1)));
        int64_t delivered_ns = 0, waited_ns = 0;
        for (int part = 0; part < 2; ++part) {
          CHECK_EQ(fills[part].part, part);
          const TraceRecord& run = runs[0].part == part ? runs[0] : runs[1];
          const TraceRecord& deliver = delivers[0].part == part ? delivers[0] : delivers[1];
          CHECK(fills[part].end_ns <= run.begin_ns);
          CHECK(run.end_ns <= deliver.begin_ns);
          if (deliver.round > 0) delivered_ns = std::max(delivered_ns, deliver.end_ns);
          for (const TraceRecord& round : rounds) {
            if (round.part == part) CHECK(run.begin_ns <= round.begin_ns && round.end_ns <= run.end_ns);
          }
        }
        for (const TraceRecord& wait : found[{step, TraceKind::kWait}]) waited_ns = wait.end_ns;
        CHECK(waited_ns >= delivered_ns);
      }
    });
  }
}

TEST("trace: calls are announced, started and ended, under their names") {
  OnEngines(2, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    CHECK_OK(engine->StartTrace(1000));
    CheckAllreduce(engine, AllreduceSpec("x", plan, 300));
    CHECK_OK(Call(engine, BarrierSpec("here"), "").status);
    engine->StopTrace();
    int64_t dropped = -1;
    std::map<TraceKind, std::vector<TraceRecord>> found;
    for (const TraceRecord& record : ReadAll(engine->trace(), &dropped)) {
      CHECK_EQ(record.lane, 0);
      found[record.kind].push_back(record);
    }
    auto& announced = found[TraceKind::kAnnounce];
    CHECK_EQ(announced.size(), 2u);
    CHECK_EQ(std::string(announced[0].name), "allreduce 'x'");
    CHECK_EQ(announced[0].plan, plan);
    CHECK_EQ(std::string(announced[1].name), "barrier 'here'");
    CHECK_EQ(announced[1].plan, -1);
    CHECK_EQ(found[TraceKind::kCall].size(), 2u);
    CHECK_EQ(found[TraceKind::kRun].size(), 1u);
    CHECK_EQ(found[TraceKind::kRound].size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      CHECK_EQ(announced[i].id, found[TraceKind::kCall][i].id);
      CHECK_EQ(announced[i].end_ns, found[TraceKind::kCall][i].begin_ns);
    }
  });
}

TEST("trace: an engine without a trace records nothing and takes no memory for it") {
  OnEngines(2, [](int rank, Engine* engine) {
    int64_t dropped = -1;
    CheckAllreduce(engine, AllreduceSpec("x", AddPlan(engine, RingAllreduce(rank, 2)), 300));
    CHECK_EQ(ReadAll(engine->trace(), &dropped).size(), 0u);
    CHECK_EQ(dropped, 0);
    CHECK_FAILS(engine->StartTrace(0), Code::kInvalid, "capacity (0) must be at least 1");
  });
}

}  // namespace
}  // namespace hvd_ext::test

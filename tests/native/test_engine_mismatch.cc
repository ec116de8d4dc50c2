// Calls on which the ranks disagree, and calls that are refused at once: every rank gets an error text, and the next
// call works.
#include <string>
#include <vector>

#include "engines.h"

namespace hvd_ext::test {
namespace {

void Disagree(const std::string& words, const std::function<void(int, CallSpec*)>& change) {
  constexpr int kSize = 4;
  Engines engines(kSize);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, kSize));
    CallSpec spec = AllreduceSpec("grad", plan, 4);
    change(rank, &spec);
    Result result = Call(engine, spec, Input(DType::kFloat64, 64, rank));
    CHECK_FAILS(result.status, Code::kMismatch, words);
    Result next = Call(engine, AllreduceSpec("grad", plan, 4), Input(DType::kFloat32, 4, rank));
    CHECK_OK(next.status);
    CHECK(next.data == Reduced(DType::kFloat32, ReduceOp::kSum, 4, kSize));
  });
}

TEST("mismatch: shapes that differ fail on all ranks, with both, and the next call works") {
  Disagree(
      "allreduce 'grad': rank 2 has float32[3], rank 0 has float32[4]; all ranks must give one dtype and one shape",
      [](int rank, CallSpec* spec) { spec->shape = {rank >= 2 ? 3 : 4}; });
  Disagree("rank 1 has float32[2, 2], rank 0 has float32[4]",
           [](int rank, CallSpec* spec) { spec->shape = rank == 1 ? std::vector<int64_t>{2, 2} : spec->shape; });
}

TEST("mismatch: dtypes that differ fail on all ranks") {
  Disagree("rank 3 has bfloat16[4], rank 0 has float32[4]", [](int rank, CallSpec* spec) {
    if (rank == 3) spec->dtype = DType::kBFloat16;
  });
}

TEST("mismatch: ops, roots, plans and segments that differ fail on all ranks") {
  Disagree("rank 1 has op average, rank 0 has op sum", [](int rank, CallSpec* spec) {
    if (rank == 1) spec->op = ReduceOp::kAverage;
  });
  Disagree("broadcast 'grad': rank 1 has root rank 1, rank 0 has root rank 0", [](int rank, CallSpec* spec) {
    spec->kind = Kind::kBroadcast;
    spec->root = rank;
  });
  Disagree("rank 2 has plan 7, rank 0 has plan 5; all ranks must use one algorithm and one topology",
           [](int rank, CallSpec* spec) { spec->plan_digest = rank == 2 ? 7 : 5; });
  Disagree("rank 1 has segments of bytes 64, rank 0 has segments of bytes 0",
           [](int rank, CallSpec* spec) { spec->segment_nbytes = 64 * rank; });
}

TEST("mismatch: kinds that differ under one name fail on all ranks") {
  Disagree("allreduce 'grad': rank 1 has barrier, rank 0 has allreduce; one name must mean the same collective",
           [](int rank, CallSpec* spec) {
             if (rank == 1) spec->kind = Kind::kBarrier;
           });
}

TEST("mismatch: a call that one rank refuses, at once or before it is made, fails on all, and the next call meets") {
  for (bool by_call : {true, false}) {
    constexpr int kSize = 3;
    Engines engines(kSize);
    engines.Each([&](int rank, Engine* engine) {
      int64_t plan = AddPlan(engine, RingAllreduce(rank, kSize));
      CallSpec spec = AllreduceSpec("grad", plan, 4);
      if (rank == 1 && by_call) {
        CallSpec wrong = spec;
        wrong.shape = {-1};
        CHECK(Call(engine, wrong, Input(DType::kFloat32, 4, rank)).status.code == Code::kInvalid);
      } else if (rank == 1) {
        engine->Refuse("grad", "no such algorithm");
      } else {
        Result refused = Call(engine, spec, Input(DType::kFloat32, 4, rank));
        CHECK_FAILS(refused.status, Code::kMismatch, "allreduce 'grad': rank 1 has refused it: ");
        if (!by_call) CHECK_FAILS(refused.status, Code::kMismatch, "no such algorithm");
      }
      Result next = Call(engine, spec, Input(DType::kFloat32, 4, rank));
      CHECK_OK(next.status);
      CHECK(next.data == Reduced(DType::kFloat32, ReduceOp::kSum, 4, kSize));
    });
  }
}

TEST("mismatch: an allgather may differ in dimension 0 only") {
  auto gather = [](int rank, CallSpec* spec) {
    spec->kind = Kind::kAllgather;
    spec->shape = {rank, rank == 3 ? 2 : 1};
  };
  Disagree(
      "allgather 'grad': rank 3 has float32[3, 2], rank 0 has float32[0, 1]; all ranks must give one dtype and one "
      "shape, "
      "except for dimension 0",
      gather);
}

TEST("mismatch: other calls in flight are not disturbed") {
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
    std::future<Result> before = StartCall(engine, AllreduceSpec("a", plan, 999), Input(DType::kFloat32, 999, rank, 1));
    std::future<Result> wrong =
        StartCall(engine, AllreduceSpec("b", plan, 10 + rank), Input(DType::kFloat32, 99, rank));
    std::future<Result> after = StartCall(engine, AllreduceSpec("c", plan, 999), Input(DType::kFloat32, 999, rank, 2));
    CHECK(Await(std::move(after), "c").data == Reduced(DType::kFloat32, ReduceOp::kSum, 999, 3, 2));
    CHECK_FAILS(Await(std::move(wrong), "b").status, Code::kMismatch, "rank 1 has float32[11], rank 0 has float32[10]");
    CHECK(Await(std::move(before), "a").data == Reduced(DType::kFloat32, ReduceOp::kSum, 999, 3, 1));
  });
}

TEST("engine: a call that cannot be made is refused at once, with words") {
  Engines engines(1);
  Engine* engine = engines[0];
  int64_t plan = AddPlan(engine, Rows{}), two_units = AddPlan(engine, Rows{2, {}});
  auto refuses = [&](const std::string& words, const std::function<void(CallSpec*)>& change) {
    CallSpec spec = AllreduceSpec("x", plan, 4);
    change(&spec);
    CHECK_FAILS(Call(engine, spec, Input(DType::kFloat32, 4, 0)).status, Code::kInvalid, words);
  };
  refuses("must have a name", [](CallSpec* s) { s->name = ""; });
  refuses("its kind is unknown", [](CallSpec* s) { s->kind = static_cast<Kind>(77); });
  refuses("exchange 'x': an exchange is made by Exchange", [](CallSpec* s) { s->kind = Kind::kExchange; });
  refuses("allreduce 'x': dtype (99) is unknown", [](CallSpec* s) { s->dtype = static_cast<DType>(99); });
  refuses("op (9) must be sum (0), average (1), minimum (2), maximum (3) or product (4)",
          [](CallSpec* s) { s->op = static_cast<ReduceOp>(9); });
  refuses("bytes cannot be reduced", [](CallSpec* s) { s->dtype = DType::kBytes; });
  refuses("a dimension (-4) must not be negative", [](CallSpec* s) { s->shape = {-4}; });
  refuses("has more elements than can be counted",
          [](CallSpec* s) { s->shape = {int64_t{1} << 40, int64_t{1} << 40}; });
  refuses("was never added", [](CallSpec* s) { s->plan += 5; });
  refuses("broadcast 'x': root rank (1) must be in [0, 1)", [](CallSpec* s) {
    s->kind = Kind::kBroadcast;
    s->root = 1;
  });
  refuses("allgather 'x': the tensor must have a dimension 0", [](CallSpec* s) {
    s->kind = Kind::kAllgather;
    s->shape = {};
  });
  refuses("its plan must have one unit for each of the 1 ranks, it has 2", [&](CallSpec* s) {
    s->kind = Kind::kAllgather;
    s->plan = two_units;
  });
  CHECK_FAILS(Exchange(engine, "", "x").first, Code::kInvalid, "must have a name");
  Status status;
  engine->Call(AllreduceSpec("x", plan, 4), nullptr, nullptr, [&](const Status& s) { status = s; });
  CHECK_FAILS(status, Code::kInvalid, "its input is null");
}

TEST("engine: a plan that is not sound is refused with the decoder's words") {
  Engines engines(1);
  int64_t rows[5] = {0, kSend, 1, 0, 1}, plan = -1;
  CHECK_FAILS(engines[0]->AddPlan(rows, 1, 1, &plan), Code::kInvalid, "row 0");
}

TEST("engine: a configuration that is not sound is refused") {
  std::shared_ptr<Engine> engine;
  auto start = [&](const Config& config, int64_t generation) {
    return Engine::Start(MakeThreadTransports(1)[0], config, generation, &engine);
  };
  Config config;
  config.window = 0;
  CHECK_FAILS(start(config, 1), Code::kInvalid, "window (0) must be in [1, 1024]");
  config = Config{};
  config.stall_fatal_s = -1;
  CHECK_FAILS(start(config, 1), Code::kInvalid, "must not be negative");
  CHECK_FAILS(start(Config{}, -1), Code::kInvalid, "generation (-1)");
}

}  // namespace
}  // namespace hvd_ext::test

// Calls on which the ranks disagree, and calls that are refused at once: every rank gets an error text, and the next
// call works.
#include "engines.h"

namespace hvd_ext::test {
namespace {

TEST("mismatch: dtypes, shapes, ops, roots, plans, segments and kinds that differ fail, and the next call works") {
  struct {
    std::string words;
    std::function<void(int, CallSpec*)> change;
  } rows[] = {
      {"allreduce 'grad': rank 2 has float32[3], rank 0 has float32[4]; all ranks must give one dtype and one shape",
       [](int rank, CallSpec* spec) { spec->shape = {rank >= 2 ? 3 : 4}; }},
      {"rank 1 has float32[2, 2], rank 0 has float32[4]",
       [](int rank, CallSpec* spec) { spec->shape = rank == 1 ? std::vector<int64_t>{2, 2} : spec->shape; }},
      {"rank 3 has bfloat16[4], rank 0 has float32[4]",
       [](int rank, CallSpec* spec) { spec->dtype = rank == 3 ? DType::kBFloat16 : DType::kFloat32; }},
      {"rank 1 has op average, rank 0 has op sum",
       [](int rank, CallSpec* spec) { spec->op = rank == 1 ? ReduceOp::kAverage : ReduceOp::kSum; }},
      {"broadcast 'grad': rank 1 has root rank 1, rank 0 has root rank 0",
       [](int rank, CallSpec* spec) {
         spec->kind = Kind::kBroadcast;
         spec->root = rank;
       }},
      {"rank 2 has plan 7, rank 0 has plan 5; all ranks must use one algorithm and one topology",
       [](int rank, CallSpec* spec) { spec->plan_digest = rank == 2 ? 7 : 5; }},
      {"rank 1 has segments of bytes 64, rank 0 has segments of bytes 0",
       [](int rank, CallSpec* spec) { spec->segment_nbytes = 64 * rank; }},
      {"rank 1 has compression bfloat16, rank 0 has compression none",
       [](int rank, CallSpec* spec) {
         if (rank == 1) spec->wire = DType::kBFloat16;
       }},
      {"allreduce 'grad': rank 1 has barrier, rank 0 has allreduce; one name must mean the same collective",
       [](int rank, CallSpec* spec) { spec->kind = rank == 1 ? Kind::kBarrier : Kind::kAllreduce; }},
      {"allgather 'grad': rank 3 has float32[3, 2], rank 0 has float32[0, 1]; all ranks must give one dtype and one "
       "shape, except for dimension 0",
       [](int rank, CallSpec* spec) {
         spec->kind = Kind::kAllgather;
         spec->shape = {rank, rank == 3 ? 2 : 1};
       }}};
  OnEngines(4, [&](int rank, Engine* engine) {
    const CallSpec right = AllreduceSpec("grad", AddPlan(engine, RingAllreduce(rank, 4)), 4);
    for (const auto& [words, change] : rows) {
      CallSpec spec = right;
      change(rank, &spec);
      CHECK_FAILS(Call(engine, spec, Input(DType::kFloat64, 64, rank)).status, Code::kMismatch, words);
      CheckAllreduce(engine, right);
    }
  });
}

TEST("mismatch: a call that one rank refuses, at once or before it is made, fails on all, and the next call meets") {
  for (bool by_call : {true, false}) {
    OnEngines(3, [&](int rank, Engine* engine) {
      const CallSpec spec = AllreduceSpec("grad", AddPlan(engine, RingAllreduce(rank, 3)), 4);
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
      CheckAllreduce(engine, spec);
    });
  }
}

TEST("mismatch: other calls in flight are not disturbed") {
  OnEngines(3, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
    const CallSpec a = AllreduceSpec("a", plan, 999), c = AllreduceSpec("c", plan, 999);
    std::future<Result> before = StartAllreduce(engine, a, 1);
    std::future<Result> wrong = StartAllreduce(engine, AllreduceSpec("b", plan, 10 + rank));
    std::future<Result> after = StartAllreduce(engine, c, 2);
    CheckReduced(std::move(after), c, 3, 2);
    CHECK_FAILS(Await(std::move(wrong), "b").status, Code::kMismatch, "rank 1 has float32[11], rank 0 has float32[10]");
    CheckReduced(std::move(before), a, 3, 1);
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
  for (Kind kind : {Kind::kReducescatter, Kind::kAlltoall}) {
    refuses("the tensor must have a dimension 0 to be divided along", [&](CallSpec* s) {
      s->kind = kind;
      s->shape = {};
    });
    refuses("its plan must have one unit for each of the 1 ranks", [&](CallSpec* s) {
      s->kind = kind;
      s->plan = two_units;
    });
  }
  refuses("bytes cannot be reduced", [](CallSpec* s) {
    s->kind = Kind::kReducescatter;
    s->dtype = DType::kBytes;
  });
  refuses("wire dtype (4) must be float16 or bfloat16", [](CallSpec* s) { s->wire = DType::kInt32; });
  refuses("only float32 may be sent as float16, this is int32", [](CallSpec* s) {
    s->dtype = DType::kInt32;
    s->wire = DType::kFloat16;
  });
  refuses("only a reduction may have a wire dtype", [](CallSpec* s) {
    s->kind = Kind::kBroadcast;
    s->wire = DType::kFloat16;
  });
  CHECK_FAILS(Exchange(engine, "", "x").first, Code::kInvalid, "must have a name");
  Status status;
  engine->Call(AllreduceSpec("x", plan, 4), nullptr, nullptr, [&](const Status& s) { status = s; });
  CHECK_FAILS(status, Code::kInvalid, "its input is null");
}

TEST("engine: a plan or a configuration that is not sound is refused in words") {
  Engines engines(1);
  int64_t rows[5] = {0, kSend, 1, 0, 1}, plan = -1;
  CHECK_FAILS(engines[0]->AddPlan(rows, 1, 1, &plan), Code::kInvalid, "row 0");
  std::shared_ptr<Engine> engine;
  auto refuses = [&](const std::string& words, int64_t generation, int64_t window, double stall_fatal_s) {
    Config config;
    config.window = window;
    config.stall_fatal_s = stall_fatal_s;
    CHECK_FAILS(Engine::Start(MakeThreadTransports(1)[0], config, generation, &engine), Code::kInvalid, words);
  };
  refuses("window (0) must be in [1, 1024]", 1, 0, 0);
  refuses("must not be negative", 1, 8, -1);
  refuses("generation (-1)", -1, 8, 0);
}

}  // namespace
}  // namespace hvd_ext::test

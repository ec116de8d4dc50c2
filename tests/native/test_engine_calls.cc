// Collectives by name: every number of ranks, length and dtype; calls in any order, and several in flight.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engines.h"

namespace hvd_ext::test {
namespace {

void ReduceEverywhere(int size, Rows (*rows)(int, int), int64_t window, int64_t segment_nbytes) {
  Config config = QuickConfig();
  config.window = window;
  Engines engines(size, config);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, rows(rank, size));
    for (DType dtype : kReducible) {
      for (ReduceOp op : kReduceOps) {
        for (int64_t elements : {0, 1, size - 1, size, size + 1, 97}) {
          CallSpec spec = AllreduceSpec("x", plan, elements, dtype, op);
          spec.segment_nbytes = segment_nbytes;
          const bool factors = op == ReduceOp::kProduct;
          Result result = Call(engine, spec, factors ? Factors(dtype, elements, rank) : Input(dtype, elements, rank));
          CHECK_OK(result.status);
          CHECK_EQ(result.shape.size(), 1u);
          CHECK_EQ(result.shape[0], elements);
          CHECK(result.data == Reduced(dtype, op, elements, size));
        }
      }
    }
  });
  for (char alone : engines.StopAll()) CHECK(!alone);
}

TEST("engine: a ring allreduce gives every rank the result of every op, for 1 to 8 ranks, any length and dtype") {
  for (int size = 1; size <= 8; ++size) ReduceEverywhere(size, RingAllreduce, 8, 0);
}

TEST("engine: many small segments in a narrow window give the same sums") {
  for (int64_t window : {1, 2, 3}) ReduceEverywhere(3, RingAllreduce, window, 24);
}

TEST("engine: several rows that reduce into the same units in one round give the same sums") {
  for (int size : {2, 5, 8}) ReduceEverywhere(size, StarAllreduce, 2, 40);
}

// Partners send each other whole vectors and add what they get, all in one round; size is a power of two.
Rows ExchangeAllreduce(int rank, int size) {
  Rows rows;
  for (int round = 0; (1 << round) < size; ++round) {
    rows.Add(round, kRecvReduce, rank ^ (1 << round), 0, 1);
    rows.Add(round, kSend, rank ^ (1 << round), 0, 1);
  }
  return rows;
}

TEST("engine: ranks that exchange whole vectors send what they held before the round") {
  for (int size : {2, 4, 8}) ReduceEverywhere(size, ExchangeAllreduce, 2, 40);
}

TEST("engine: an allgather joins parts of different lengths, empty ones too") {
  for (int size = 1; size <= 8; ++size) {
    Engines engines(size);
    engines.Each([&](int rank, Engine* engine) {
      int64_t plan = AddPlan(engine, RingAllgather(rank, size));
      for (DType dtype : {DType::kFloat32, DType::kBytes, DType::kBFloat16}) {
        for (int base : {0, 1, 3}) {
          auto rows_of = [&](int r) { return base == 0 ? int64_t{0} : int64_t{(r * 5 + base) % 4}; };
          CallSpec spec;
          spec.kind = Kind::kAllgather;
          spec.name = "parts";
          spec.dtype = dtype;
          spec.shape = {rows_of(rank), 3};
          spec.plan = plan;
          Result result = Call(engine, spec, Input(dtype, rows_of(rank) * 3, rank));
          CHECK_OK(result.status);
          std::string expected;
          int64_t total = 0;
          for (int r = 0; r < size; ++r) {
            expected += Input(dtype, rows_of(r) * 3, r);
            total += rows_of(r);
          }
          CHECK_EQ(result.shape[0], total);
          CHECK_EQ(result.shape[1], 3);
          CHECK(result.data == expected);
        }
      }
    });
  }
}

TEST("engine: a broadcast gives every rank the root's tensor, from every root") {
  for (int size = 1; size <= 8; ++size) {
    Engines engines(size);
    engines.Each([&](int rank, Engine* engine) {
      for (int root = 0; root < size; ++root) {
        CallSpec spec;
        spec.kind = Kind::kBroadcast;
        spec.name = "weights";
        spec.dtype = DType::kBytes;
        spec.shape = {7, 11};
        spec.root = root;
        spec.segment_nbytes = 16;
        spec.plan = AddPlan(engine, ChainBroadcast(rank, size, root));
        Result result = Call(engine, spec, Input(DType::kBytes, 77, rank, root));
        CHECK_OK(result.status);
        CHECK(result.data == Input(DType::kBytes, 77, root, root));
      }
    });
  }
}

TEST("engine: a scalar is reduced and broadcast") {
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    CallSpec spec = AllreduceSpec("loss", AddPlan(engine, RingAllreduce(rank, 3)), 1, DType::kFloat64);
    spec.shape = {};
    Result result = Call(engine, spec, Input(DType::kFloat64, 1, rank));
    CHECK_OK(result.status);
    CHECK_EQ(result.shape.size(), 0u);
    CHECK(result.data == Reduced(DType::kFloat64, ReduceOp::kSum, 1, 3));
  });
}

TEST("engine: an exchange gives every rank all payloads, of any length") {
  for (int size : {1, 2, 5}) {
    Engines engines(size);
    engines.Each([&](int rank, Engine* engine) {
      for (int n = 0; n < 4; ++n) {
        auto payload = [&](int r) {
          return std::string(static_cast<size_t>(r * 1000 * n), static_cast<char>('a' + r));
        };
        auto [status, payloads] = Exchange(engine, "hosts", payload(rank));
        CHECK_OK(status);
        CHECK_EQ(payloads.size(), static_cast<size_t>(size));
        for (int r = 0; r < size; ++r) CHECK(payloads[r] == payload(r));
      }
    });
  }
}

TEST("engine: a barrier ends only when all ranks have come") {
  Engines engines(3);
  std::atomic<int> come{0};
  engines.Each([&](int rank, Engine* engine) {
    for (int n = 1; n <= 20; ++n) {
      if (rank == n % 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++come;
      CHECK_OK(Call(engine, BarrierSpec("all"), "").status);
      CHECK(come >= 3 * n);
      CHECK_OK(Call(engine, BarrierSpec("checked"), "").status);
    }
  });
}

TEST("engine: calls made in a different order on each rank are matched by name and use") {
  constexpr int kSize = 4, kNames = 12, kUses = 3;
  Engines engines(kSize);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, kSize));
    std::vector<int> order;
    for (int i = 0; i < kNames; ++i) order.push_back((i * 5 + rank * 3) % kNames);
    if (rank % 2 == 1) std::reverse(order.begin(), order.end());
    for (int use = 0; use < kUses; ++use) {
      std::vector<std::future<Result>> results(kNames);
      for (int i : order) {  // the uses of one name differ in their values, the names also in their lengths
        CallSpec spec = AllreduceSpec("x" + std::to_string(i), plan, 100 + i, DType::kInt32);
        spec.segment_nbytes = 64;
        results[i] = StartCall(engine, spec, Input(DType::kInt32, 100 + i, rank, 10 * i + use));
      }
      for (int i = 0; i < kNames; ++i) {
        Result result = Await(std::move(results[i]), "call " + std::to_string(i));
        CHECK_OK(result.status);
        CHECK(result.data == Reduced(DType::kInt32, ReduceOp::kSum, 100 + i, kSize, 10 * i + use));
      }
    }
    CHECK_EQ(engine->GetStatistics().calls, kNames * kUses);
  });
}

TEST("engine: two calls of one name at once on one rank are an error on all ranks, and the next one works") {
  Engines engines(2);
  std::atomic<int> made{0};
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    std::string input = Input(DType::kInt32, 4, rank, 1);
    CallSpec spec = AllreduceSpec("x", plan, 4, DType::kInt32);
    while (rank == 0 && made == 0) std::this_thread::yield();  // rank 0 makes its calls after rank 1 has made both
    std::vector<std::future<Result>> results;
    results.push_back(StartCall(engine, spec, input));
    results.push_back(StartCall(engine, spec, input));
    for (auto& each : results) {
      CHECK_FAILS(Await(std::move(each), "x").status, Code::kInvalid,
                  "rank 1 has called it while allreduce 'x' was under way");
    }
    made = 1;
    Result result = Call(engine, spec, input);
    CHECK_OK(result.status);
    CHECK(result.data == Reduced(DType::kInt32, ReduceOp::kSum, 4, 2, 1));
  });
}

TEST("engine: a call may be made from another call's end") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    auto promise = std::make_shared<std::promise<std::future<Result>>>();
    engine->Call(BarrierSpec("first"), nullptr, nullptr, [=](const Status& status) {
      CHECK_OK(status);
      promise->set_value(StartCall(engine, AllreduceSpec("second", plan, 5), Input(DType::kFloat32, 5, rank)));
    });
    Result result = Await(Await(promise->get_future(), "the first call"), "the second call");
    CHECK_OK(result.status);
    CHECK(result.data == Reduced(DType::kFloat32, ReduceOp::kSum, 5, 2));
  });
}

TEST("engine: a rank that cannot hold the result takes part in the call and then fails alone") {
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
    if (rank == 1) {
      auto promise = std::make_shared<std::promise<Status>>();
      std::string input = Input(DType::kFloat32, 50, rank);
      engine->Call(
          AllreduceSpec("x", plan, 50), input.data(),
          [](const std::vector<int64_t>&, void**) { return Internal("no memory left"); },
          [promise](const Status& status) { promise->set_value(status); });
      CHECK_FAILS(Await(promise->get_future(), "x"), Code::kInternal, "no memory left");
    } else {
      CHECK_OK(Call(engine, AllreduceSpec("x", plan, 50), Input(DType::kFloat32, 50, rank)).status);
    }
    Result next = Call(engine, AllreduceSpec("y", plan, 50), Input(DType::kFloat32, 50, rank));
    CHECK_OK(next.status);
    CHECK(next.data == Reduced(DType::kFloat32, ReduceOp::kSum, 50, 3));
  });
}

TEST("engine: the statistics count calls, segments and bytes") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    CallSpec spec = AllreduceSpec("x", AddPlan(engine, RingAllreduce(rank, 2)), 100);
    spec.segment_nbytes = 100;
    CHECK_OK(Call(engine, spec, Input(DType::kFloat32, 100, rank)).status);
    Statistics seen = engine->GetStatistics();
    CHECK_EQ(seen.calls, 1);
    CHECK_EQ(seen.buckets, 0);
    CHECK_EQ(seen.segments, 4);
    CHECK_EQ(seen.bytes_sent + seen.bytes_received, 800);
  });
}

}  // namespace
}  // namespace hvd_ext::test

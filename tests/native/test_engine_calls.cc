// Collectives by name: every number of ranks, length and dtype; calls in any order, and several in flight.
#include <cstdint>
#include <optional>

#include "engines.h"

namespace hvd_ext::test {
namespace {

void ReduceEverywhere(int size, Rows (*rows)(int, int), int64_t window, int64_t segment_nbytes) {
  Config config = QuickConfig();
  config.window = window;
  Engines engines(size, config);
  engines.Each([&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, rows(rank, size));
    for (DType dtype : kReducible) {
      for (ReduceOp op : kReduceOps) {
        // Kernels know nothing of transports: each dtype meets one op.
        if (ShowsLess() && static_cast<size_t>(op) != static_cast<size_t>(dtype) % std::size(kReduceOps)) continue;
        for (int64_t elements : {0, 1, size - 1, size + 1, 97}) {
          CallSpec spec = AllreduceSpec("x", plan, elements, dtype, op);
          spec.segment_nbytes = segment_nbytes;
          CheckAllreduce(engine, spec);
        }
      }
    }
    CallSpec scalar = AllreduceSpec("loss", plan, 1, DType::kFloat64);
    scalar.shape = {};
    CheckAllreduce(engine, scalar);
  });
  for (char alone : engines.StopAll()) CHECK(!alone);
}

TEST("engine: a ring allreduce gives every rank the result of every op, for 1 to 8 ranks, any length and dtype") {
  for (int size : Sizes(8)) ReduceEverywhere(size, RingAllreduce, 8, 0);
}

TEST("engine: many small segments in a narrow window give the same sums") {
  for (int64_t window : {1, 3}) ReduceEverywhere(3, RingAllreduce, window, 24);
}

TEST("engine: several rows that reduce into the same units in one round give the same sums") {
  for (int size : {2, 5}) ReduceEverywhere(size, StarAllreduce, 2, 40);
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
  for (int size : {2, 4}) ReduceEverywhere(size, ExchangeAllreduce, 2, 40);
}

TEST("engine: an allgather joins parts of different lengths, empty ones too") {
  for (int size : Sizes(8)) {
    OnEngines(size, [&](int rank, Engine* engine) {
      const int64_t plan = AddPlan(engine, RingAllgather(rank, size));
      for (DType dtype : {DType::kFloat32, DType::kBytes, DType::kBFloat16}) {
        for (int base : {0, 1, 3}) {
          auto rows_of = [&](int r) { return base == 0 ? int64_t{0} : int64_t{(r * 5 + base) % 4}; };
          const CallSpec spec = SpecOf(Kind::kAllgather, "parts", plan, {rows_of(rank), 3}, dtype);
          Result result = Call(engine, spec, Input(dtype, rows_of(rank) * 3, rank));
          CHECK_OK(result.status);
          std::string expected;
          int64_t total = 0;
          for (int r = 0; r < size; ++r) {
            expected += Input(dtype, rows_of(r) * 3, r);
            total += rows_of(r);
          }
          CHECK(result.shape == (std::vector<int64_t>{total, 3}));
          CHECK(result.data == expected);
        }
      }
    });
  }
}

TEST("engine: a broadcast gives every rank the root's tensor, from every root") {
  for (int size : Sizes(8)) {
    OnEngines(size, [&](int rank, Engine* engine) {
      for (int root = 0; root < size; ++root) {
        const int64_t plan = AddPlan(engine, ChainBroadcast(rank, size, root));
        CallSpec spec = SpecOf(Kind::kBroadcast, "weights", plan, {7, 11}, DType::kBytes);
        spec.root = root;
        spec.segment_nbytes = 16;
        Result result = Call(engine, spec, Input(DType::kBytes, 77, rank, root));
        CHECK_OK(result.status);
        CHECK(result.data == Input(DType::kBytes, 77, root, root));
      }
    });
  }
}

// A plan after which unit r is on rank r.
Rows RingReducescatter(int rank, int size) {
  Rows rows{size, {}};
  for (int i = 0; i + 1 < size; ++i) {
    rows.Add(i, kSend, (rank + 1) % size, (rank - i - 1 + 2 * size) % size, 1);
    rows.Add(i, kRecvReduce, (rank + size - 1) % size, (rank - i - 2 + 2 * size) % size, 1);
  }
  return rows;
}

// A plan that moves unit s * P + r from rank s to rank r.
Rows PairwiseAlltoall(int rank, int size) {
  Rows rows{size * size, {}};
  for (int i = 1; i < size; ++i) {
    int to = (rank + i) % size, from = (rank + size - i) % size;
    rows.Add(i, kSend, to, rank * size + to, 1);
    rows.Add(i, kRecv, from, from * size + rank, 1);
  }
  return rows;
}

std::string Ints(const std::vector<int32_t>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size());
}

CallSpec PartsSpec(Kind kind, int64_t plan, std::vector<int64_t> shape) {
  return SpecOf(kind, "x", plan, std::move(shape), DType::kInt32);
}

TEST("parts: reducescatter gives each rank its rows, the first ranks one more") {
  for (int size : {1, 3, 4}) {
    OnEngines(size, [&](int rank, Engine* engine) {
      int64_t plan = AddPlan(engine, RingReducescatter(rank, size));
      for (int64_t rows : {0, 2, 5, 4000}) {
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
          std::vector<int32_t> input, expected;
          int64_t mine = rows / size + (rank < rows % size ? 1 : 0);
          int64_t begin = rank * (rows / size) + std::min<int64_t>(rank, rows % size);
          for (int64_t i = 0; i < 2 * rows; ++i) input.push_back(static_cast<int32_t>((rank + 1) * (i + 1) * size));
          for (int64_t i = 2 * begin; i < 2 * (begin + mine); ++i) {
            int64_t sum = size * (size + 1) / 2 * (i + 1) * size;
            expected.push_back(static_cast<int32_t>(op == ReduceOp::kSum ? sum : sum / size));
          }
          CallSpec spec = PartsSpec(Kind::kReducescatter, plan, {rows, 2});
          spec.op = op;
          Result result = Call(engine, spec, Ints(input));
          CHECK_OK(result.status);
          CHECK(result.shape == (std::vector<int64_t>{mine, 2}));
          CHECK(result.data == Ints(expected));
        }
      }
    });
  }
}

TEST("parts: alltoall joins what all ranks send to one, whatever the op says") {
  for (int size : {1, 2, 4}) {
    auto rows = [](int from, int to) { return int64_t{(from * 3 + to * 2) % 4}; };
    OnEngines(size, [&](int rank, Engine* engine) {
      std::vector<int32_t> input, expected;
      std::vector<int64_t> splits, from_each, received;
      for (int peer = 0; peer < size; ++peer) {
        splits.push_back(rows(rank, peer));
        from_each.push_back(rows(peer, rank));
        for (int64_t i = 0; i < rows(rank, peer); ++i)
          input.push_back(static_cast<int32_t>(1000 * rank + 10 * peer + i));
        for (int64_t i = 0; i < rows(peer, rank); ++i) {
          expected.push_back(static_cast<int32_t>(1000 * peer + 10 * rank + i));
        }
      }
      int64_t plan = AddPlan(engine, PairwiseAlltoall(rank, size));
      CallSpec spec = PartsSpec(Kind::kAlltoall, plan, {static_cast<int64_t>(input.size())});
      spec.op = ReduceOp::kAverage;
      spec.splits = splits;
      spec.received = &received;
      Result result = Call(engine, spec, Ints(input));
      CHECK_OK(result.status);
      CHECK(result.data == Ints(expected));
      CHECK(received == from_each);
      spec = PartsSpec(Kind::kAlltoall, plan, {size});
      result = Call(engine, spec, Ints(std::vector<int32_t>(static_cast<size_t>(size), rank)));
      CHECK_OK(result.status);
      for (int peer = 0; peer < size; ++peer) CHECK_EQ(result.data[static_cast<size_t>(4 * peer)], peer);
    });
  }
}

TEST("parts: rows that do not add up on one rank are refused on all, and the next call works") {
  OnEngines(2, [](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, PairwiseAlltoall(rank, 2));
    auto refused = [&](std::optional<std::vector<int64_t>> of_rank_1, int64_t rows, const std::string& words) {
      CallSpec spec = PartsSpec(Kind::kAlltoall, plan, {rank == 1 ? rows : 2});
      if (rank == 1) spec.splits = of_rank_1;
      CHECK_FAILS(Call(engine, spec, std::string(64, 0)).status, Code::kInvalid, "alltoall 'x': rank 1 has " + words);
    };
    refused(std::vector<int64_t>{1, 2}, 2, "splits [1, 2] for 2 rows");
    refused(std::vector<int64_t>{1, 0}, 2, "splits [1, 0] for 2 rows");
    refused(std::vector<int64_t>{3, -1}, 2, "splits [3, -1] for 2 rows");
    refused(std::vector<int64_t>{2}, 2, "splits [2] for 2 rows");
    refused(std::vector<int64_t>{INT64_MAX, INT64_MAX}, 2, "splits [9223372036854775807, ");
    refused(std::nullopt, 3, "3 rows and no splits; without splits the rows must divide evenly over 2 ranks");
    CHECK_OK(Call(engine, PartsSpec(Kind::kAlltoall, plan, {2}), std::string(8, 0)).status);
  });
}

TEST("engine: an exchange gives every rank all payloads, of any length") {
  for (int size : {1, 2, 5}) {
    OnEngines(size, [&](int rank, Engine* engine) {
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
  std::atomic<int> come{0};
  OnEngines(3, [&](int rank, Engine* engine) {
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
  constexpr int kNames = 12, kUses = 3;
  OnEngines(4, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 4));
    std::vector<CallSpec> specs;  // the uses of one name differ in their values, the names also in their lengths
    std::vector<int> order;
    for (int i = 0; i < kNames; ++i) {
      specs.push_back(AllreduceSpec("x" + std::to_string(i), plan, 100 + i, DType::kInt32));
      specs.back().segment_nbytes = 64;
      order.push_back((i * 5 + rank * 3) % kNames);
    }
    if (rank % 2 == 1) std::reverse(order.begin(), order.end());
    for (int use = 0; use < kUses; ++use) {
      std::vector<std::future<Result>> results(kNames);
      for (int i : order) results[i] = StartAllreduce(engine, specs[i], 10 * i + use);
      for (int i = 0; i < kNames; ++i) CheckReduced(std::move(results[i]), specs[i], 4, 10 * i + use);
    }
    CHECK_EQ(engine->GetStatistics().calls, kNames * kUses);
  });
}

TEST("engine: a call may be made from another call's end") {
  OnEngines(2, [](int rank, Engine* engine) {
    const CallSpec spec = AllreduceSpec("second", AddPlan(engine, RingAllreduce(rank, 2)), 5);
    auto promise = std::make_shared<std::promise<std::future<Result>>>();
    engine->Call(BarrierSpec("first"), nullptr, nullptr, [=](const Status& status) {
      CHECK_OK(status);
      promise->set_value(StartAllreduce(engine, spec));
    });
    CheckReduced(Await(promise->get_future(), "the first call"), spec, 2);
  });
}

TEST("engine: a rank that cannot hold the result takes part in the call and then fails alone") {
  OnEngines(3, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3));
    const CallSpec spec = AllreduceSpec("x", plan, 50);
    if (rank == 1) {
      auto promise = std::make_shared<std::promise<Status>>();
      std::string input = Input(DType::kFloat32, 50, rank);
      engine->Call(
          spec, input.data(), [](const std::vector<int64_t>&, void**) { return Internal("no memory left"); },
          [promise](const Status& status) { promise->set_value(status); });
      CHECK_FAILS(Await(promise->get_future(), "x"), Code::kInternal, "no memory left");
    } else {
      CheckAllreduce(engine, spec);
    }
    CheckAllreduce(engine, AllreduceSpec("y", plan, 50));
  });
}

TEST("engine: the statistics count calls, segments and bytes") {
  OnEngines(2, [](int rank, Engine* engine) {
    CallSpec spec = AllreduceSpec("x", AddPlan(engine, RingAllreduce(rank, 2)), 100);
    spec.segment_nbytes = 100;
    CheckAllreduce(engine, spec);
    Statistics seen = engine->GetStatistics();
    CHECK_EQ(seen.calls, 1);
    CHECK_EQ(seen.buckets, 0);
    CHECK_EQ(seen.segments, 4);
    CHECK_EQ(seen.bytes_sent + seen.bytes_received, 800);
  });
}

}  // namespace
}  // namespace hvd_ext::test

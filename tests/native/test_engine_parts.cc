// Calls in which each rank has a part of its own: reducescatter and alltoall.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engines.h"

namespace hvd_ext::test {
namespace {

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

CallSpec Spec(Kind kind, const std::string& name, int64_t plan, std::vector<int64_t> shape) {
  CallSpec spec = AllreduceSpec(name, plan, 0, DType::kInt32);
  spec.kind = kind;
  spec.shape = std::move(shape);
  return spec;
}

TEST("parts: reducescatter gives each rank its rows, the first ranks one more") {
  for (int size : {1, 3, 4}) {
    Engines engines(size);
    engines.Each([&](int rank, Engine* engine) {
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
          CallSpec spec = Spec(Kind::kReducescatter, "x", plan, {rows, 2});
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
    Engines engines(size);
    auto rows = [](int from, int to) { return int64_t{(from * 3 + to * 2) % 4}; };
    engines.Each([&](int rank, Engine* engine) {
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
      CallSpec spec = Spec(Kind::kAlltoall, "x", plan, {static_cast<int64_t>(input.size())});
      spec.op = ReduceOp::kAverage;
      spec.splits = splits;
      spec.received = &received;
      Result result = Call(engine, spec, Ints(input));
      CHECK_OK(result.status);
      CHECK(result.data == Ints(expected));
      CHECK(received == from_each);
      spec = Spec(Kind::kAlltoall, "even", plan, {size});
      result = Call(engine, spec, Ints(std::vector<int32_t>(static_cast<size_t>(size), rank)));
      CHECK_OK(result.status);
      for (int peer = 0; peer < size; ++peer) CHECK_EQ(result.data[static_cast<size_t>(4 * peer)], peer);
    });
  }
}

TEST("parts: rows that do not add up on one rank are refused on all, and the next call works") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, PairwiseAlltoall(rank, 2));
    auto refused = [&](std::optional<std::vector<int64_t>> of_rank_1, int64_t rows, const std::string& words) {
      CallSpec spec = Spec(Kind::kAlltoall, "x", plan, {rank == 1 ? rows : 2});
      if (rank == 1) spec.splits = of_rank_1;
      Result result = Call(engine, spec, std::string(64, 0));
      CHECK_EQ(static_cast<int>(result.status.code), static_cast<int>(Code::kInvalid));
      CHECK(result.status.message.find("alltoall 'x': rank 1 has " + words) != std::string::npos);
    };
    refused(std::vector<int64_t>{1, 2}, 2, "splits [1, 2] for 2 rows");
    refused(std::vector<int64_t>{3, -1}, 2, "splits [3, -1] for 2 rows");
    refused(std::vector<int64_t>{2}, 2, "splits [2] for 2 rows");
    refused(std::vector<int64_t>{INT64_MAX, INT64_MAX}, 2, "splits [9223372036854775807, ");
    refused(std::nullopt, 3, "3 rows and no splits; without splits the rows must divide evenly over 2 ranks");
    CHECK_OK(Call(engine, Spec(Kind::kAlltoall, "x", plan, {2}), std::string(8, 0)).status);
  });
}

TEST("parts: what cannot be divided is refused in words") {
  Engines engines(1);
  int64_t one = AddPlan(engines[0], Rows{}), two = AddPlan(engines[0], Rows{2, {}});
  auto refuses = [&](const CallSpec& spec, const std::string& words) {
    Result result = Call(engines[0], spec, std::string(64, 0));
    CHECK_EQ(static_cast<int>(result.status.code), static_cast<int>(Code::kInvalid));
    CHECK(result.status.message.find(words) != std::string::npos);
  };
  for (Kind kind : {Kind::kReducescatter, Kind::kAlltoall}) {
    refuses(Spec(kind, "x", one, {}), "the tensor must have a dimension 0 to be divided along");
    refuses(Spec(kind, "x", two, {2}), "its plan must have one unit for each of the 1 ranks");
  }
  CallSpec bytes = Spec(Kind::kReducescatter, "x", one, {2});
  bytes.dtype = DType::kBytes;
  refuses(bytes, "bytes cannot be reduced");
}

}  // namespace
}  // namespace hvd_ext::test

// float32 that is sent as halves: the casts, the sums, and equal bits on all ranks whatever the plan.
#include <cmath>

#include "engines.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext::test {
namespace {

constexpr DType kWires[] = {DType::kFloat16, DType::kBFloat16};
constexpr int64_t kLengths[] = {0, 1, 7, 8, 9, 16, 31, 1009};

float Rounded(DType wire, float x) { return wire == DType::kFloat16 ? ToFloat(ToFloat16(x)) : ToFloat(ToBFloat16(x)); }

uint16_t Half(DType wire, float x) { return wire == DType::kFloat16 ? ToFloat16(x).bits : ToBFloat16(x).bits; }

// Ordinary numbers, ties, denormal halves, and numbers that are too large for float16.
float Number(int64_t i) {
  const float special[] = {0.0f, -0.0f, 65504.0f, 65519.0f, 65520.0f, -1e30f, 3e-8f, -6e-6f, 1.00048828125f, INFINITY};
  return i % 3 == 0 ? special[(i / 3) % 10] : std::ldexp(static_cast<float>(i * 7919 % 4001 - 2000), i % 20 - 10);
}

std::vector<float> Numbers(int64_t elements) {
  std::vector<float> x;
  for (int64_t i = 0; i < elements; ++i) x.push_back(Number(i));
  return x;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

// Whole numbers beyond 2048 are lost in sums of halves, and not here.
TEST(
    "wire: narrowing divides by a scale, rounds and keeps what it sends; widening gives the same bits; sums are "
    "float32") {
  for (auto [wire, scale] : {std::pair(DType::kBFloat16, 1.0f), std::pair(DType::kFloat16, 1.0f),
                             std::pair(DType::kFloat16, 2.0f), std::pair(DType::kFloat16, 1024.0f)}) {
    for (int64_t elements : kLengths) {
      std::vector<float> x = Numbers(elements), expected, wide(x.size()), sum(x.size(), 1.0f), sums;
      std::vector<uint16_t> halves(x.size() + 1, 0xabcd);
      for (float value : x) expected.push_back(Rounded(wire, value / scale) * scale);
      for (float value : expected) sums.push_back(1.0f + value);
      std::vector<float> rounded = x;
      Narrow(wire, halves.data(), x.data(), elements, scale);
      for (int64_t i = 0; i < elements; ++i) CHECK_EQ(halves[i], Half(wire, Number(i) / scale));
      CHECK_EQ(halves.back(), 0xabcd);
      CHECK(SameBits(x, expected));
      Widen(wire, wide.data(), halves.data(), elements, scale);
      CHECK(SameBits(wide, expected));
      for (int again = 0; again < 2; ++again) {
        Round(wire, rounded.data(), elements, scale);
        CHECK(SameBits(rounded, expected));
      }
      AddWidened(wire, sum.data(), halves.data(), elements, scale);
      CHECK(SameBits(sum, sums));
    }
  }
}

TEST("wire: every half is widened to its value, and NaN stays NaN") {
  for (DType wire : kWires) {
    std::vector<uint16_t> halves(65536);
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(halves.size());
    Widen(wire, wide.data(), halves.data(), 65536);
    for (size_t i = 0; i < halves.size(); ++i) {
      uint16_t bits = halves[i];
      float expected = wire == DType::kFloat16 ? ToFloat(Float16{bits}) : ToFloat(BFloat16{bits});
      CHECK(std::isnan(expected) ? std::isnan(wide[i]) : BitsOf(wide[i]) == BitsOf(expected));
    }
    std::vector<float> nan(9, NAN);
    Round(wire, nan.data(), 9);
    for (float x : nan) CHECK(std::isnan(x));
  }
}

// Ranks 0 and 1 exchange whole sums, and rank 2 takes part through rank 0. Rank 1 never sends its result.
Rows Folded(int rank) {
  Rows rows;
  if (rank == 2) rows.Add(0, kSend, 0, 0, 1);
  if (rank == 2) rows.Add(2, kRecv, 0, 0, 1);
  if (rank == 0) rows.Add(0, kRecvReduce, 2, 0, 1);
  if (rank < 2) rows.Add(1, kSend, 1 - rank, 0, 1);
  if (rank < 2) rows.Add(1, kRecvReduce, 1 - rank, 0, 1);
  if (rank == 0) rows.Add(2, kSend, 2, 0, 1);
  return rows;
}

Rows WithPlan(int plan, int rank) {
  return plan == 0 ? RingAllreduce(rank, 3) : plan == 1 ? StarAllreduce(rank, 3) : Folded(rank);
}

// An allreduce of 1000 elements over three ranks, whose results must have the same bits. *sent: the bytes that all
// send.
std::vector<float> Sent(DType wire, int plan, ReduceOp op, float (*value)(int rank, int64_t i), int64_t* sent) {
  std::vector<std::vector<float>> results(3, std::vector<float>(1000));
  std::atomic<int64_t> bytes{0};
  OnEngines(3, [&](int rank, Engine* engine) {
    CallSpec spec = AllreduceSpec("x", AddPlan(engine, WithPlan(plan, rank)), 1000, DType::kFloat32, op);
    spec.wire = wire;
    spec.segment_nbytes = 256;
    std::vector<float> input;
    for (int64_t i = 0; i < 1000; ++i) input.push_back(value(rank, i));
    Result result = Call(engine, spec, std::string(reinterpret_cast<const char*>(input.data()), 4000));
    CHECK_OK(result.status);
    std::memcpy(results[static_cast<size_t>(rank)].data(), result.data.data(), result.data.size());
    bytes += engine->GetStatistics().bytes_sent;
  });
  for (const std::vector<float>& result : results) CHECK(SameBits(result, results[0]));
  *sent = bytes;
  return results[0];
}

TEST("wire: all ranks end with the same bits, near the sum of float32, and send half of the bytes") {
  const auto value = [](int rank, int64_t i) { return std::sin(static_cast<float>(i + 1)) * (1.0f + 0.3f * rank); };
  for (DType wire : kWires) {
    for (int plan = 0; plan < 3; ++plan) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        int64_t sent = 0;
        const std::vector<float> result = Sent(wire, plan, op, value, &sent);
        // 4000 elements are sent; a sum that is sent as float16 has the number of its terms behind it
        const int64_t beside = sent - 2 * 4000;
        CHECK(wire == DType::kFloat16 ? beside > 0 && beside <= 400 : beside == 0);
        double unit = wire == DType::kFloat16 ? std::ldexp(1.0, -11) : std::ldexp(1.0, -8);
        for (int64_t i = 0; i < 1000; ++i) {
          double sum = 0, magnitude = 0;
          for (int rank = 0; rank < 3; ++rank) sum += value(rank, i);
          for (int rank = 0; rank < 3; ++rank) magnitude += std::fabs(value(rank, i));
          if (op == ReduceOp::kAverage) sum /= 3, magnitude /= 3;
          CHECK(std::fabs(result[static_cast<size_t>(i)] - sum) <= 4 * unit * magnitude);
        }
      }
    }
  }
}

TEST("wire: sums beyond float16 and averages of small values arrive, with equal bits, whatever the plan") {
  const auto value = [](int rank, int64_t i) {
    const float values[] = {60000.0f, -65504.0f, 1e-6f, 40000.0f};
    return values[i % 4] * (1 - 0.125f * static_cast<float>(rank));
  };
  for (int plan = 0; plan < 3; ++plan) {
    int64_t sent = 0;
    const std::vector<float> result = Sent(DType::kFloat16, plan, ReduceOp::kAverage, value, &sent);
    for (int64_t i = 0; i < 1000; ++i) {
      const float average = value(1, i);  // the middle one
      CHECK(std::fabs(result[static_cast<size_t>(i)] - average) <= 1.5e-7f + std::ldexp(std::fabs(average), -9));
    }
  }
}

TEST("wire: one rank sends nothing and rounds nothing") {
  Engines engines(1);
  CallSpec spec = AllreduceSpec("x", AddPlan(engines[0], Rows{}), 1);
  spec.wire = DType::kFloat16;
  float x = 1.0f / 3;
  Result result = Call(engines[0], spec, std::string(reinterpret_cast<const char*>(&x), 4));
  CHECK_OK(result.status);
  CHECK(std::memcmp(result.data.data(), &x, 4) == 0);
}

TEST("wire: a channel's buckets may travel as halves, each in its own way") {
  OnEngines(2, [](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    const int64_t channel =
        OpenChannel(engine, ChannelOf("c", {64, 64},
                                      {{DType::kFloat32, DType::kFloat16, ReduceOp::kSum, plan, 64, {0}},
                                       {DType::kFloat32, {}, ReduceOp::kSum, plan, 64, {1}}}));
    int64_t ticket = 0;
    CHECK_OK(engine->BeginStep(channel));
    std::vector<float> x(64, 1.0f + std::ldexp(1.0f, -13));  // beyond a half's 11 bits
    for (int64_t tensor : {0, 1}) CHECK_OK(engine->Submit(channel, tensor, x.data(), 256, &ticket));
    for (int64_t tensor : {0, 1}) {
      Result result = Await(StartCollect(engine, channel, tensor, ticket, 256), "collect");
      CHECK_OK(result.status);
      std::vector<float> expected(64, tensor == 0 ? 2.0f : 2 * x[0]);
      CHECK(std::memcmp(result.data.data(), expected.data(), 256) == 0);
    }
    CHECK_EQ(engine->GetStatistics().bytes_sent, 64 * 2 + 4 * 4 + 64 * 4);
  });
}

}  // namespace
}  // namespace hvd_ext::test

// float32 that is sent as halves: the casts, the sums, and equal bits on all ranks whatever the plan.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

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

TEST("wire: narrowing rounds, keeps what it sends, and widening gives the same bits") {
  for (DType wire : kWires) {
    for (int64_t elements : kLengths) {
      std::vector<float> x = Numbers(elements), expected, wide(x.size());
      std::vector<uint16_t> halves(x.size() + 1, 0xabcd);
      for (float value : x) expected.push_back(Rounded(wire, value));
      std::vector<float> rounded = x;
      Narrow(wire, halves.data(), x.data(), elements);
      for (int64_t i = 0; i < elements; ++i) CHECK_EQ(halves[i], Half(wire, Number(i)));
      CHECK_EQ(halves.back(), 0xabcd);
      CHECK(SameBits(x, expected));
      Widen(wire, wide.data(), halves.data(), elements);
      CHECK(SameBits(wide, expected));
      Round(wire, rounded.data(), elements);
      CHECK(SameBits(rounded, expected));
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

TEST("wire: sums are float32 sums: 2048 + 1 is lost in a half and not here") {
  for (DType wire : kWires) {
    for (int64_t elements : kLengths) {
      std::vector<float> sum(static_cast<size_t>(elements), 2048.0f);
      std::vector<uint16_t> one(sum.size(), Half(wire, 1.0f));
      AddWidened(wire, sum.data(), one.data(), elements);
      CHECK(SameBits(sum, std::vector<float>(sum.size(), 2049.0f)));
    }
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

TEST("wire: all ranks end with the same bits, near the sum of float32, and send half of the bytes") {
  constexpr int kSize = 3;
  constexpr int64_t kElements = 1000;
  for (DType wire : kWires) {
    for (int plan = 0; plan < 3; ++plan) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        Engines engines(kSize);
        std::vector<std::vector<float>> results(kSize);
        std::vector<int64_t> sent(kSize);
        auto value = [](int rank, int64_t i) { return std::sin(static_cast<float>(i + 1)) * (1.0f + 0.3f * rank); };
        engines.Each([&](int rank, Engine* engine) {
          Rows rows = plan == 0 ? RingAllreduce(rank, kSize) : plan == 1 ? StarAllreduce(rank, kSize) : Folded(rank);
          CallSpec spec = AllreduceSpec("x", AddPlan(engine, rows), kElements, DType::kFloat32, op);
          spec.wire = wire;
          spec.segment_nbytes = 256;
          std::string input(4 * kElements, 0);
          for (int64_t i = 0; i < kElements; ++i) {
            float x = value(rank, i);
            std::memcpy(&input[4 * i], &x, 4);
          }
          Result result = Call(engine, spec, input);
          CHECK_OK(result.status);
          results[rank].resize(kElements);
          std::memcpy(results[rank].data(), result.data.data(), result.data.size());
          sent[rank] = engine->GetStatistics().bytes_sent;
        });
        for (int rank = 1; rank < kSize; ++rank) CHECK(SameBits(results[rank], results[0]));
        int64_t messages = 4 * kElements;  // elements sent by all ranks
        // a sum that is sent as float16 has the number of its terms behind it
        const int64_t beside = sent[0] + sent[1] + sent[2] - 2 * messages;
        CHECK(wire == DType::kFloat16 ? beside > 0 && beside <= messages / 10 : beside == 0);
        double unit = wire == DType::kFloat16 ? std::ldexp(1.0, -11) : std::ldexp(1.0, -8);
        for (int64_t i = 0; i < kElements; ++i) {
          double sum = 0, magnitude = 0;
          for (int rank = 0; rank < kSize; ++rank) sum += value(rank, i);
          for (int rank = 0; rank < kSize; ++rank) magnitude += std::fabs(value(rank, i));
          if (op == ReduceOp::kAverage) sum /= kSize, magnitude /= kSize;
          CHECK(std::fabs(results[0][i] - sum) <= 4 * unit * magnitude);
        }
      }
    }
  }
}

TEST("wire: a scale divides what float16 sends, and every rounding with one scale is the same") {
  for (float scale : {1.0f, 2.0f, 1024.0f}) {
    for (int64_t elements : kLengths) {
      std::vector<float> x = Numbers(elements), expected, wide(x.size()), sum(x.size(), 1.0f);
      std::vector<uint16_t> halves(x.size());
      for (float value : x) expected.push_back(ToFloat(ToFloat16(value / scale)) * scale);
      std::vector<float> rounded = x;
      Narrow(DType::kFloat16, halves.data(), x.data(), elements, scale);
      CHECK(SameBits(x, expected));
      Widen(DType::kFloat16, wide.data(), halves.data(), elements, scale);
      CHECK(SameBits(wide, expected));
      Round(DType::kFloat16, rounded.data(), elements, scale);
      CHECK(SameBits(rounded, expected));
      Round(DType::kFloat16, rounded.data(), elements, scale);
      CHECK(SameBits(rounded, expected));
      AddWidened(DType::kFloat16, sum.data(), halves.data(), elements, scale);
      for (int64_t i = 0; i < elements; ++i) CHECK_EQ(BitsOf(sum[i]), BitsOf(1.0f + expected[i]));
    }
  }
}

TEST("wire: sums beyond float16 and averages of small values arrive, with equal bits, whatever the plan") {
  constexpr int kSize = 3;
  constexpr int64_t kElements = 1000;
  const float values[] = {60000.0f, -65504.0f, 1e-6f, 40000.0f};
  for (int plan = 0; plan < 3; ++plan) {
    Engines engines(kSize);
    std::vector<std::vector<float>> results(kSize, std::vector<float>(kElements));
    engines.Each([&](int rank, Engine* engine) {
      Rows rows = plan == 0 ? RingAllreduce(rank, kSize) : plan == 1 ? StarAllreduce(rank, kSize) : Folded(rank);
      CallSpec spec = AllreduceSpec("x", AddPlan(engine, rows), kElements, DType::kFloat32, ReduceOp::kAverage);
      spec.wire = DType::kFloat16;
      std::string input(4 * kElements, 0);
      for (int64_t i = 0; i < kElements; ++i) {
        const float x = values[i % 4] * (1 - 0.125f * rank);
        std::memcpy(&input[4 * i], &x, 4);
      }
      Result result = Call(engine, spec, input);
      CHECK_OK(result.status);
      std::memcpy(results[rank].data(), result.data.data(), result.data.size());
    });
    for (int rank = 1; rank < kSize; ++rank) CHECK(SameBits(results[rank], results[0]));
    for (int64_t i = 0; i < kElements; ++i) {
      const float average = values[i % 4] * 0.875f;
      CHECK(std::fabs(results[0][i] - average) <= 1.5e-7f + std::ldexp(std::fabs(average), -9));
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

TEST("wire: a dtype that cannot travel so is refused in words, and so are ranks that differ") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    auto refused = [&](CallSpec spec, DType wire) {
      spec.wire = wire;
      Result result = Call(engine, spec, std::string(64, 0));
      CHECK(!result.status.ok());
      return result.status.message;
    };
    CallSpec spec = AllreduceSpec("x", plan, 4);
    CHECK(refused(spec, DType::kInt32).find("wire dtype (4) must be float16 or bfloat16") != std::string::npos);
    CallSpec doubles = AllreduceSpec("x", plan, 4, DType::kFloat64);
    CHECK(refused(doubles, DType::kFloat16).find("only float32 may be sent as float16, this is float64") !=
          std::string::npos);
    spec.kind = Kind::kBroadcast;
    CHECK(refused(spec, DType::kFloat16).find("only a reduction may have a wire dtype") != std::string::npos);
    spec.kind = Kind::kAllreduce;
    if (rank == 1) spec.wire = DType::kBFloat16;
    Result result = Call(engine, spec, std::string(16, 0));
    CHECK_EQ(static_cast<int>(result.status.code), static_cast<int>(Code::kMismatch));
    CHECK(result.status.message.find("rank 1 has compression bfloat16, rank 0 has compression none") !=
          std::string::npos);
    spec.wire = DType::kBFloat16;
    CHECK_OK(Call(engine, spec, std::string(16, 0)).status);
    ChannelSpec channel{"c", {"w"}, {4}, {{DType::kFloat64, ReduceOp::kSum, plan, 0, {0}, DType::kFloat16}}};
    int64_t handle = 0;
    CHECK(engine->OpenChannel(channel, &handle).message.find("only float32 may be sent") != std::string::npos);
  });
}

TEST("wire: a channel's buckets may travel as halves, each in its own way") {
  Engines engines(2);
  std::vector<std::string> results(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, 2));
    ChannelSpec spec{"c",
                     {"half", "plain"},
                     {64, 64},
                     {{DType::kFloat32, ReduceOp::kSum, plan, 64, {0}, DType::kFloat16},
                      {DType::kFloat32, ReduceOp::kSum, plan, 64, {1}}}};
    int64_t channel = 0, ticket = 0;
    CHECK_OK(engine->OpenChannel(spec, &channel));
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

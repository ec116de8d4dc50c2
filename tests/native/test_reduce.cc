#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "harness.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kLengths[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 1009};

// A half's value by its definition, from exponent and mantissa.
double Reference(Float16 x) {
  int exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023;
  double sign = x.bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

template <typename Half>
Half Bits(int bits) {
  return {static_cast<uint16_t>(bits)};
}

bool IsNan(Float16 x) { return (x.bits & 0x7fff) > 0x7c00; }
bool IsNan(BFloat16 x) { return (x.bits & 0x7fff) > 0x7f80; }

TEST("half: every float16 has the value of its bits, and every half comes back from float32 as it was") {
  for (int bits = 0; bits < 65536; ++bits) {
    const Float16 half = Bits<Float16>(bits), half_back = ToFloat16(ToFloat(half));
    const double value = ToFloat(half), expected = Reference(half);
    CHECK(std::isnan(expected) ? std::isnan(value) : value == expected);
    CHECK_EQ(std::signbit(value), (bits & 0x8000) != 0);
    CHECK(IsNan(half) ? IsNan(half_back) : half_back.bits == bits);
    const BFloat16 bfloat = Bits<BFloat16>(bits), bfloat_back = ToBFloat16(ToFloat(bfloat));
    CHECK(IsNan(bfloat) ? IsNan(bfloat_back) : bfloat_back.bits == bits);
  }
}

// A value between the neighbours lo and hi becomes lo below the middle and hi above it; the middle itself becomes the
// neighbour with an even last bit.
template <typename Half>
void RoundsBetween(int bits, Half (*round)(float), float overflow) {
  Half lo = Bits<Half>(bits), hi = Bits<Half>(bits + 1);
  float hi_value = std::isinf(ToFloat(hi)) ? overflow : ToFloat(hi);
  float middle = static_cast<float>((static_cast<double>(ToFloat(lo)) + hi_value) / 2);
  int even = bits % 2 == 0 ? bits : bits + 1;
  for (int sign : {0, 0x8000}) {
    float factor = sign ? -1.0f : 1.0f;
    CHECK_EQ(round(factor * middle).bits, even | sign);
    CHECK_EQ(round(factor * std::nextafterf(middle, 0)).bits, bits | sign);
    CHECK_EQ(round(factor * std::nextafterf(middle, INFINITY)).bits, (bits + 1) | sign);
  }
}

TEST("half: float32 rounds to the nearest half, ties to even") {
  for (int bits = 0; bits < 0x7c00; ++bits) RoundsBetween<Float16>(bits, ToFloat16, 65536.0f);
  for (int bits = 1; bits < 0x7f7f; ++bits) RoundsBetween<BFloat16>(bits, ToBFloat16, 0);
}

TEST("half: infinity stays, too large becomes infinity, NaN stays NaN") {
  CHECK_EQ(ToFloat16(INFINITY).bits, 0x7c00);
  CHECK_EQ(ToFloat16(-INFINITY).bits, 0xfc00);
  CHECK_EQ(ToFloat16(65519.99f).bits, 0x7bff);
  CHECK_EQ(ToFloat16(65520.0f).bits, 0x7c00);
  CHECK_EQ(ToFloat16(-1e30f).bits, 0xfc00);
  CHECK_EQ(ToBFloat16(FLT_MAX).bits, 0x7f80);
  CHECK_EQ(ToBFloat16(-INFINITY).bits, 0xff80);
  for (uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffc00000u, 0x7f808000u}) {
    CHECK(IsNan(ToFloat16(FloatOf(nan))));
    CHECK(IsNan(ToBFloat16(FloatOf(nan))));
    CHECK_EQ(ToFloat16(FloatOf(nan)).bits >> 15, static_cast<int>(nan >> 31));
    CHECK_EQ(ToBFloat16(FloatOf(nan)).bits >> 15, static_cast<int>(nan >> 31));
  }
}

template <typename T>
void AddsLikeTheLanguage(DType dtype) {
  for (int64_t elements : kLengths) {
    for (int64_t offset : {0, 1}) {  // unaligned to a vector
      std::vector<T> x, y, expected;
      for (int64_t i = 0; i < elements + offset; ++i) {
        x.push_back(static_cast<T>(i * 3 - 40));
        y.push_back(static_cast<T>(1000 - i * 5));
        expected.push_back(i < offset ? x.back() : static_cast<T>(x.back() + y.back()));
      }
      Add(dtype, x.data() + offset, y.data() + offset, elements);
      CHECK(x == expected);
    }
  }
}

TEST("add: float and integer sums are those of the language") {
  AddsLikeTheLanguage<float>(DType::kFloat32);
  AddsLikeTheLanguage<double>(DType::kFloat64);
  AddsLikeTheLanguage<int32_t>(DType::kInt32);
  AddsLikeTheLanguage<int64_t>(DType::kInt64);
}

template <typename Half>
void AddsHalves(DType dtype) {
  // Every half meets 61 others; the sum of two halves is exact in double, and rounded once.
  constexpr int kStride = 1075;
  std::vector<Half> x, y, sums;
  for (int a = 0; a < 65536; a += 7) {
    for (int b = a % 13; b < 65536; b += kStride) {
      x.push_back(Bits<Half>(a));
      y.push_back(Bits<Half>(b));
    }
  }
  sums = x;
  Add(dtype, sums.data(), y.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    double exact = static_cast<double>(ToFloat(x[i])) + ToFloat(y[i]);
    Half expected;
    FromFloat(static_cast<float>(exact), &expected);
    CHECK(std::isnan(exact) ? IsNan(sums[i]) : sums[i].bits == expected.bits);
  }
}

TEST("add: halves are added in float32 and rounded once") {
  AddsHalves<Float16>(DType::kFloat16);
  AddsHalves<BFloat16>(DType::kBFloat16);
}

TEST("add: infinities and NaN go through halves") {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
    const uint16_t greatest = infinity - 1;
    std::vector<uint16_t> x(17, greatest), y(17, greatest);
    Add(dtype, x.data(), y.data(), 17);
    CHECK(x == std::vector<uint16_t>(17, infinity));
    std::vector<uint16_t> minus_infinity(17, infinity | 0x8000);
    Add(dtype, x.data(), minus_infinity.data(), 17);
    for (uint16_t sum : x) CHECK((sum & 0x7fff) > infinity);
  }
}

template <typename T>
void ChoosesAlike(DType dtype, const std::vector<T>& values) {
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (T a : values) {
      for (T b : values) {
        std::vector<T> there(11, a), back(11, b), expected(11, op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b));
        const std::vector<T> first(11, a), second(11, b);
        Combine(op, dtype, there.data(), second.data(), 11);
        Combine(op, dtype, back.data(), first.data(), 11);
        CHECK_EQ(std::memcmp(there.data(), back.data(), 11 * sizeof(T)), 0);  // -0, 0 and NaN included
        bool nan = a != a || b != b;
        CHECK(nan ? there[10] != there[10] : there == expected);
        if (a == T{0} && b == T{0}) {
          const bool one = std::signbit(double(a)), other = std::signbit(double(b));
          CHECK_EQ(std::signbit(double(there[0])), op == ReduceOp::kMin ? one || other : one && other);
        }
      }
    }
  }
}

TEST("combine: a minimum and a maximum are the same whatever the order, with NaN, infinity and zeros of both signs") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  ChoosesAlike<double>(DType::kFloat64, {-INFINITY, -2.5, -0.0, 0.0, 1e-310, 7, INFINITY, nan, -nan});
  ChoosesAlike<float>(DType::kFloat32, {-INFINITY, -2.5f, -0.0f, 0.0f, 1e-40f, 7, INFINITY, float(nan), -float(nan)});
  ChoosesAlike<int32_t>(DType::kInt32, {INT32_MIN, -1, 0, 5, INT32_MAX});
  ChoosesAlike<int64_t>(DType::kInt64, {INT64_MIN, -1, 0, int64_t{1} << 40, INT64_MAX});
  for (auto [dtype, one] : {std::pair(DType::kFloat16, 0x3c00), std::pair(DType::kBFloat16, 0x3f80)}) {
    uint16_t a = 0x8000, b = 0x0000, c = static_cast<uint16_t>(one), d = static_cast<uint16_t>(one | 0x8000);
    Combine(ReduceOp::kMin, dtype, &b, &a, 1);
    CHECK_EQ(b, 0x8000);
    Combine(ReduceOp::kMax, dtype, &c, &d, 1);
    CHECK_EQ(c, one);
    Combine(ReduceOp::kProduct, dtype, &c, &d, 1);
    CHECK_EQ(c, one | 0x8000);
  }
}

TEST("combine: what travels as halves is combined in float32") {
  for (DType wire : {DType::kFloat16, DType::kBFloat16}) {
    for (ReduceOp op : kReduceOps) {
      constexpr int64_t kElements = 5000;
      std::vector<float> x, y, expected;
      for (int64_t i = 0; i < kElements; ++i) {
        x.push_back(static_cast<float>(i % 97 - 48) / 8);
        y.push_back(static_cast<float>(i % 61 - 30) / 4);
      }
      std::vector<uint16_t> halves(kElements);
      Narrow(wire, halves.data(), y.data(), kElements);
      expected = x;
      Combine(op, DType::kFloat32, expected.data(), y.data(), kElements);
      CombineWidened(op, wire, x.data(), halves.data(), kElements);
      CHECK(x == expected);
    }
  }
}

TEST("combine: sums and products of integers wrap") {
  std::vector<int32_t> x(9, INT32_MAX), one(9, 1), two(9, 2);
  Add(DType::kInt32, x.data(), one.data(), 9);
  CHECK(x == std::vector<int32_t>(9, INT32_MIN));
  x.assign(9, INT32_MAX);
  Combine(ReduceOp::kProduct, DType::kInt32, x.data(), two.data(), 9);
  CHECK(x == std::vector<int32_t>(9, -2));
  int64_t y = INT64_MIN, minus_one = -1;
  Add(DType::kInt64, &y, &minus_one, 1);
  CHECK_EQ(y, INT64_MAX);
}

template <typename T>
void DividesLikeTheLanguage(DType dtype, T unit) {
  for (int64_t divisor : {1, 2, 3, 7, 4096}) {
    std::vector<T> x, expected;
    for (int i = -16; i < 17; ++i) {
      x.push_back(static_cast<T>(i) * unit);
      expected.push_back(x.back() / static_cast<T>(divisor));
    }
    Divide(dtype, x.data(), divisor, 33);
    CHECK(x == expected);
  }
}

TEST("divide: floats round once and integers truncate toward zero") {
  DividesLikeTheLanguage<float>(DType::kFloat32, 0.1f);
  DividesLikeTheLanguage<double>(DType::kFloat64, 0.1);
  DividesLikeTheLanguage<int32_t>(DType::kInt32, 1000003);
  DividesLikeTheLanguage<int64_t>(DType::kInt64, 1000000000000003);
  int32_t small = 5;
  Divide(DType::kInt32, &small, int64_t{1} << 40, 1);  // a divisor that no int32 holds
  CHECK_EQ(small, 0);
}

template <typename Half>
void DividesHalves(DType dtype) {
  for (int divisor : {2, 3, 5, 8}) {
    std::vector<Half> x;
    for (int bits = 0; bits < 65536; ++bits) x.push_back(Bits<Half>(bits));
    Divide(dtype, x.data(), divisor, 65536);
    for (int bits = 0; bits < 65536; ++bits) {
      Half expected;
      FromFloat(ToFloat(Bits<Half>(bits)) / static_cast<float>(divisor), &expected);
      CHECK(IsNan(expected) ? IsNan(x[bits]) : x[bits].bits == expected.bits);
    }
  }
}

TEST("divide: halves divide in float32 and are rounded once") {
  DividesHalves<Float16>(DType::kFloat16);
  DividesHalves<BFloat16>(DType::kBFloat16);
}

TEST("dtypes have the sizes and names that Python knows") {
  struct {
    DType dtype;
    size_t size;
    std::string name;
  } expected[] = {{DType::kFloat32, 4, "float32"},   {DType::kFloat64, 8, "float64"}, {DType::kFloat16, 2, "float16"},
                  {DType::kBFloat16, 2, "bfloat16"}, {DType::kInt32, 4, "int32"},     {DType::kInt64, 8, "int64"},
                  {DType::kBytes, 1, "bytes"},       {DType{99}, 0, "unknown"}};
  for (const auto& [dtype, size, name] : expected) {
    CHECK_EQ(SizeOf(dtype), size);
    CHECK_EQ(NameOf(dtype), name);
  }
}

}  // namespace
}  // namespace hvd_ext::test

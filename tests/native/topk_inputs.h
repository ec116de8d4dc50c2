// For the tests of the selection: inputs, the answer by definition, and the results of a call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "kernels/half.h"
#include "kernels/topk.h"
#include "kernels/topk_scan.h"

namespace hvd_ext::test {

template <typename Bits>
struct Format {
  DType dtype;
  Bits infinity;
  int exponent_bit;  // the lowest bit of the exponent
  Bits (*of)(float value);
};

inline uint64_t BitsOfDouble(float value) {
  const double wide = value;
  uint64_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  return bits;
}

inline const Format<uint32_t> kFloat32{DType::kFloat32, 0x7f800000u, 23, BitsOf};
inline const Format<uint64_t> kFloat64{DType::kFloat64, uint64_t{0x7ff} << 52, 52, BitsOfDouble};
inline const Format<uint16_t> kFloat16{DType::kFloat16, 0x7c00, 10, [](float x) { return ToFloat16(x).bits; }};
inline const Format<uint16_t> kBFloat16{DType::kBFloat16, 0x7f80, 7, [](float x) { return ToBFloat16(x).bits; }};

inline const std::vector<std::string>& Inputs() {
  static const std::vector<std::string> names = {"gauss",   "laplace",      "cauchy",      "log-normal", "layers",
                                                 "zeros",   "signed zeros", "constant",    "ties",       "ascending",
                                                 "falling", "denormals",    "nan and inf", "all nan",    "all -inf",
                                                 "bits",    "few",          "tail",        "hot run",    "one outlier"};
  return names;
}

// Element i of an input. The generator is our own, so that the numbers are the same with every standard library.
template <typename Bits>
std::vector<Bits> Input(const Format<Bits>& format, const std::string& name, int64_t elements) {
  std::mt19937_64 draw(static_cast<uint64_t>(elements) * 31 + 7);
  auto uniform = [&] { return (static_cast<double>(draw() >> 11) + 0.5) * 0x1p-53; };
  auto gauss = [&] { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); };
  const Bits sign = static_cast<Bits>(~Bits{0} ^ (static_cast<Bits>(~Bits{0}) >> 1)), nan = format.infinity | 1;
  std::vector<Bits> x(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) {
    auto of = [&](double value) { return format.of(static_cast<float>(value)); };
    Bits* to = &x[static_cast<size_t>(i)];
    if (name == "gauss") *to = of(gauss());
    if (name == "laplace") *to = of((draw() & 1 ? 1 : -1) * std::log(uniform()));
    if (name == "cauchy") *to = of(std::tan(3.14159 * (uniform() - 0.5)));
    if (name == "log-normal") *to = of(std::exp(4 * gauss()));
    if (name == "layers") *to = of(gauss() * std::pow(10, -static_cast<double>(i * 7 / (elements + 1))));
    if (name == "zeros") *to = 0;
    if (name == "signed zeros") *to = draw() & 1 ? sign : Bits{0};
    if (name == "constant") *to = static_cast<Bits>(of(-0.75) ^ (draw() & 1 ? sign : Bits{0}));
    if (name == "ties") *to = of(static_cast<double>(draw() % 4));
    if (name == "ascending") *to = of(static_cast<double>(i) / 7);
    if (name == "falling") *to = of(static_cast<double>(elements - i) / 7);
    if (name == "denormals") *to = static_cast<Bits>(draw() % (uint64_t{1} << (format.exponent_bit - 1)));
    if (name == "nan and inf") {
      const uint64_t kind = draw() % 8;
      *to = kind == 0 ? nan : kind == 1 ? format.infinity : kind == 2 ? static_cast<Bits>(nan | sign) : of(gauss());
    }
    if (name == "all nan") *to = static_cast<Bits>(nan + draw() % 3);
    if (name == "all -inf") *to = static_cast<Bits>(format.infinity | sign);
    if (name == "bits") *to = static_cast<Bits>(draw());
    if (name == "few") *to = draw() % 500 == 0 ? of(gauss()) : Bits{0};
    if (name == "tail") *to = i * 20 > elements * 19 ? of(gauss()) : of(gauss() * 1e-3);
    if (name == "hot run") *to = i * 2 > elements && i * 50 < elements * 26 ? of(100 + gauss()) : of(gauss());
    if (name == "one outlier") *to = i * 2 == elements || elements == 1 ? of(6e4) : of(gauss());
  }
  return x;
}

template <typename Bits>
bool Before(const std::vector<Bits>& x, int64_t a, int64_t b) {
  const Bits key_a = topk::KeyOf(x[static_cast<size_t>(a)]), key_b = topk::KeyOf(x[static_cast<size_t>(b)]);
  return key_a != key_b ? key_a > key_b : a < b;
}

// All indices in the order in which they are picked: the picks for any k are its first k.
template <typename Bits>
std::vector<int64_t> Order(const std::vector<Bits>& x, int64_t begin, int64_t elements) {
  std::vector<int64_t> order(static_cast<size_t>(elements));
  std::iota(order.begin(), order.end(), begin);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return Before(x, a, b); });
  return order;
}

// A ParallelFor on `threads` threads.
inline ParallelFor Threads(int threads) {
  return [threads](int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    std::vector<std::thread> running;
    for (int64_t t = threads - 1; t >= 0; --t) {  // begins with the last part
      const int64_t begin = total * t / threads, end = total * (t + 1) / threads;
      if (begin < end) running.emplace_back([&body, begin, end] { body(begin, end); });
    }
    for (std::thread& thread : running) thread.join();
  };
}

template <typename Bits>
struct Picked {
  std::vector<int64_t> indices, counts;
  std::vector<Bits> values;
  bool non_finite = false;
};

// Memory with guard words behind it, which must not change.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t elements) : all_(static_cast<size_t>(elements + kGuards), kGuard) {}
  T* data() { return all_.data(); }
  std::vector<T> Checked() const {
    for (size_t i = all_.size() - kGuards; i < all_.size(); ++i) CHECK(all_[i] == kGuard);
    return std::vector<T>(all_.begin(), all_.end() - kGuards);
  }

 private:
  static constexpr int64_t kGuards = 64;
  static constexpr T kGuard = static_cast<T>(0x5a5a5a5a5a5a5a5a);
  std::vector<T> all_;
};

template <typename Bits>
Picked<Bits> Run(const TopKOptions& options, const Format<Bits>& format, const Bits* x,
                 const std::vector<TopKSegment>& segments, const ParallelFor& parallel_for, bool wide,
                 TopKScratch* scratch) {
  int64_t picks = 0;
  for (const TopKSegment& segment : segments) picks += segment.k;
  Guarded<Bits> values(picks);
  Guarded<int32_t> narrow(wide ? 0 : picks);
  Guarded<int64_t> indices(wide ? picks : 0), counts(static_cast<int64_t>(segments.size()));
  Picked<Bits> picked;
  TopK(options, format.dtype, x, segments.data(), static_cast<int64_t>(segments.size()), scratch, parallel_for,
       counts.data(), wide ? static_cast<void*>(indices.data()) : narrow.data(), wide, values.data(),
       &picked.non_finite);
  const std::vector<int32_t> small = narrow.Checked();
  picked.indices = wide ? indices.Checked() : std::vector<int64_t>(small.begin(), small.end());
  picked.values = values.Checked();
  picked.counts = counts.Checked();
  return picked;
}

// The paths whose instructions this processor has.
inline std::vector<topk::Path> Paths() {
  std::vector<topk::Path> paths;
  for (topk::Path path : {topk::Path::kPortable, topk::Path::kAvx2, topk::Path::kAvx512}) {
    if (path <= topk::BestPath()) paths.push_back(path);
  }
  return paths;
}

// Sets the path, and how the sampler is misled, while an object of this class lives.
struct With {
  explicit With(topk::Path path, topk::Misled misled = topk::Misled::kNot) {
    CHECK(topk::UsePath(path));
    topk::MisleadSampler(misled);
  }
  ~With() {
    topk::UsePath(topk::BestPath());
    topk::MisleadSampler(topk::Misled::kNot);
  }
};

}  // namespace hvd_ext::test

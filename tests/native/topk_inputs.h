// For the tests of the selection on processors: the answer by definition, and the results of a call.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "harness.h"
#include "kernels/topk.h"
#include "kernels/topk_scan.h"
#include "selection_inputs.h"

namespace hvd_ext::test {

template <typename Bits>
struct Format {
  DType dtype;
  Bits infinity;
};

inline constexpr Format<uint32_t> kFloat32{DType::kFloat32, 0x7f800000u};
inline constexpr Format<uint64_t> kFloat64{DType::kFloat64, uint64_t{0x7ff} << 52};
inline constexpr Format<uint16_t> kFloat16{DType::kFloat16, 0x7c00};
inline constexpr Format<uint16_t> kBFloat16{DType::kBFloat16, 0x7f80};

template <typename Bits>
std::vector<Bits> Input(const Format<Bits>& format, const std::string& name, int64_t elements) {
  for (const SelectionInput& input : SelectionInputs()) {
    if (name == input.name) return ElementsOf<Bits>(input, format.dtype, elements, static_cast<uint64_t>(elements));
  }
  throw Failure("no input is called " + name);
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

// The picks of a segment of x by definition, ascending.
template <typename Bits>
std::vector<int64_t> Best(const std::vector<Bits>& x, const TopKSegment& segment) {
  std::vector<int64_t> best = Order(x, segment.begin, segment.elements);
  best.resize(static_cast<size_t>(segment.k));
  std::sort(best.begin(), best.end());
  return best;
}

inline int64_t SumOfK(const std::vector<TopKSegment>& segments) {
  int64_t sum = 0;
  for (const TopKSegment& segment : segments) sum += segment.k;
  return sum;
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
  const int64_t picks = SumOfK(segments);
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

// What a step of error feedback reads; without a velocity it has no momentum.
struct FeedbackState {
  std::vector<float> gradient, residual, velocity;
  MomentumCorrection correction{0.9f};

  ErrorFeedback InPlace() {
    ErrorFeedback feedback;
    feedback.gradient = gradient.data();
    feedback.residual = feedback.next_residual = residual.data();
    if (!velocity.empty()) feedback.velocity = feedback.next_velocity = velocity.data();
    feedback.correction = correction;
    return feedback;
  }
};

inline FeedbackState RandomState(int64_t elements, bool momentum) {
  auto floats = [&](const char* name) {
    std::vector<float> x;
    for (uint32_t bits : Input(kFloat32, name, elements)) x.push_back(FloatOf(bits));
    return x;
  };
  return {floats("gauss"), floats("layers"), momentum ? floats("laplace") : std::vector<float>()};
}

}  // namespace hvd_ext::test

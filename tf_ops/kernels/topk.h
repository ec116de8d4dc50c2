// Selects the k elements of greatest magnitude. It uses neither MPI nor TensorFlow, and it starts no threads of its
// own.
//
// Terms. The key of an element is its bits without the sign, compared as an unsigned integer: 0 = -0 < denormals <
// normals < infinity < NaN. T is the k-th greatest key of a segment. The picks are all elements with a key > T and, of
// those with a key == T, the ones of lowest index. So the answer is unique, whatever the number of threads and the
// instruction set.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext {

// Runs body(begin, end) over parts of [0, total), in any order and on any threads, and returns when all parts are done.
// `cost` is about the number of nanoseconds that one unit takes. Where the function is null, the calling thread does
// all work.
using ParallelFor =
    std::function<void(int64_t total, int64_t cost, const std::function<void(int64_t begin, int64_t end)>& body)>;

// The values are part of the C ABI and of the ops (hvd_ext/compression/selectors.py mirrors them).
enum class Selector : int32_t {
  kExact = 0,      // the unique answer above
  kMSTopK = 1,     // Algorithm 1 of the CommLib paper, guarded so that exactly k distinct elements come out
  kDgc = 2,        // the elements above a threshold from a sample, and only the k greatest of them if more
  kThreshold = 3,  // the elements with a key >= that of `threshold`, and only the k greatest of them if more
  kRandom = 4      // k elements at random
};

struct TopKOptions {
  Selector selector = Selector::kExact;
  int32_t samplings = 30;  // kMSTopK: N of Algorithm 1
  uint64_t seed = 0;       // kMSTopK, kDgc, kRandom; the same seed gives the same answer
  double threshold = 0;    // kThreshold: a magnitude
};

// A part of x. The segments of a call are disjoint and ascending, and 0 <= k <= elements.
struct TopKSegment {
  int64_t begin;
  int64_t elements;
  int64_t k;
};

// Memory that is kept from call to call. Only one call may use it at a time. Let c be min(elements, 2.5 k + 16384)
// summed over the segments, and b the bytes per element: it holds at most 1.5 * (3 b + 4) * c bytes plus 64 KiB for
// each lane. There is one lane if ParallelFor is null; else there are at most 32, and so few that each has at least 4 k
// elements. Usually there are 1.3 k candidates over all lanes, not c for each. The selectors other than kExact hold up
// to 8 bytes per element.
class TopKScratch {
 public:
  TopKScratch();
  ~TopKScratch();
  TopKScratch(TopKScratch&&) noexcept;
  TopKScratch& operator=(TopKScratch&&) noexcept;
  int64_t bytes() const;  // bytes that are allocated now

  struct Memory;
  Memory* memory() const { return memory_.get(); }

 private:
  std::unique_ptr<Memory> memory_;
};

// Writes the picks of segment s to `indices` and `values`, ascending by index, beginning at the sum of the k of the
// segments before s. counts[s] is their number: k, or at most k for kDgc and kThreshold. Indices are positions in x,
// int64 if `wide`, else int32. `values` (may be null) receives x at the indices, bit for bit. *non_finite says whether
// a picked key, or any key of a segment with k = 0, is infinite or NaN. dtype is float32, float64, float16 or bfloat16;
// any other aborts the process, because callers refuse it before.
void TopK(const TopKOptions& options, DType dtype, const void* x, const TopKSegment* segments, int64_t n_segments,
          TopKScratch* scratch, const ParallelFor& parallel_for, int64_t* counts, void* indices, bool wide,
          void* values, bool* non_finite);

// Momentum correction: the selection is made from sums of velocities instead of gradients. The engine, the ops and the
// kernels share this struct.
struct MomentumCorrection {
  float momentum = 0;
  bool nesterov = false;
  bool masks = true;  // momentum factor masking: the velocity becomes 0 where the residual does
};

// The arrays that error feedback reads and writes; all have as many elements as the gradient. next_residual and
// next_velocity may be the same memory as residual and velocity, or other memory. The accumulated gradient `a` is
// residual + gradient if there is no velocity. Otherwise it is
//   velocity' = momentum * velocity + gradient
//   a = residual + (nesterov ? gradient + momentum * velocity' : velocity')
// with each operation rounded to float32.
struct ErrorFeedback {
  const float* gradient;
  const float* residual;
  float* next_residual;
  const float* velocity = nullptr;
  float* next_velocity = nullptr;
  MomentumCorrection correction{};  // not used without a velocity
};

// Gives `a` of element i, and writes its next velocity. Vector loops use it for the elements that do not fill a vector;
// it is also their definition, and that of the kernels for GPUs.
HVD_EXT_ANYWHERE inline float Accumulated(const ErrorFeedback& f, int64_t i) {
  const float gradient = f.gradient[i];
  const float residual = f.residual[i];
  if (f.velocity == nullptr) return residual + gradient;
  const float velocity = f.correction.momentum * f.velocity[i] + gradient;
  f.next_velocity[i] = velocity;
  return residual + (f.correction.nesterov ? gradient + f.correction.momentum * velocity : velocity);
}

// Accumulates and selects in one pass: next_residual = a, but 0 at the picks, which are selected from `a` as TopK does;
// next_velocity = velocity', but 0 at the picks if `masks`. Segments are ranges of the arrays; elements outside of them
// are not touched. *non_finite is as for TopK, but with kMSTopK, kDgc and kRandom any key of a segment counts.
void TopKErrorFeedback(const TopKOptions& options, const ErrorFeedback& feedback, const TopKSegment* segments,
                       int64_t n_segments, TopKScratch* scratch, const ParallelFor& parallel_for, int64_t* counts,
                       void* indices, bool wide, float* values, bool* non_finite);

// The same for a dense step, which selects nothing: accumulated = a (`accumulated` may be the gradient's memory),
// next_residual = 0, next_velocity = velocity'.
void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated, const ParallelFor& parallel_for);

}  // namespace hvd_ext

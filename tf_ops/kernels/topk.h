// The k elements of greatest magnitude. No MPI, no TensorFlow; threads are the caller's.
//
// Words. A key is the bits of an element without the sign, compared as an unsigned number:
// 0 = -0 < denormals < normals < infinity < NaN. T is the k-th greatest key of a segment. Picked are all elements with
// a key > T and, of those with key = T, the ones of lowest index: the answer is unique, whatever the threads or the
// instructions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/reduce.h"

namespace hvd_ext {

// Runs body(begin, end) over parts of [0, total), in any order and on any threads, and returns when all have ended.
// `cost` is about the nanoseconds of one unit. Null: everything on this thread.
using ParallelFor =
    std::function<void(int64_t total, int64_t cost, const std::function<void(int64_t begin, int64_t end)>& body)>;

// The values are part of the C ABI and of the ops (hvd_ext/compression/selectors.py mirrors them).
enum class Selector : int32_t {
  kExact = 0,      // the unique answer above
  kMSTopK = 1,     // the paper's Algorithm 1, guarded so that exactly k distinct elements come out
  kDgc = 2,        // a threshold from a sample, then the greatest k of those above it: at most k
  kThreshold = 3,  // keys >= that of `threshold`, the greatest k where they are more: at most k
  kRandom = 4      // k elements at random
};

struct TopKOptions {
  Selector selector = Selector::kExact;
  int32_t samplings = 30;  // kMSTopK: N of Algorithm 1
  uint64_t seed = 0;       // kMSTopK, kDgc, kRandom; the same seed gives the same answer
  double threshold = 0;    // kThreshold: a magnitude
};

// A part of x: segments are disjoint and ascending; 0 <= k <= elements.
struct TopKSegment {
  int64_t begin;
  int64_t elements;
  int64_t k;
};

// Memory that is kept from call to call; one call at a time. With c = min(elements, 2.5 k + 16384) summed over the
// segments and b bytes per element it holds at most 1.5 * (3 b + 4) * c for each lane, plus 64 KiB per lane: one lane
// where ParallelFor is null, else at most 32, and so few that a lane has at least 4 k elements. Usual are 1.3 k
// candidates in all instead of c for each lane. The selectors other than kExact hold up to 8 bytes per element.
class TopKScratch {
 public:
  TopKScratch();
  ~TopKScratch();
  TopKScratch(TopKScratch&&) noexcept;
  TopKScratch& operator=(TopKScratch&&) noexcept;
  int64_t bytes() const;  // held now

  struct Memory;
  Memory* memory() const { return memory_.get(); }

 private:
  std::unique_ptr<Memory> memory_;
};

// The picks of segment s go to the places [sum of k before s, ...) of indices and values, counts[s] of them, ascending
// by index; counts[s] is k, or at most k for kDgc and kThreshold. Indices are positions in x, int32 or int64 (`wide`).
// `values` (may be null) has x at the indices, bit for bit. *non_finite: a picked key, or in a segment with k = 0 any
// key, is infinite or NaN. Dtypes: float32, float64, float16, bfloat16; others end the process, callers refuse them.
void TopK(const TopKOptions& options, DType dtype, const void* x, const TopKSegment* segments, int64_t n_segments,
          TopKScratch* scratch, const ParallelFor& parallel_for, int64_t* counts, void* indices, bool wide,
          void* values, bool* non_finite);

// Momentum correction: what is selected from is a sum of velocities. The engine, the ops and the kernels share it.
struct MomentumCorrection {
  float momentum = 0;
  bool nesterov = false;
  bool masks = true;  // the velocity becomes 0 where the residual does
};

// What error feedback reads and writes, one element of each per element of the gradient. next_* may equal the inputs or
// be other memory. With no velocity a = residual + gradient; else
//   velocity' = momentum * velocity + gradient, a = residual + (nesterov ? gradient + momentum * velocity' :
//   velocity'),
// each operation rounded to float32.
struct ErrorFeedback {
  const float* gradient;
  const float* residual;
  float* next_residual;
  const float* velocity = nullptr;
  float* next_velocity = nullptr;
  MomentumCorrection correction{};  // not used without a velocity
};

// One pass: next_residual = a, selects from a as TopK does, next_residual = 0 at the picks; next_velocity = velocity',
// and 0 at the picks where `masks`. Segments count within the arrays; elements outside of them are not touched.
// *non_finite as for TopK; for kMSTopK, kDgc and kRandom any key of a segment.
void TopKErrorFeedback(const TopKOptions& options, const ErrorFeedback& feedback, const TopKSegment* segments,
                       int64_t n_segments, TopKScratch* scratch, const ParallelFor& parallel_for, int64_t* counts,
                       void* indices, bool wide, float* values, bool* non_finite);

// The same without a selection, a dense step: accumulated = a (it may be the gradient), next_residual = 0,
// next_velocity = velocity'.
void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated, const ParallelFor& parallel_for);

}  // namespace hvd_ext

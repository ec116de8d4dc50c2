// The inner loops of the selection, once for each kind of processor. Bits is the unsigned integer of an element's size.
#pragma once

#include <cstdint>

#include "kernels/topk.h"

namespace hvd_ext::topk {

// A block is scanned at once, and what is found in it is read again from the first cache.
constexpr int64_t kBlock = 8192;
// What memory is asked for ahead of a scan, in bytes: every line, and before that one line of each page, so that its
// address is translated in time.
constexpr int64_t kAhead = 8192, kPageAhead = 16384, kPage = 4096;
constexpr int64_t kSpare = 64;  // loops may write so many elements past what they count

// Whether a page's worth of elements begins at the i-th.
template <typename T>
constexpr bool BeginsPage(int64_t i) {
  return i % (kPage / static_cast<int64_t>(sizeof(T))) == 0;
}

template <typename Bits>
constexpr Bits kMagnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);

template <typename Bits>
Bits KeyOf(Bits bits) {
  return bits & kMagnitude<Bits>;
}

// Elements that may be among the picks: their bits, and their place counted from the lane's begin.
template <typename Bits>
struct Candidates {
  Bits* bits;
  uint32_t* places;
};

// Where picks go.
template <typename Bits>
struct Picks {
  void* indices;
  Bits* values;  // or null
  bool wide;
};

// For one kind of processor.
template <typename Bits>
struct Loops {
  // ids[0 .. result) = the places in the block with a key >= bound, ascending. `ids` has kBlock + kSpare elements.
  // Reads x only, but asks the memory for what follows it.
  int64_t (*scan)(const Bits* x, int64_t elements, Bits bound, uint16_t* ids);
  // to[i] = the element at ids[i] and `place` + ids[i]; up to kSpare elements more of both are overwritten.
  void (*append)(const Bits* x, uint16_t* ids, int64_t count, uint32_t place, Candidates<Bits> to);
  // to[0 .. result) = the keys in [low, high) of `bits`, in their order; `to` has room for kSpare more, and may be
  // `bits`. *above grows by the number of keys >= high.
  int64_t (*between)(const Bits* bits, int64_t count, Bits low, Bits high, Bits* to, int64_t* above);
  // Writes the candidates with a key > `bound`, and the first `ties` of those with that key, to `picks` from `at` on,
  // up to `end`; `base` is added to the places. Returns the next place behind them. `ties` is counted down. *greatest
  // becomes the greatest key seen, if that is above it.
  int64_t (*emit)(Candidates<Bits> from, int64_t count, Bits bound, int64_t* ties, int64_t base, Picks<Bits> picks,
                  int64_t at, int64_t end, Bits* greatest);
};

// The part of a feedback that a block needs, at its first element; scan is done in the same pass.
struct FeedbackLoops {
  // next_residual = a; where its key is >= bound it becomes a candidate, at `place` and on, and next_residual = 0.
  // Returns how many; `to` has room for all elements and kSpare more. Writes next_velocity.
  int64_t (*scan)(const ErrorFeedback& feedback, int64_t elements, uint32_t bound, uint32_t place,
                  Candidates<uint32_t> to);
  // accumulated = a, next_residual = 0.
  void (*accumulate)(const ErrorFeedback& feedback, int64_t elements, float* accumulated);
};

enum class Path { kPortable, kAvx2, kAvx512 };

Path BestPath();
// For tests: the loops of this path from now on, where the processor has it (else false).
bool UsePath(Path path);

template <typename Bits>
const Loops<Bits>& LoopsOf(Path path);
const FeedbackLoops& FeedbackLoopsOf(Path path);
Path CurrentPath();

// For tests: kHigh makes every sampled bound too high, so that segments are scanned again; kLow makes it 0.
enum class Misled { kNot, kHigh, kLow };
void MisleadSampler(Misled misled);
Misled SamplerMisled();

// One element of the feedback, for the ends of vector loops and as their definition.
inline float Accumulated(const ErrorFeedback& f, int64_t i) {
  const float gradient = f.gradient[i];
  const float residual = f.residual[i];
  if (f.velocity == nullptr) return residual + gradient;
  const float velocity = f.correction.momentum * f.velocity[i] + gradient;
  f.next_velocity[i] = velocity;
  return residual + (f.correction.nesterov ? gradient + f.correction.momentum * velocity : velocity);
}

inline ErrorFeedback From(const ErrorFeedback& f, int64_t i) {
  ErrorFeedback from = f;
  from.gradient += i;
  from.residual += i;
  from.next_residual += i;
  if (f.velocity != nullptr) {
    from.velocity += i;
    from.next_velocity += i;
  }
  return from;
}

}  // namespace hvd_ext::topk

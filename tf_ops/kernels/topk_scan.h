// The inner loops of the selection, implemented once for each instruction set. Bits is the unsigned integer of an
// element's size.
#pragma once

#include <cstdint>

#include "kernels/topk.h"
#include "kernels/wide.h"

namespace hvd_ext::topk {

// The elements of a block. A block is scanned as a whole, and then what was found in it is read again from the L1
// cache.
constexpr int64_t kBlock = 8192;
// How far a scan prefetches, in bytes: every line kAhead, and one line of each page kPageAhead, so that the page's
// address is translated in time.
constexpr int64_t kAhead = 8192, kPageAhead = 16384, kPage = 4096;
constexpr int64_t kSpare = 64;  // loops may write this many elements past those that they count

// Whether element i is the first of a page's worth of elements.
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

// Elements that may be picks: their bits, and their places, which are counted from the start of the piece.
template <typename Bits>
struct Candidates {
  Bits* bits;
  uint32_t* places;
};

// Where the picks are written.
template <typename Bits>
struct Picks {
  void* indices;
  Bits* values;  // or null
  bool wide;
};

template <typename Bits>
HVD_EXT_ALWAYS void Put(Picks<Bits> picks, int64_t at, int64_t index, Bits bits) {
  if (picks.wide) {
    static_cast<int64_t*>(picks.indices)[at] = index;
  } else {
    static_cast<int32_t*>(picks.indices)[at] = static_cast<int32_t>(index);
  }
  if (picks.values != nullptr) picks.values[at] = bits;
}

// The loops for one instruction set.
template <typename Bits>
struct Loops {
  // Sets ids[0 .. result) to the places in the block with a key >= bound, ascending. `ids` has kBlock + kSpare
  // elements. Reads only x, but prefetches the memory behind it.
  int64_t (*scan)(const Bits* x, int64_t elements, Bits bound, uint16_t* ids);
  // Sets to.bits[i] = x[ids[i]] and to.places[i] = place + ids[i]. Up to kSpare further elements of both are
  // overwritten.
  void (*append)(const Bits* x, uint16_t* ids, int64_t count, uint32_t place, Candidates<Bits> to);
  // Sets to[0 .. result) to the keys of `bits` in [low, high), in their order. `to` has room for kSpare more, and may
  // be `bits`. *above grows by the number of keys >= high.
  int64_t (*between)(const Bits* bits, int64_t count, Bits low, Bits high, Bits* to, int64_t* above);
  // Writes the candidates with a key > `bound`, and the first *ties of those with a key == `bound`, to `picks` from
  // `at` on and not past `end`. The index of a pick is `base` plus its place. Returns the position behind the last
  // pick. *ties is reduced by the ties written, and *greatest becomes the greatest key seen if that is above it.
  int64_t (*emit)(Candidates<Bits> from, int64_t count, Bits bound, int64_t* ties, int64_t base, Picks<Bits> picks,
                  int64_t at, int64_t end, Bits* greatest);
};

// The loops of error feedback for one instruction set. `feedback` begins at the first element of a block.
struct FeedbackLoops {
  // Accumulates and scans in one pass: sets next_residual = a and next_velocity. Where the key of `a` is >= bound the
  // element becomes a candidate, its place counted from `place`, and its next_residual is 0. Returns the number of
  // candidates; `to` has room for all elements and kSpare more.
  int64_t (*scan)(const ErrorFeedback& feedback, int64_t elements, uint32_t bound, uint32_t place,
                  Candidates<uint32_t> to);
  // Sets accumulated = a, next_residual = 0 and next_velocity.
  void (*accumulate)(const ErrorFeedback& feedback, int64_t elements, float* accumulated);
};

enum class Path { kPortable, kAvx2, kAvx512 };

Path BestPath();
// For tests: uses the loops of `path` from now on. Returns false if the processor does not have its instructions.
bool UsePath(Path path);

template <typename Bits>
const Loops<Bits>& LoopsOf(Path path);
const FeedbackLoops& FeedbackLoopsOf(Path path);
Path CurrentPath();

// Calls kLoop (kernels/wide.h) with the instructions of a path.
template <auto kLoop, typename... Arguments>
auto OnPath(Path path, Arguments... arguments) {
  if (path == Path::kAvx512) return ForAvx512<kLoop>(arguments...);
  return path == Path::kAvx2 ? ForAvx2<kLoop>(arguments...) : kLoop(arguments...);
}

// For tests: kHigh makes every sampled bound too high, so that segments are scanned again; kLow makes every one 0.
enum class Misled { kNot, kHigh, kLow };
void MisleadSampler(Misled misled);
Misled SamplerMisled();

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

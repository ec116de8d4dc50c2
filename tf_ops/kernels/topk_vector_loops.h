// What the files with vector loops share: error feedback on vectors. Each includes this file behind its target, as
// topk_loops.h, and behind its definitions of these:
//   Floats             a vector of kLanes float32
//   LoadFloats(p), StoreFloats(p, x), AllFloats(x)
//   Part(hits, a, kept, places, to, count): of the vector a, stores the elements below the bound in `kept`, with 0 for
//                      the others, appends the others to the candidates, and returns the new count
#pragma once

#include "kernels/topk_loops.h"

namespace hvd_ext::topk {
namespace {

typedef uint32_t Places __attribute__((vector_size(4 * kLanes)));

// Keeps only the first *ties of the marked ties, and reduces *ties by their number.
inline uint32_t FirstTies(uint32_t marked, int64_t* ties) {
  const int64_t all = __builtin_popcount(marked);
  const int64_t kept = all <= *ties ? all : *ties;
  *ties -= kept;
  return _pdep_u32((uint32_t{1} << kept) - 1, marked);
}

// Returns `a` of a vector of elements and stores the next velocity. kKind: 0 no velocity, 1 momentum, 2 Nesterov.
template <int kKind>
inline Floats AccumulatedAt(const ErrorFeedback& f, int64_t i, Floats momentum) {
  const Floats gradient = LoadFloats(f.gradient + i), residual = LoadFloats(f.residual + i);
  if constexpr (kKind == 0) return residual + gradient;
  const Floats velocity = momentum * LoadFloats(f.velocity + i) + gradient;
  StoreFloats(f.next_velocity + i, velocity);
  if constexpr (kKind == 1) return residual + velocity;
  return residual + (gradient + momentum * velocity);
}

// The hardware prefetcher keeps up with several streams, except for the address translation of new pages.
template <int kKind>
inline void AskPages(const ErrorFeedback& f, int64_t i) {
  if (!BeginsPage<float>(i)) return;
  Ask(f.gradient + i, kPageAhead);
  Ask(f.residual + i, kPageAhead);
  if constexpr (kKind != 0) Ask(f.velocity + i, kPageAhead);
}

template <int kKind>
int64_t ScanFeedbackAs(const ErrorFeedback& feedback, int64_t elements, uint32_t bound, uint32_t place,
                       Candidates<uint32_t> to) {
  const ErrorFeedback f = feedback;  // a copy that no store can alias: its pointers stay in registers
  const Comparer<uint32_t> hits(bound);
  const Floats momentum = AllFloats(f.correction.momentum);
  Places places;
  for (uint32_t lane = 0; lane < kLanes; ++lane) places[lane] = place + lane;
  int64_t count = 0, i = 0;
  for (; i + 2 * kLanes <= elements; i += 2 * kLanes) {
    AskPages<kKind>(f, i);
    const Floats low = AccumulatedAt<kKind>(f, i, momentum), high = AccumulatedAt<kKind>(f, i + kLanes, momentum);
    count = Part(hits, low, f.next_residual + i, places, to, count);
    places += kLanes;
    count = Part(hits, high, f.next_residual + i + kLanes, places, to, count);
    places += kLanes;
  }
  return FeedbackRest(f, i, elements, bound, place, to, count);
}

int64_t ScanFeedback(const ErrorFeedback& f, int64_t elements, uint32_t bound, uint32_t place,
                     Candidates<uint32_t> to) {
  if (f.velocity == nullptr) return ScanFeedbackAs<0>(f, elements, bound, place, to);
  return f.correction.nesterov ? ScanFeedbackAs<2>(f, elements, bound, place, to)
                               : ScanFeedbackAs<1>(f, elements, bound, place, to);
}

template <int kKind>
void AccumulateAs(const ErrorFeedback& f, int64_t elements, float* accumulated) {
  const Floats momentum = AllFloats(f.correction.momentum);
  int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    AskPages<kKind>(f, i);
    StoreFloats(accumulated + i, AccumulatedAt<kKind>(f, i, momentum));
    StoreFloats(f.next_residual + i, AllFloats(0));
  }
  AccumulateRest(f, i, elements, accumulated);
}

void AccumulateVectors(const ErrorFeedback& f, int64_t elements, float* accumulated) {
  if (f.velocity == nullptr) return AccumulateAs<0>(f, elements, accumulated);
  return f.correction.nesterov ? AccumulateAs<2>(f, elements, accumulated) : AccumulateAs<1>(f, elements, accumulated);
}

}  // namespace
}  // namespace hvd_ext::topk

// The exact selection: bounds from a sample, one pass, a select among the candidates of the pass.
//
// Lanes are parts of the segments of about equal length, one for each thread; a piece is what a lane has of one
// segment. Candidates are the elements of a piece that may be picked, ascending by place. Whatever the bounds are, the
// candidates of all pieces of a segment hold every pick, or they are fewer than k and the segment is scanned again
// without a bound.
#pragma once

#include "kernels/topk_memory.h"

namespace hvd_ext::topk {

template <typename Bits>
struct Request {
  const Bits* x;                  // for a feedback: what it accumulates into
  const ErrorFeedback* feedback;  // or null
  Bits infinity;                  // keys from here on are not finite
  const TopKSegment* segments;
  int64_t n_segments;
  const ParallelFor* parallel_for;
  Lanes<Bits>* memory;
  Picks<Bits> picks;
};

// Writes k picks of every segment. Returns whether a picked key (k = 0: any key) is not finite.
template <typename Bits>
bool SelectExact(const Request<Bits>& request);

extern template bool SelectExact(const Request<uint16_t>&);
extern template bool SelectExact(const Request<uint32_t>&);
extern template bool SelectExact(const Request<uint64_t>&);

}  // namespace hvd_ext::topk

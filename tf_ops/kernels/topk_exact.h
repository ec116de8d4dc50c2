// The exact selection: a sample gives bounds, one pass collects candidates, and T is selected among the candidates.
//
// Lanes are parts of the segments of about equal length, one for each thread; a piece is the part of one segment in one
// lane. Candidates are the elements of a piece that may be picked, ascending by place. Whatever the bounds are, the
// candidates of all pieces of a segment either include every pick, or they are fewer than k and the segment is scanned
// again without a bound.
#pragma once

#include "kernels/topk_memory.h"

namespace hvd_ext::topk {

template <typename Bits>
struct Request {
  const Bits* x;                  // with a feedback: the array that receives the accumulated gradient
  const ErrorFeedback* feedback;  // or null
  Bits infinity;                  // keys >= this are not finite
  const TopKSegment* segments;
  int64_t n_segments;
  const ParallelFor* parallel_for;
  Lanes<Bits>* memory;
  Picks<Bits> picks;
};

// Writes the k picks of every segment. Returns whether a picked key, or any key of a segment with k = 0, is not finite.
template <typename Bits>
bool SelectExact(const Request<Bits>& request);

extern template bool SelectExact(const Request<uint16_t>&);
extern template bool SelectExact(const Request<uint32_t>&);
extern template bool SelectExact(const Request<uint64_t>&);

}  // namespace hvd_ext::topk

// The loops of topk_scan.h in plain C++. The files with vector loops use them for the elements that do not fill a
// vector, and for elements for which their processor has no instructions. Each file compiles them for its own
// instruction set: it includes this file behind its target, and all other headers in front of it.
#pragma once

#include "kernels/half.h"
#include "kernels/topk_scan.h"

namespace hvd_ext::topk {
namespace {

// Continues a scan at element `i`, with `count` ids found before it.
template <typename Bits>
HVD_EXT_ALWAYS int64_t ScanRest(const Bits* x, int64_t i, int64_t elements, Bits bound, uint16_t* ids, int64_t count) {
  for (; i < elements; ++i) {
    ids[count] = static_cast<uint16_t>(i);
    count += KeyOf(x[i]) >= bound;
  }
  return count;
}

template <typename Bits>
HVD_EXT_ALWAYS int64_t BetweenRest(const Bits* bits, int64_t i, int64_t count, Bits low, Bits high, Bits* to,
                                   int64_t found, int64_t* above) {
  for (; i < count; ++i) {
    const Bits key = KeyOf(bits[i]);
    to[found] = key;
    found += key >= low && key < high;
    *above += key >= high;
  }
  return found;
}

template <typename Bits>
HVD_EXT_ALWAYS int64_t EmitRest(Candidates<Bits> from, int64_t i, int64_t count, Bits bound, int64_t* ties,
                                int64_t base, Picks<Bits> picks, int64_t at, int64_t end, Bits* greatest) {
  for (; i < count && at < end; ++i) {
    const Bits key = KeyOf(from.bits[i]);
    *greatest = key > *greatest ? key : *greatest;
    const bool tie = key == bound && *ties > 0;
    Put(picks, at, base + from.places[i], from.bits[i]);  // overwritten if it is not picked
    at += key > bound || tie;
    *ties -= tie;
  }
  return at;
}

HVD_EXT_ALWAYS int64_t FeedbackRest(const ErrorFeedback& f, int64_t i, int64_t elements, uint32_t bound, uint32_t place,
                                    Candidates<uint32_t> to, int64_t count) {
  for (; i < elements; ++i) {
    const float a = Accumulated(f, i);
    const bool hit = KeyOf(BitsOf(a)) >= bound;
    f.next_residual[i] = hit ? 0 : a;
    to.bits[count] = BitsOf(a);
    to.places[count] = place + static_cast<uint32_t>(i);
    count += hit;
  }
  return count;
}

HVD_EXT_ALWAYS void AccumulateRest(const ErrorFeedback& f, int64_t i, int64_t elements, float* accumulated) {
  for (; i < elements; ++i) {
    accumulated[i] = Accumulated(f, i);
    f.next_residual[i] = 0;
  }
}

template <typename Bits>
void AppendEach(const Bits* x, uint16_t* ids, int64_t count, uint32_t place, Candidates<Bits> to) {
  for (int64_t i = 0; i < count; ++i) {
    to.bits[i] = x[ids[i]];
    to.places[i] = place + ids[i];
  }
}

template <typename Bits>
int64_t BetweenEach(const Bits* bits, int64_t count, Bits low, Bits high, Bits* to, int64_t* above) {
  return BetweenRest(bits, int64_t{0}, count, low, high, to, int64_t{0}, above);
}

template <typename Bits>
int64_t EmitEach(Candidates<Bits> from, int64_t count, Bits bound, int64_t* ties, int64_t base, Picks<Bits> picks,
                 int64_t at, int64_t end, Bits* greatest) {
  return EmitRest(from, int64_t{0}, count, bound, ties, base, picks, at, end, greatest);
}

}  // namespace
}  // namespace hvd_ext::topk

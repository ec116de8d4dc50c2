#include "kernels/topk.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "kernels/topk_exact.h"
#include "kernels/topk_others.h"
#include "kernels/topk_sample.h"

namespace hvd_ext {

TopKScratch::TopKScratch() : memory_(new Memory) {}
TopKScratch::~TopKScratch() = default;
TopKScratch::TopKScratch(TopKScratch&&) noexcept = default;
TopKScratch& TopKScratch::operator=(TopKScratch&&) noexcept = default;

int64_t TopKScratch::bytes() const {
  return memory_->lanes16.bytes() + memory_->lanes32.bytes() + memory_->lanes64.bytes() + memory_->words.bytes();
}

namespace {

using topk::AsBFloat16;
using topk::AsFloat16;
using topk::AsFloat32;
using topk::AsFloat64;

struct Call {
  const TopKOptions& options;
  const TopKSegment* segments;
  int64_t n_segments;
  TopKScratch::Memory* memory;
  const ParallelFor& parallel_for;
  int64_t* counts;
  void* indices;
  bool wide;
};

template <typename As>
int64_t SelectOther(const Call& call, const topk::Part<typename As::Bits>& part, typename As::Bits* greatest) {
  switch (call.options.selector) {
    case Selector::kMSTopK:
      return topk::SelectMSTopK<As>(part, call.options.samplings, greatest);
    case Selector::kDgc:
      return topk::SelectDgc<As>(part, greatest);
    case Selector::kThreshold:
      return topk::SelectFrom(part, topk::BoundOf<As>(call.options.threshold), greatest);
    case Selector::kRandom:
      return topk::SelectRandom(part, greatest);
    case Selector::kExact:
      break;
  }
  std::fprintf(stderr, "hvd_ext: selector %d: a bug, callers must refuse it\n",
               static_cast<int>(call.options.selector));
  std::abort();
}

// Runs a selector other than kExact, on the calling thread.
template <typename As>
bool SelectOthers(const Call& call, const typename As::Bits* x, typename As::Bits* values) {
  using Bits = typename As::Bits;
  const topk::Picks<Bits> picks{call.indices, values, call.wide};
  int64_t at = 0;
  Bits greatest = 0;
  for (int64_t s = 0; s < call.n_segments; ++s) {
    const TopKSegment& segment = call.segments[s];
    const Bits* first = x + segment.begin;
    call.counts[s] = 0;
    if (segment.k == 0) {
      if (topk::CountFrom(first, segment.elements, As::kInfinity) > 0) greatest = As::kInfinity;
      continue;
    }
    const uint64_t seed = topk::Mixed(call.options.seed) + static_cast<uint64_t>(s);
    call.counts[s] = SelectOther<As>(
        call, {first, segment.begin, segment.elements, segment.k, seed, picks, at, &call.memory->words}, &greatest);
    at += segment.k;
  }
  return greatest >= As::kInfinity;
}

template <typename As>
bool Select(const Call& call, const void* x, const ErrorFeedback* feedback, void* values) {
  using Bits = typename As::Bits;
  const Bits* bits = static_cast<const Bits*>(x);
  Bits* to = static_cast<Bits*>(values);
  if (call.options.selector != Selector::kExact) return SelectOthers<As>(call, bits, to);
  for (int64_t s = 0; s < call.n_segments; ++s) call.counts[s] = call.segments[s].k;
  return topk::SelectExact<Bits>({bits,
                                  feedback,
                                  As::kInfinity,
                                  call.segments,
                                  call.n_segments,
                                  &call.parallel_for,
                                  call.memory->lanes<Bits>(),
                                  {call.indices, to, call.wide}});
}

// Runs body(begin, elements) for each block of [0, elements).
template <typename Body>
void OverBlocks(const ParallelFor& parallel_for, int64_t elements, const Body& body) {
  constexpr int64_t kUnit = 16 * topk::kBlock;
  auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kUnit; i < std::min(elements, end * kUnit); i += topk::kBlock) {
      body(i, std::min(topk::kBlock, elements - i));
    }
  };
  const int64_t units = (elements + kUnit - 1) / kUnit;
  if (parallel_for == nullptr || units < 2) return run(0, units);
  parallel_for(units, kUnit / 2, run);
}

}  // namespace

void TopK(const TopKOptions& options, DType dtype, const void* x, const TopKSegment* segments, int64_t n_segments,
          TopKScratch* scratch, const ParallelFor& parallel_for, int64_t* counts, void* indices, bool wide,
          void* values, bool* non_finite) {
  const Call call{options, segments, n_segments, scratch->memory(), parallel_for, counts, indices, wide};
  switch (dtype) {
    case DType::kFloat32:
      *non_finite = Select<AsFloat32>(call, x, nullptr, values);
      return;
    case DType::kFloat64:
      *non_finite = Select<AsFloat64>(call, x, nullptr, values);
      return;
    case DType::kFloat16:
      *non_finite = Select<AsFloat16>(call, x, nullptr, values);
      return;
    case DType::kBFloat16:
      *non_finite = Select<AsBFloat16>(call, x, nullptr, values);
      return;
    default:
      std::fprintf(stderr, "hvd_ext: TopK of dtype %s: a bug, callers must refuse it\n", NameOf(dtype));
      std::abort();
  }
}

void TopKErrorFeedback(const TopKOptions& options, const ErrorFeedback& feedback, const TopKSegment* segments,
                       int64_t n_segments, TopKScratch* scratch, const ParallelFor& parallel_for, int64_t* counts,
                       void* indices, bool wide, float* values, bool* non_finite) {
  const Call call{options, segments, n_segments, scratch->memory(), parallel_for, counts, indices, wide};
  if (options.selector == Selector::kExact) {
    *non_finite = Select<AsFloat32>(call, feedback.next_residual, &feedback, values);
    return;
  }
  const topk::FeedbackLoops& loops = topk::FeedbackLoopsOf(topk::CurrentPath());
  std::atomic<bool> seen{false};
  for (int64_t s = 0; s < n_segments; ++s) {
    OverBlocks(parallel_for, segments[s].elements, [&](int64_t begin, int64_t elements) {
      const ErrorFeedback block = topk::From(feedback, segments[s].begin + begin);
      uint32_t bits[topk::kSpare], places[topk::kSpare];  // the bound is above every key: no candidates
      loops.scan(block, elements, topk::kAbove<uint32_t>, 0, {bits, places});
      const uint32_t* sums = reinterpret_cast<const uint32_t*>(block.next_residual);
      if (topk::CountFrom(sums, elements, AsFloat32::kInfinity) > 0) seen = true;
    });
  }
  Select<AsFloat32>(call, feedback.next_residual, nullptr, values);
  *non_finite = seen;
  int64_t first = 0;
  for (int64_t s = 0; s < n_segments; ++s) {
    for (int64_t i = first; i < first + counts[s]; ++i) {
      const int64_t index = wide ? static_cast<int64_t*>(indices)[i] : static_cast<int32_t*>(indices)[i];
      feedback.next_residual[index] = 0;
      if (feedback.velocity != nullptr && feedback.correction.masks) feedback.next_velocity[index] = 0;
    }
    first += segments[s].k;
  }
}

void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated, const ParallelFor& parallel_for) {
  const topk::FeedbackLoops& loops = topk::FeedbackLoopsOf(topk::CurrentPath());
  OverBlocks(parallel_for, elements, [&](int64_t begin, int64_t count) {
    loops.accumulate(topk::From(feedback, begin), count, accumulated + begin);
  });
}

}  // namespace hvd_ext

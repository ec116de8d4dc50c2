#include "kernels/topk.h"

#include <algorithm>
#include <atomic>

#include "kernels/dtypes.h"
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

template <typename T>
bool Select(const Call& call, const void* x, const ErrorFeedback* feedback, void* values) {
  using Bits = typename topk::As<T>::Bits;
  const Bits* bits = static_cast<const Bits*>(x);
  const topk::Picks<Bits> picks{call.indices, static_cast<Bits*>(values), call.wide};
  if (call.options.selector != Selector::kExact) {
    return topk::SelectOthers<T>(call.options, bits, call.segments, call.n_segments, &call.memory->words, call.counts,
                                 picks);
  }
  for (int64_t s = 0; s < call.n_segments; ++s) call.counts[s] = call.segments[s].k;
  return topk::SelectExact<Bits>({bits, feedback, topk::As<T>::kInfinity, call.segments, call.n_segments,
                                  &call.parallel_for, call.memory->lanes<Bits>(), picks});
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
  WithFloat("TopK of dtype", dtype, [&](auto zero) { *non_finite = Select<decltype(zero)>(call, x, nullptr, values); });
}

void TopKErrorFeedback(const TopKOptions& options, const ErrorFeedback& feedback, const TopKSegment* segments,
                       int64_t n_segments, TopKScratch* scratch, const ParallelFor& parallel_for, int64_t* counts,
                       void* indices, bool wide, float* values, bool* non_finite) {
  const Call call{options, segments, n_segments, scratch->memory(), parallel_for, counts, indices, wide};
  if (options.selector == Selector::kExact) {
    *non_finite = Select<float>(call, feedback.next_residual, &feedback, values);
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
      if (topk::CountFrom(sums, elements, topk::As<float>::kInfinity) > 0) seen = true;
    });
  }
  Select<float>(call, feedback.next_residual, nullptr, values);
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

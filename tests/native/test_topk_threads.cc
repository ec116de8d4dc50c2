// Selections and steps of error feedback on threads: their number does not show in the answer.
#include "parallel.h"
#include "topk_inputs.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kElements = 540003;  // so many that kernels divide the work

TEST("top-k: the number of threads does not show in the answer") {
  TopKScratch scratch;
  for (const char* name : {"constant", "the tail"}) {
    if (IsSanitized() && name == std::string("constant")) continue;
    const std::vector<uint32_t> x = Input(kFloat32, name, kElements);
    for (topk::Misled misled : {topk::Misled::kNot, topk::Misled::kLow, topk::Misled::kHigh}) {
      for (int64_t k : {kElements / 1000, kElements / 2}) {
        if (IsSanitized() && misled != topk::Misled::kNot && k == kElements / 2) continue;
        const With with(topk::BestPath(), misled);
        const std::vector<TopKSegment> segments = {{0, kElements, k}};
        const auto alone = Run({}, kFloat32, x.data(), segments, nullptr, false, &scratch);
        int64_t last = alone.indices[0];
        for (int64_t i : alone.indices) last = Before(x, last, i) ? i : last;
        int64_t better = 0;  // nothing that is left out comes before the last pick
        for (int64_t i = 0; i < kElements; ++i) better += Before(x, i, last);
        CHECK_EQ(better, k - 1);
        const auto picked = Run({}, kFloat32, x.data(), segments, Threads(3), true, &scratch);
        CHECK(picked.indices == alone.indices);
        CHECK(picked.values == alone.values);
      }
    }
  }
}

TEST("top-k: segments that threads divide keep apart, with every selector") {
  const std::vector<uint32_t> x = Input(kFloat32, "layers", kElements + 100);
  const std::vector<TopKSegment> segments = {
      {3, 64, 1}, {70, 270000, 270}, {270070, 5000, 2500}, {275080, 264999, 2650}, {540079, 2, 1}};
  for (Selector selector :
       {Selector::kExact, Selector::kMSTopK, Selector::kDgc, Selector::kThreshold, Selector::kRandom}) {
    TopKOptions options;
    options.selector = selector;
    options.threshold = 2;
    TopKScratch scratch;
    const auto alone = Run(options, kFloat32, x.data(), segments, nullptr, true, &scratch);
    const auto picked = Run(options, kFloat32, x.data(), segments, Threads(2), true, &scratch);
    CHECK(picked.counts == alone.counts);
    CHECK(picked.indices == alone.indices);
    CHECK(picked.values == alone.values);
  }
}

struct Step {
  FeedbackState state;
  std::vector<float> values;
  std::vector<int64_t> indices;
};

Step On(const ParallelFor& parallel_for, FeedbackState state, int64_t k, bool dense) {
  Step step{std::move(state), std::vector<float>(static_cast<size_t>(k)), std::vector<int64_t>(static_cast<size_t>(k))};
  const ErrorFeedback feedback = step.state.InPlace();
  TopKScratch scratch;
  const TopKSegment segment{0, kElements, k};
  int64_t count = 0;
  bool non_finite = false;
  if (dense) Accumulate(feedback, kElements, step.state.gradient.data(), parallel_for);
  if (!dense) {
    TopKErrorFeedback({}, feedback, &segment, 1, &scratch, parallel_for, &count, step.indices.data(), true,
                      step.values.data(), &non_finite);
  }
  return step;
}

TEST("error feedback: the number of threads does not show in a step, sparse or dense") {
  using topk::Misled;
  for (auto [k, misled] : {std::pair(900, Misled::kNot), std::pair(200000, Misled::kNot), std::pair(900, Misled::kHigh),
                           std::pair(900, Misled::kLow)}) {
    const With with(topk::BestPath(), misled);
    const FeedbackState first = RandomState(kElements, true);
    for (bool dense : {false, true}) {
      const Step alone = On(nullptr, first, k, dense), threads = On(Threads(3), first, k, dense);
      CHECK(threads.state.gradient == alone.state.gradient && threads.state.residual == alone.state.residual);
      CHECK(threads.state.velocity == alone.state.velocity);
      CHECK(threads.values == alone.values && threads.indices == alone.indices);
    }
  }
}

}  // namespace
}  // namespace hvd_ext::test

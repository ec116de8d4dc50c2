// Error feedback against its definition: the picks and the residual, in place and in separate memory, with and without
// momentum.
#include "topk_inputs.h"

namespace hvd_ext::test {
namespace {

using State = FeedbackState;

struct After {
  std::vector<uint32_t> accumulated;
  std::vector<float> velocity;
};

After Expected(const State& state) {
  After after;
  for (size_t i = 0; i < state.gradient.size(); ++i) {
    float add = state.gradient[i];
    if (!state.velocity.empty()) {
      const float scaled = state.correction.momentum * state.velocity[i];
      const float velocity = scaled + state.gradient[i];
      const float ahead = state.correction.momentum * velocity;
      after.velocity.push_back(velocity);
      add = state.correction.nesterov ? state.gradient[i] + ahead : velocity;
    }
    after.accumulated.push_back(BitsOf(state.residual[i] + add));
  }
  return after;
}

// Runs one step on a copy and compares everything with the definition.
void StepIsRight(const State& state, const std::vector<TopKSegment>& segments, const TopKOptions& options,
                 bool in_place, TopKScratch* scratch) {
  State now = state;
  const int64_t elements = static_cast<int64_t>(state.gradient.size());
  std::vector<float> other_residual(state.gradient.size(), 77), other_velocity(state.velocity.size(), 77);
  ErrorFeedback feedback = now.InPlace();
  if (!in_place) {
    feedback.next_residual = other_residual.data();
    feedback.next_velocity = other_velocity.data();
  }
  const int64_t picks = SumOfK(segments);
  Guarded<int64_t> indices(picks), counts(static_cast<int64_t>(segments.size()));
  Guarded<float> values(picks);
  bool non_finite = true;
  TopKErrorFeedback(options, feedback, segments.data(), static_cast<int64_t>(segments.size()), scratch, nullptr,
                    counts.data(), indices.data(), true, values.data(), &non_finite);
  CHECK(!non_finite);
  After expected = Expected(state);
  std::vector<bool> inside(state.gradient.size(), false);
  int64_t at = 0;
  const std::vector<int64_t> seen = indices.Checked();
  for (size_t s = 0; s < segments.size(); ++s) {
    const TopKSegment& segment = segments[s];
    for (int64_t i = segment.begin; i < segment.begin + segment.elements; ++i) inside[static_cast<size_t>(i)] = true;
    std::vector<int64_t> picked(seen.begin() + at, seen.begin() + at + counts.data()[s]);
    if (options.selector == Selector::kExact) CHECK(picked == Best(expected.accumulated, segment));
    for (size_t i = 0; i < picked.size(); ++i) {
      const size_t index = static_cast<size_t>(picked[i]);
      CHECK(inside[index]);
      CHECK_EQ(BitsOf(values.data()[at + static_cast<int64_t>(i)]), expected.accumulated[index]);
      expected.accumulated[index] = 0;
      if (!state.velocity.empty() && state.correction.masks) expected.velocity[index] = 0;
    }
    at += segment.k;
  }
  for (int64_t i = 0; i < elements; ++i) {
    const size_t j = static_cast<size_t>(i);
    const float untouched = in_place ? state.residual[j] : 77;
    CHECK_EQ(BitsOf(feedback.next_residual[i]), inside[j] ? expected.accumulated[j] : BitsOf(untouched));
    if (!state.velocity.empty() && inside[j]) {
      CHECK_EQ(BitsOf(feedback.next_velocity[i]), BitsOf(expected.velocity[j]));
    }
    if (!in_place) CHECK_EQ(BitsOf(now.residual[j]), BitsOf(state.residual[j]));
  }
}

TEST("error feedback: the step is that of the definition, on every path") {
  TopKScratch scratch;
  for (int kind = 0; kind < 4; ++kind) {
    State state = RandomState(20011, kind > 0);
    state.correction.nesterov = kind == 2;
    state.correction.masks = kind != 3;
    for (topk::Path path : Paths()) {
      const With with(path);
      for (int64_t k : {0, 1, 20, 200, 4000, 10000, 20011}) {
        StepIsRight(state, {{0, 20011, k}}, {}, k % 200 == 0, &scratch);
      }
    }
  }
}

TEST("error feedback: short runs, segments, and what lies between them") {
  TopKScratch scratch;
  for (int64_t elements : {1, 15, 16, 33, 100, 700}) {
    for (topk::Path path : Paths()) {
      const With with(path);
      StepIsRight(RandomState(elements, true), {{0, elements, elements / 3}}, {}, true, &scratch);
    }
  }
  const State state = RandomState(30000, true);
  for (bool in_place : {false, true}) {
    StepIsRight(state, {{5, 100, 3}, {200, 9000, 0}, {9300, 9001, 9000}, {20000, 10000, 100}}, {}, in_place, &scratch);
  }
}

TEST("error feedback: nothing is lost when the sample misleads") {
  TopKScratch scratch;
  const State state = RandomState(60011, true);
  for (topk::Misled misled : {topk::Misled::kHigh, topk::Misled::kLow}) {
    const With with(topk::BestPath(), misled);
    for (bool in_place : {false, true}) StepIsRight(state, {{0, 60011, 60}}, {}, in_place, &scratch);
  }
}

TEST("error feedback: works with every selector") {
  TopKScratch scratch;
  const State state = RandomState(20011, true);
  for (Selector selector : {Selector::kMSTopK, Selector::kDgc, Selector::kThreshold, Selector::kRandom}) {
    TopKOptions options;
    options.selector = selector;
    options.threshold = 2;
    StepIsRight(state, {{0, 10000, 100}, {10000, 10011, 0}}, options, true, &scratch);
    StepIsRight(state, {{0, 20011, 200}}, options, false, &scratch);
  }
}

TEST("error feedback: what is not finite is reported, with k = 0 too") {
  for (int64_t k : {0, 5}) {
    for (Selector selector : {Selector::kExact, Selector::kRandom}) {
      State state = RandomState(9000, false);
      state.gradient[8999] = INFINITY;
      TopKScratch scratch;
      TopKOptions options;
      options.selector = selector;
      const TopKSegment segment{0, 9000, k};
      int64_t count = 0, indices[5];
      float values[5];
      bool non_finite = false;
      TopKErrorFeedback(options, state.InPlace(), &segment, 1, &scratch, nullptr, &count, indices, true, values,
                        &non_finite);
      CHECK(non_finite);
    }
  }
}

TEST("error feedback: a dense step hands over everything") {
  for (int kind = 0; kind < 3; ++kind) {
    State state = RandomState(40011, kind > 0);
    state.correction.nesterov = kind == 2;
    const After expected = Expected(state);
    for (topk::Path path : Paths()) {
      const With with(path);
      State now = state;
      Accumulate(now.InPlace(), 40011, now.gradient.data(), nullptr);
      for (size_t i = 0; i < now.gradient.size(); ++i) {
        CHECK_EQ(BitsOf(now.gradient[i]), expected.accumulated[i]);
        CHECK_EQ(BitsOf(now.residual[i]), 0u);
        if (kind > 0) CHECK_EQ(BitsOf(now.velocity[i]), BitsOf(expected.velocity[i]));
      }
    }
  }
}

}  // namespace
}  // namespace hvd_ext::test

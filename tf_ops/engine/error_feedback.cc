#include "engine/error_feedback.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace hvd_ext {

int64_t EntriesOf(double density, int64_t elements) {
  return static_cast<int64_t>(std::floor(density * static_cast<double>(elements) + 0.5));
}

FeedbackShard ShardOf(const Plan& plan, int64_t elements) {
  if (plan.feedback_count == 0) return {};
  const int64_t begin = UnitBegin(plan.feedback_begin, plan.units, elements);
  return {begin, UnitBegin(plan.feedback_begin + plan.feedback_count, plan.units, elements) - begin};
}

Feedback::Feedback(const SparseSpec& spec, const FeedbackShard& shard, const std::vector<int64_t>& tensor_begins)
    : spec_(spec), shard_(shard) {
  const size_t elements = static_cast<size_t>(shard.elements);
  residual_.resize(elements);
  next_residual_.resize(elements);
  if (spec.has_momentum) {
    velocity_.resize(elements);
    next_velocity_.resize(elements);
  }
  const int64_t end = shard.begin + shard.elements;
  cuts_.push_back(shard.begin);
  for (int64_t begin : tensor_begins) {
    if (spec.per_tensor && begin > cuts_.back() && begin < end) cuts_.push_back(begin);
  }
  cuts_.push_back(end);
}

void Feedback::Commit() {
  residual_.swap(next_residual_);
  velocity_.swap(next_velocity_);
}

std::vector<float>* Feedback::Get(FeedbackArray which) {
  return which == FeedbackArray::kResidual ? &residual_ : &velocity_;
}

bool Feedback::Enter() { return !std::exchange(used_, true); }

// Rounding can turn two products that differ by almost 1 into two whole numbers that differ by 2, hence the minimum.
int64_t Feedback::EntriesIn(double density, size_t segment) const {
  const int64_t begin = cuts_[segment], end = cuts_[segment + 1];
  return std::min(EntriesOf(density, end) - EntriesOf(density, begin), end - begin);
}

int64_t Feedback::EntriesAt(double density) const {
  int64_t entries = 0;
  for (size_t i = 0; i + 1 < cuts_.size(); ++i) entries += EntriesIn(density, i);
  return entries;
}

ErrorFeedback Feedback::Arrays(const TopKStep& step, const float* units) {
  ErrorFeedback arrays{units, residual_.data(), next_residual_.data()};
  if (!spec_.has_momentum) return arrays;
  arrays.velocity = velocity_.data();
  arrays.next_velocity = next_velocity_.data();
  arrays.correction = {step.momentum.value_or(spec_.momentum), spec_.nesterov, spec_.masks};
  return arrays;
}

void Feedback::Fold(const TopKStep& step, float* units) {
  Accumulate(Arrays(step, units), shard_.elements, units, nullptr);
}

void Feedback::Return(int64_t element, int64_t count, const float* values) {
  float* residual = next_residual_.data() + (element - shard_.begin);
  for (int64_t i = 0; i < count; ++i) residual[i] += values[i];
}

}  // namespace hvd_ext

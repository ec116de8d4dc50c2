#include "engine/error_feedback.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

namespace hvd_ext {
namespace {

constexpr int64_t kNbytes = static_cast<int64_t>(sizeof(float));
constexpr int64_t kPiece = 1 << 18;  // elements that are copied at once

float* Floats(const Buffer& array) { return reinterpret_cast<float*>(array.data()); }

// Waits for what is queued now.
void Await(Queue* queue) {
  const int64_t last = queue->Last();
  while (!queue->Done(last)) std::this_thread::yield();
}

}  // namespace

int64_t EntriesOf(double density, int64_t elements) {
  return static_cast<int64_t>(std::floor(density * static_cast<double>(elements) + 0.5));
}

FeedbackShard ShardOf(const Plan& plan, int64_t elements) {
  if (plan.feedback_count == 0) return {};
  const int64_t begin = UnitBegin(plan.feedback_begin, plan.units, elements);
  return {begin, UnitBegin(plan.feedback_begin + plan.feedback_count, plan.units, elements) - begin};
}

bool KeepsFeedback(const Device& device, const SparseSpec& spec, const Plan& plan) {
  if (device.IsHost()) return true;
  if (spec.codec != "topk" || !device.Selects(spec.selector)) return false;
  return std::none_of(plan.rows.begin(), plan.rows.end(),
                      [](const Row& row) { return row.opcode == Opcode::MERGE || row.opcode == Opcode::RESELECT; });
}

Feedback::Feedback(const SparseSpec& spec, const FeedbackShard& shard, const std::vector<int64_t>& tensor_begins,
                   std::shared_ptr<Device> device)
    : spec_(spec), shard_(shard), device_(std::move(device)), pool_(BufferPool::Of(device_)) {
  residual_ = ArrayOf(nullptr);
  next_residual_ = ArrayOf(nullptr);
  if (spec.has_momentum) {
    velocity_ = ArrayOf(nullptr);
    next_velocity_ = ArrayOf(nullptr);
  }
  const int64_t end = shard.begin + shard.elements;
  cuts_.push_back(shard.begin);
  for (int64_t begin : tensor_begins) {
    if (spec.per_tensor && begin > cuts_.back() && begin < end) cuts_.push_back(begin);
  }
  cuts_.push_back(end);
}

void Feedback::Commit() {
  std::swap(residual_, next_residual_);
  std::swap(velocity_, next_velocity_);
}

Buffer* Feedback::Get(FeedbackArray which) { return which == FeedbackArray::kResidual ? &residual_ : &velocity_; }

Buffer Feedback::ArrayOf(const float* values) {
  Buffer array = pool_.Take(shard_.elements * kNbytes);
  Queue* queue = device_->inputs();
  if (values == nullptr) {
    queue->Clear(array.data(), array.nbytes());
    Await(queue);
  } else {
    InPieces([&](int64_t at, int64_t count, float* message) {
      std::copy(values + at, values + at + count, message);
      queue->Copy(array.data() + at * kNbytes, message, count * kNbytes);
      Await(queue);
    });
  }
  return array;
}

void Feedback::Read(const Buffer& array, float* to) const {
  Queue* queue = device_->inputs();
  InPieces([&](int64_t at, int64_t count, float* message) {
    queue->Copy(message, array.data() + at * kNbytes, count * kNbytes);
    Await(queue);
    std::copy(message, message + count, to + at);
  });
}

// Calls body(first element, elements, a message for them).
template <typename Body>
void Feedback::InPieces(const Body& body) const {
  BufferPool messages(nullptr, device_);
  for (int64_t at = 0; at < shard_.elements; at += kPiece) {
    const int64_t count = std::min(kPiece, shard_.elements - at);
    const Buffer message = messages.Take(count * kNbytes);
    body(at, count, reinterpret_cast<float*>(message.data()));
  }
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
  ErrorFeedback arrays{units, Floats(residual_), Floats(next_residual_)};
  if (!spec_.has_momentum) return arrays;
  arrays.velocity = Floats(velocity_);
  arrays.next_velocity = Floats(next_velocity_);
  arrays.correction = {step.momentum.value_or(spec_.momentum), spec_.nesterov, spec_.masks};
  return arrays;
}

void Feedback::Fold(Queue* queue, const TopKStep& step, float* units) {
  queue->Accumulate(Arrays(step, units), shard_.elements, units);
}

void Feedback::Return(Queue* queue, const int32_t* positions, const float* values, int64_t count) {
  queue->AddEntries(Floats(next_residual_), shard_.elements, shard_.begin, positions, values, count);
}

void Feedback::Return(int64_t element, int64_t count, const float* values) {
  float* residual = Floats(next_residual_) + (element - shard_.begin);
  for (int64_t i = 0; i < count; ++i) residual[i] += values[i];
}

}  // namespace hvd_ext

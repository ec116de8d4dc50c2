// The sparse buckets of a channel: the end of a step, which commits it, and the residuals that a checkpoint reads.
#include <algorithm>
#include <utility>

#include "engine/channel.h"

namespace hvd_ext {

Status Channel::CheckTopK(const std::optional<TopKStep>& topk) const {
  if (topk.has_value() != has_density_) {
    return Invalid("channel " + Quoted(name_) +
                   (has_density_ ? " was opened with sparse buckets: its steps begin with begin_topk_step"
                                 : " has no sparse bucket: its steps begin with begin_step"));
  }
  if (!topk) return Status::Ok();
  const std::string where = "step of " + Quoted(name_);
  if (!(topk->density >= 0 && topk->density <= 1)) {
    return Invalid(where + ": density (" + std::to_string(topk->density) + ") must be in [0, 1]");
  }
  if (topk->momentum && !(*topk->momentum >= 0 && *topk->momentum < 1)) {
    return Invalid(where + ": momentum (" + std::to_string(*topk->momentum) + ") must be in [0, 1)");
  }
  return Status::Ok();
}

void Channel::DropOpenStep() {
  if (topk_step_) ++dropped_;
  topk_step_ = false;
}

Status Channel::EndStep(bool commit) {
  MutexLock state_lock(&state_mutex_);
  MutexLock lock(&mutex_);
  if (!topk_step_) {
    return Invalid("end of a step of " + Quoted(name_) +
                   ": no top-k step is under way; begin one with begin_topk_step");
  }
  if (!commit) {
    DropOpenStep();
    return Status::Ok();
  }
  if (!failure_.ok()) return failure_;
  const ChannelStep& step = *current_;
  int64_t well = 0;
  for (const ChannelStep::Bucket& bucket : step.buckets) well += bucket.ended && bucket.status.ok();
  if (well < static_cast<int64_t>(step.buckets.size())) {
    return Invalid("end of step " + std::to_string(step.number) + " of " + Quoted(name_) +
                   ": all its buckets must have ended before it is committed, " + std::to_string(well) + " of " +
                   std::to_string(step.buckets.size()) + " have; collect its tensors first, or drop the step");
  }
  for (const BucketState& state : *step.states) {
    if (state.feedback != nullptr) state.feedback->Commit();
  }
  ++committed_;
  place_.committed = true;
  topk_step_ = false;
  return Status::Ok();
}

Status Channel::FindFeedback(int64_t bucket, Feedback** feedback) const {
  const int64_t buckets = static_cast<int64_t>(states_->size());
  if (bucket < 0 || bucket >= buckets) {
    return Invalid("bucket (" + std::to_string(bucket) + ") of " + Quoted(name_) + " must be in [0, " +
                   std::to_string(buckets) + ")");
  }
  *feedback = (*states_)[static_cast<size_t>(bucket)].feedback.get();
  if (*feedback != nullptr) return Status::Ok();
  return Invalid("bucket " + std::to_string(bucket) + " of " + Quoted(name_) + " is not sparse: it has no residual");
}

Status Channel::GetFeedback(int64_t bucket, FeedbackShard* shard) const {
  MutexLock lock(&mutex_);
  Feedback* feedback = nullptr;
  HVD_EXT_RETURN_IF_ERROR(FindFeedback(bucket, &feedback));
  *shard = feedback->shard();
  shard->has_velocity = feedback->spec().has_momentum;
  return Status::Ok();
}

Status Channel::FindArray(int64_t bucket, FeedbackArray which, Feedback** feedback) const {
  HVD_EXT_RETURN_IF_ERROR(FindFeedback(bucket, feedback));
  const std::string where = "state of bucket " + std::to_string(bucket) + " of " + Quoted(name_);
  if (topk_step_ || (*states_)[static_cast<size_t>(bucket)].running > 0) {
    return Invalid(where + ": a step is under way; end it first");
  }
  if (which != FeedbackArray::kResidual && which != FeedbackArray::kVelocity) {
    return Invalid(where + ": which (" + std::to_string(static_cast<int>(which)) +
                   ") must be the residual (0) or the velocity (1)");
  }
  if (which == FeedbackArray::kVelocity && !(*feedback)->spec().has_momentum) {
    return Invalid(where + ": it has no velocity, because it was opened without momentum");
  }
  return Status::Ok();
}

Status Channel::ReadFeedback(int64_t bucket, FeedbackArray which, float* to) {
  MutexLock state_lock(&state_mutex_);
  Feedback* feedback = nullptr;
  {
    MutexLock lock(&mutex_);
    HVD_EXT_RETURN_IF_ERROR(FindArray(bucket, which, &feedback));
  }
  // No step can begin, so none can commit another array.
  feedback->Read(*feedback->Get(which), to);
  return Status::Ok();
}

Status Channel::WriteFeedback(int64_t bucket, FeedbackArray which, const float* from) {
  MutexLock state_lock(&state_mutex_);
  Feedback* feedback = nullptr;
  {
    MutexLock lock(&mutex_);
    HVD_EXT_RETURN_IF_ERROR(FindArray(bucket, which, &feedback));
  }
  Buffer copied = feedback->ArrayOf(from);
  MutexLock lock(&mutex_);
  // Again: tensors of a step that was dropped may have come since, and their run reads the array.
  HVD_EXT_RETURN_IF_ERROR(FindArray(bucket, which, &feedback));
  std::swap(*feedback->Get(which), copied);
  return Status::Ok();
}

TopKStatistics Channel::GetTopKStatistics() const {
  MutexLock lock(&mutex_);
  return {counters_->entries,
          counters_->value_nbytes,
          counters_->index_nbytes,
          counters_->head_nbytes,
          committed_,
          dropped_};
}

std::shared_ptr<SparseRun> Channel::MakeSparseRun(const ChannelStep& step, int64_t bucket) const {
  const std::shared_ptr<Feedback>& feedback = (*step.states)[static_cast<size_t>(bucket)].feedback;
  if (feedback == nullptr) return nullptr;
  return std::make_shared<SparseRun>(feedback, step.topk, step.number, counters_);
}

}  // namespace hvd_ext

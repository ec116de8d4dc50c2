// Sparse buckets in the books of a channel: what their ranks keep, and the end of a step, which commits it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/channel.h"

namespace hvd_ext {
namespace {

std::string Quoted(const std::string& text) { return "'" + text + "'"; }

std::string Words(const KeptShard& shard) {
  return "[" + std::to_string(shard.begin) + ", " + std::to_string(shard.begin + shard.elements) + ")";
}

}  // namespace

Status Channel::CheckSparse(const std::string& where, const BucketSpec& bucket, int64_t elements) {
  const SparseSpec& sparse = *bucket.sparse;
  if (bucket.dtype != DType::kFloat32) {
    return Invalid(where + ": a sparse bucket must be of float32, it is of " + NameOf(bucket.dtype));
  }
  if (elements > std::numeric_limits<int32_t>::max()) {
    return Invalid(where + ": a sparse bucket must have less than 2^31 elements, it has " + std::to_string(elements) +
                   "; make the buckets smaller");
  }
  const int selector = static_cast<int>(sparse.selection.selector);
  if (selector < static_cast<int>(Selector::kExact) || selector > static_cast<int>(Selector::kRandom)) {
    return Invalid(where + ": selector (" + std::to_string(selector) + ") must be in [0, 4]");
  }
  if (sparse.selection.samplings < 1) {
    return Invalid(where + ": samplings (" + std::to_string(sparse.selection.samplings) + ") must be at least 1");
  }
  if (!(sparse.selection.threshold >= 0)) {
    return Invalid(where + ": threshold (" + std::to_string(sparse.selection.threshold) + ") must not be negative");
  }
  if (!(sparse.dense_above >= 0)) {
    return Invalid(where + ": dense_above (" + std::to_string(sparse.dense_above) + ") must not be negative");
  }
  if (sparse.momentum && !(*sparse.momentum >= 0 && *sparse.momentum < 1)) {
    return Invalid(where + ": momentum (" + std::to_string(*sparse.momentum) + ") must be in [0, 1)");
  }
  if (sparse.value_wire != DType::kFloat32 && !IsWire(sparse.value_wire)) {
    return Invalid(where + ": the selected values' dtype on the way (" +
                   std::to_string(static_cast<int>(sparse.value_wire)) +
                   ") must be float32, float16 or bfloat16 (0, 2 or 3)");
  }
  const int indices = static_cast<int>(sparse.indices);
  if (indices < 0 || indices > static_cast<int>(SparseIndices::kBitmap)) {
    return Invalid(where + ": indices (" + std::to_string(indices) + ") must be in [0, 3]");
  }
  return Status::Ok();
}

Status Channel::CheckPlans(const ChannelSpec& spec, const std::vector<std::shared_ptr<const Plan>>& plans,
                           const std::vector<std::shared_ptr<const Plan>>& dense_plans) {
  for (size_t i = 0; i < spec.buckets.size(); ++i) {
    const std::string where = "channel " + Quoted(spec.name) + ": bucket " + std::to_string(i);
    if (!spec.buckets[i].sparse) {
      if (!plans[i]->sparse) continue;
      return Invalid(where + ": its plan (" + std::to_string(spec.buckets[i].plan) +
                     ") is a sparse one, the bucket must be sparse too");
    }
    int64_t elements = 0;
    for (int64_t tensor : spec.buckets[i].tensors) elements += spec.elements[static_cast<size_t>(tensor)];
    const KeptShard shard = ShardOf(*plans[i], elements), folded = ShardOf(*dense_plans[i], elements);
    if (shard.begin != folded.begin || shard.elements != folded.elements) {
      return Invalid(where + ": its plan selects from the elements " + Words(shard) +
                     " of the bucket, its dense plan must fold the same; it folds " + Words(folded));
    }
  }
  return Status::Ok();
}

Status Channel::CheckDensity(std::optional<double> density) const {
  if (density.has_value() != has_sparse_) {
    return Invalid("channel " + Quoted(spec_.name) +
                   (has_sparse_ ? " has sparse buckets: its steps begin with begin_sparse_step"
                                : " has no sparse bucket: its steps begin with begin_step"));
  }
  if (density && !(*density >= 0 && *density <= 1)) {
    return Invalid("step of " + Quoted(spec_.name) + ": density (" + std::to_string(*density) + ") must be in [0, 1]");
  }
  return Status::Ok();
}

void Channel::DropOpenStep() {
  if (sparse_step_) ++dropped_;
  sparse_step_ = false;
}

Status Channel::EndStep(bool commit) {
  if (!sparse_step_) {
    return Invalid("end of a step of " + Quoted(spec_.name) +
                   ": no sparse step is under way; begin one with begin_sparse_step");
  }
  if (!commit) {
    DropOpenStep();
    return Status::Ok();
  }
  if (!failure_.ok()) return failure_;
  const ChannelStep& step = *steps_.back();
  int64_t well = 0;
  for (const ChannelStep::Bucket& bucket : step.buckets) well += bucket.ended && bucket.status.ok();
  if (well < static_cast<int64_t>(step.buckets.size())) {
    return Invalid("end of step " + std::to_string(step.number) + " of " + Quoted(spec_.name) +
                   ": all its buckets must have ended before it is committed, " + std::to_string(well) + " of " +
                   std::to_string(step.buckets.size()) + " have; collect its tensors first, or drop the step");
  }
  for (const std::shared_ptr<Feedback>& feedback : feedback_) {
    if (feedback != nullptr) feedback->Commit();
  }
  ++committed_;
  sparse_step_ = false;
  return Status::Ok();
}

Status Channel::FindFeedback(int64_t bucket, Feedback** feedback) const {
  const int64_t buckets = static_cast<int64_t>(feedback_.size());
  if (bucket < 0 || bucket >= buckets) {
    return Invalid("bucket (" + std::to_string(bucket) + ") of " + Quoted(spec_.name) + " must be in [0, " +
                   std::to_string(buckets) + ")");
  }
  *feedback = feedback_[static_cast<size_t>(bucket)].get();
  if (*feedback != nullptr) return Status::Ok();
  return Invalid("bucket " + std::to_string(bucket) + " of " + Quoted(spec_.name) +
                 " is not sparse: it keeps nothing from step to step");
}

Status Channel::GetKept(int64_t bucket, KeptShard* shard) const {
  Feedback* feedback = nullptr;
  HVD_EXT_RETURN_IF_ERROR(FindFeedback(bucket, &feedback));
  *shard = feedback->shard();
  shard->has_velocity = feedback->spec().momentum.has_value();
  return Status::Ok();
}

Status Channel::CopyKept(int64_t bucket, Kept which, float* to, const float* from) {
  Feedback* feedback = nullptr;
  HVD_EXT_RETURN_IF_ERROR(FindFeedback(bucket, &feedback));
  const std::string where = "what bucket " + std::to_string(bucket) + " of " + Quoted(spec_.name) + " keeps";
  if (sparse_step_ || running_[static_cast<size_t>(bucket)] > 0) {
    return Invalid(where + ": a step is under way; end it first");
  }
  if (which != Kept::kResidual && which != Kept::kVelocity) {
    return Invalid(where + ": which (" + std::to_string(static_cast<int>(which)) +
                   ") must be the residual (0) or the velocity (1)");
  }
  float* array = feedback->Get(which);
  const int64_t elements = feedback->shard().elements;
  if (which == Kept::kVelocity && !feedback->spec().momentum) {
    return Invalid(where + ": it has no velocity, for it was opened without momentum");
  }
  if (to != nullptr) std::copy_n(array, elements, to);
  if (from != nullptr) std::copy_n(from, elements, array);
  return Status::Ok();
}

SparseStatistics Channel::GetSparseStatistics() const {
  return {counters_->entries,
          counters_->value_nbytes,
          counters_->index_nbytes,
          counters_->head_nbytes,
          committed_,
          dropped_};
}

const std::shared_ptr<const Plan>& Channel::PlanOf(const ChannelStep& step, int64_t bucket) const {
  const size_t i = static_cast<size_t>(bucket);
  const std::optional<SparseSpec>& sparse = spec_.buckets[i].sparse;
  return sparse && step.density >= sparse->dense_above ? dense_plans_[i] : plans_[i];
}

std::shared_ptr<SparseRun> Channel::MakeRun(const ChannelStep& step, int64_t bucket) const {
  const std::shared_ptr<Feedback>& feedback = feedback_[static_cast<size_t>(bucket)];
  if (feedback == nullptr) return nullptr;
  return std::make_shared<SparseRun>(feedback, step.density, step.number, counters_);
}

}  // namespace hvd_ext

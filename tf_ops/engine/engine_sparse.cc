// The public calls about sparse buckets.
#include <utility>

#include "engine/engine_state.h"

namespace hvd_ext {

Status Engine::EndStep(int64_t channel, bool commit) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Channel> found;
  if (commit) HVD_EXT_RETURN_IF_ERROR(state_->Usable());
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
  return found->EndStep(commit);
}

Status Engine::HasSparse(int64_t channel, bool* has) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
  *has = found->has_sparse();
  return Status::Ok();
}

Status Engine::GetKept(int64_t channel, int64_t bucket, KeptShard* shard) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
  return found->GetKept(bucket, shard);
}

Status Engine::ReadKept(int64_t channel, int64_t bucket, Kept which, float* to) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
  return found->CopyKept(bucket, which, to, nullptr);
}

Status Engine::WriteKept(int64_t channel, int64_t bucket, Kept which, const float* from) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->Usable());
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
  return found->CopyKept(bucket, which, nullptr, from);
}

Status Engine::GetSparseStatistics(int64_t channel, SparseStatistics* statistics) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
  *statistics = found->GetSparseStatistics();
  return Status::Ok();
}

}  // namespace hvd_ext

// The plans and channels of an engine by their handles; and why it takes no new ones: because it has stopped or failed,
// a lane has failed, or a rank has shut down. Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/channel.h"
#include "engine/core.h"
#include "engine/engine.h"
#include "engine/inbox.h"
#include "plan/plan.h"

namespace hvd_ext {

// The answer to a handle whose engine does not run any more; `what` is "plan" or "channel".
Status OfStopped(const std::string& what, int64_t handle);

// Refuses a quorum of partial rounds that a job of this size cannot have.
Status CheckQuorum(const std::string& where, int64_t quorum, int size);

class Registry {
 public:
  Registry(Core* core, const Inbox* inbox) : core_(core), inbox_(inbox) {}

  // Whether the engine takes new work.
  Status Usable() const HVD_EXT_EXCLUDES(mutex_);
  // The same for a call, which needs all ranks.
  Status UsableForCall(const CallTerms& call) const HVD_EXT_EXCLUDES(mutex_);

  Status AddPlan(std::shared_ptr<const Plan> plan, int64_t* handle) HVD_EXT_EXCLUDES(mutex_);
  Status RemovePlan(int64_t handle) HVD_EXT_EXCLUDES(mutex_);
  Status FindPlan(int64_t handle, std::shared_ptr<const Plan>* plan) const HVD_EXT_EXCLUDES(mutex_);

  Status OpenChannel(const ChannelSpec& spec, int64_t* handle) HVD_EXT_EXCLUDES(mutex_);
  Status SwitchLayout(int64_t channel, const ChannelSpec& spec) HVD_EXT_EXCLUDES(mutex_);
  Status FindChannel(int64_t handle, std::shared_ptr<Channel>* channel) const HVD_EXT_EXCLUDES(mutex_);
  // FindChannel for new work: checks Usable too.
  Status UseChannel(int64_t handle, std::shared_ptr<Channel>* channel) const HVD_EXT_EXCLUDES(mutex_);
  std::vector<std::shared_ptr<Channel>> Channels() const HVD_EXT_EXCLUDES(mutex_);  // those that are open
  // The open channel of a lane; null where there is none.
  std::shared_ptr<Channel> ChannelOfLane(int64_t lane) const HVD_EXT_EXCLUDES(mutex_);
  // Finds the channel and closes its handle.
  Status TakeChannel(int64_t handle, std::shared_ptr<Channel>* channel) HVD_EXT_EXCLUDES(mutex_);
  // How far this rank is in a channel's lane.
  LaneReport Report(int64_t lane) const HVD_EXT_EXCLUDES(mutex_);

  // Both give the deliveries that the caller must make. FailLane gives none, and returns false, where the lane has
  // failed before.
  std::vector<Delivery> Fail(const Status& status) HVD_EXT_EXCLUDES(mutex_);
  bool FailLane(int64_t lane, const Status& status, std::vector<Delivery>* ended) HVD_EXT_EXCLUDES(mutex_);
  bool AnyLaneFailed() const HVD_EXT_EXCLUDES(mutex_);
  void NoteLeft(int peer) HVD_EXT_EXCLUDES(mutex_);

 private:
  Status CheckPartial(const ChannelSpec& spec) const;
  Status UsableNow() const HVD_EXT_REQUIRES(mutex_);
  Status LayoutOf(const ChannelSpec& spec, std::shared_ptr<const Layout>* layout) const HVD_EXT_REQUIRES(mutex_);
  Status PlanOf(int64_t handle, std::shared_ptr<const Plan>* plan) const HVD_EXT_REQUIRES(mutex_);
  Status ChannelOf(int64_t handle, std::shared_ptr<Channel>* channel) const HVD_EXT_REQUIRES(mutex_);
  std::shared_ptr<Channel> OfLane(int64_t lane) const HVD_EXT_REQUIRES(mutex_);
  int64_t HandleOf(size_t index) const { return core_->generation * (int64_t{1} << 32) + static_cast<int64_t>(index); }

  Core* const core_;
  const Inbox* const inbox_;
  mutable Mutex mutex_;  // taken before a channel's
  Status failure_ HVD_EXT_GUARDED_BY(mutex_);
  int left_ HVD_EXT_GUARDED_BY(mutex_) = -1;                                   // the first peer that has shut down
  std::vector<std::shared_ptr<const Plan>> plans_ HVD_EXT_GUARDED_BY(mutex_);  // null: removed
  std::vector<std::shared_ptr<Channel>> channels_ HVD_EXT_GUARDED_BY(mutex_);  // null: closed
  std::map<int64_t, Status> lane_failures_ HVD_EXT_GUARDED_BY(mutex_);
};

}  // namespace hvd_ext

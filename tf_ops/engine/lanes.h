// The channels' lanes: runs that are ready are given to the executor; lanes that a rank has closed, or that have
// failed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "engine/channel.h"
#include "engine/control.h"
#include "engine/core.h"
#include "engine/executor.h"
#include "engine/message.h"
#include "engine/registry.h"

namespace hvd_ext {

class Lanes {
 public:
  Lanes(Core* core, Control* control, Registry* registry, Executor* executor)
      : core_(core), control_(control), registry_(registry), executor_(executor) {}

  // Starts the channel's runs that are ready.
  void StartRuns(const std::shared_ptr<Channel>& channel) HVD_EXT_REQUIRES(progress_role);
  // Tells the others how far this rank has come in the lane: what they have given to it beyond that can never end.
  void Close(int64_t lane) HVD_EXT_REQUIRES(progress_role);
  // Ends all runs of the lane and all that come. `tell`: the other ranks hear of it.
  void Fail(int64_t lane, const Status& status, bool tell) HVD_EXT_REQUIRES(progress_role);
  // Fails the lane where a run can never end, because a rank has closed it before.
  void CheckClosed(int64_t lane) HVD_EXT_REQUIRES(progress_role);

  // The rank that has closed the lane first; -1 if none has.
  int ClosedBy(int64_t lane) const HVD_EXT_REQUIRES(progress_role);

  void Handle(const LaneFailed& failed) HVD_EXT_REQUIRES(progress_role) { Fail(failed.lane, failed.status, false); }
  void Handle(int peer, const LaneClosed& closed) HVD_EXT_REQUIRES(progress_role);

 private:
  void Start(const std::shared_ptr<Channel>& channel, Channel::Ready ready) HVD_EXT_REQUIRES(progress_role);

  struct Closed {
    int64_t runs;
    int rank;
  };

  Core* const core_;
  Control* const control_;
  Registry* const registry_;
  Executor* const executor_;
  std::map<int64_t, Closed> closed_ HVD_EXT_GUARDED_BY(progress_role);  // by lane: the rank that closed it first
};

}  // namespace hvd_ext

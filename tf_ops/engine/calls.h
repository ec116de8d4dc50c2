// The calls and exchanges that this rank has made, from their announcement to their end; and on rank 0 the coordinator,
// which matches those of all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/control.h"
#include "engine/coordinator.h"
#include "engine/core.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/message.h"
#include "plan/plan.h"

namespace hvd_ext {

// A call or exchange that this rank has made and that has not started.
struct OpenCall {
  CallSpec spec;
  std::shared_ptr<const Plan> plan;
  const void* input = nullptr;
  std::string payload;
  Allocate allocate;
  std::function<void(const Status&, std::vector<std::string>)> done;
  double since_s = 0;
  double heard_s = 0;    // when rank 0 last said that it knows of the wait
  bool silence = false;  // a warning has said that rank 0 does not answer

  std::string name() const { return NameOfCall(spec); }
};

class Calls {
 public:
  Calls(Core* core, Control* control, Executor* executor);

  void Announce(std::shared_ptr<OpenCall> call) HVD_EXT_REQUIRES(progress_role);
  // Ends all that are open.
  void EndAll(const Status& status) HVD_EXT_REQUIRES(progress_role);

  void Handle(int peer, CallAnnouncement announcement) HVD_EXT_REQUIRES(progress_role);
  void Handle(const CallStart& start) HVD_EXT_REQUIRES(progress_role);
  void Handle(const CallRefusal& refusal) HVD_EXT_REQUIRES(progress_role);
  void Handle(const CallKnown& known) HVD_EXT_REQUIRES(progress_role);
  // Rank 0: the peer has joined, and has the plans of these digests; or all have.
  void HandleJoined(int peer, const std::vector<int64_t>& digests) HVD_EXT_REQUIRES(progress_role);
  void HandleAllJoined() HVD_EXT_REQUIRES(progress_role);
  // This rank has joined: it takes part in calls of the others with zeros, by these plans, which have their digests.
  void Join(std::map<int64_t, std::shared_ptr<const Plan>> plans) HVD_EXT_REQUIRES(progress_role) {
    plans_of_zeros_ = std::move(plans);
  }
  void Handle(const ZeroCall& zeros) HVD_EXT_REQUIRES(progress_role);
  // Calls that rank 0 has started need no more announcements; those that it has not started can never start.
  void HandleLeave(int peer) HVD_EXT_REQUIRES(progress_role);

  // Warns of calls that have waited for long. An error: one has waited for longer than the limit.
  Status Watch() HVD_EXT_REQUIRES(progress_role);

  bool open() const HVD_EXT_REQUIRES(progress_role) { return !open_.empty(); }
  // Whether a message of another rank is expected.
  bool waiting() const HVD_EXT_REQUIRES(progress_role) {
    return !open_.empty() || (coordinator_ != nullptr && coordinator_->waiting());
  }

 private:
  void Start(const std::shared_ptr<OpenCall>& call, const CallStart& start) HVD_EXT_REQUIRES(progress_role);
  std::shared_ptr<OpenCall> Take(int64_t id) HVD_EXT_REQUIRES(progress_role);

  Core* const core_;
  Control* const control_;
  Executor* const executor_;
  const std::unique_ptr<Coordinator> coordinator_;                                       // null: not rank 0
  std::map<int64_t, std::shared_ptr<OpenCall>> open_ HVD_EXT_GUARDED_BY(progress_role);  // by number
  int64_t next_ HVD_EXT_GUARDED_BY(progress_role) = 0;
  std::map<int64_t, std::shared_ptr<const Plan>> plans_of_zeros_ HVD_EXT_GUARDED_BY(progress_role);  // by digest
};

}  // namespace hvd_ext

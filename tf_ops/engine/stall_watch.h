// The watch over lanes that stand still. The rank whose lane does so asks rank 0, which asks all ranks how far they are
// and answers who is missing. Nothing here waits: questions and answers are control messages.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/control.h"
#include "engine/core.h"
#include "engine/executor.h"
#include "engine/lanes.h"
#include "engine/message.h"
#include "engine/registry.h"
#include "engine/stall.h"

namespace hvd_ext {

// What everything fails with when something has waited for longer than HVD_EXT_STALL_FATAL_S.
Status StalledTooLong(const Core& core, const std::string& text);

class StallWatch {
 public:
  StallWatch(Core* core, Control* control, Registry* registry, Lanes* lanes, Executor* executor)
      : core_(core), control_(control), registry_(registry), lanes_(lanes), executor_(executor) {}

  // An error of these is a stall longer than the limit: everything fails.
  Status Look() HVD_EXT_REQUIRES(progress_role);
  Status Handle(const StallVerdict& verdict) HVD_EXT_REQUIRES(progress_role);

  void Handle(int peer, const StallQuestion& question) HVD_EXT_REQUIRES(progress_role);
  void Handle(const StallProbe& probe) HVD_EXT_REQUIRES(progress_role);
  void Handle(int peer, const StallReport& report) HVD_EXT_REQUIRES(progress_role);

  // Whether rank 0 expects reports.
  bool waiting() const HVD_EXT_REQUIRES(progress_role) { return !inquiries_.empty(); }

 private:
  // A question that rank 0 is about to answer.
  struct Inquiry {
    int asker;
    StallQuestion question;
    double since_s;
    std::vector<LaneReport> reports;  // by rank
  };
  struct LaneWatch {
    double progress_s = -1;
    int quiet = 0;  // looks at the lane since it last moved
    int64_t warnings = 0;
    double asked_s = -1;  // when rank 0 was asked; negative: it has answered, or was not asked
    bool fatal = false;   // the answer ends everything
  };
  // The stall of a lane that was printed last.
  struct Printed {
    int64_t run;
    double at_s;
    std::set<std::string> who;
  };

  Status WatchLanes() HVD_EXT_REQUIRES(progress_role);
  bool LostByLeave(const LaneView& view, const LaneWatch& watch) HVD_EXT_REQUIRES(progress_role);
  void Answer(const Inquiry& inquiry) HVD_EXT_REQUIRES(progress_role);
  void Print(int64_t lane, int64_t run, double since_s, const std::string& who, const std::string& text)
      HVD_EXT_REQUIRES(progress_role);

  Core* const core_;
  Control* const control_;
  Registry* const registry_;
  Lanes* const lanes_;
  Executor* const executor_;
  std::map<int64_t, LaneWatch> watches_ HVD_EXT_GUARDED_BY(progress_role);  // by lane
  std::map<int64_t, Inquiry> inquiries_ HVD_EXT_GUARDED_BY(progress_role);  // rank 0, by number
  std::map<int64_t, Printed> printed_ HVD_EXT_GUARDED_BY(progress_role);    // by lane
  int64_t next_inquiry_ HVD_EXT_GUARDED_BY(progress_role) = 0;
};

}  // namespace hvd_ext

// Ranks that have joined: they have no more data, and until all ranks have joined they give zeros to what the others
// reduce.
//
// While no rank has joined, none of this costs a message. A rank joins by a message to rank 0, which tells the ranks
// that have not joined. Each of these answers how far it is with its channels, and from then on announces each step
// that it begins or ends; rank 0 passes the first announcement of a step on to the ranks that have joined.
// Announcements say the whole state, so that one may overtake another: a rank may have begun steps before it heard of a
// join. Runs of a lane, by which steps are counted, are counted alike on all ranks.
//
// Calls go through rank 0 anyway: its coordinator takes the ranks that have joined for present, and has them take part
// with zeros (Calls).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/calls.h"
#include "engine/channel.h"
#include "engine/control.h"
#include "engine/core.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/lanes.h"
#include "engine/message.h"
#include "engine/registry.h"

namespace hvd_ext {

class Joining {
 public:
  Joining(Core* core, Control* control, Registry* registry, Executor* executor, Calls* calls, Lanes* lanes);

  // --- Any thread.
  // Whether this rank announces its steps.
  bool announces() const { return mode_ == kAnnounces; }
  // Refuses `what`, a step or a call of this rank, while it has joined.
  Status Check(const std::string& what) const;

  void Join(std::map<int64_t, std::shared_ptr<const Plan>> plans, std::string payload, JoinEnded done)
      HVD_EXT_REQUIRES(progress_role);
  // Tells rank 0 how far this rank is with the channel.
  void Announce(const Channel& channel) HVD_EXT_REQUIRES(progress_role);
  // Gives the zeros that are due. Returns whether anything has moved.
  bool Progress() HVD_EXT_REQUIRES(progress_role);
  // Ends this rank's join, if it waits.
  void End(const Status& status) HVD_EXT_REQUIRES(progress_role);
  void HandleLeave(int peer) HVD_EXT_REQUIRES(progress_role);

  void Handle(int peer, RankJoined joined) HVD_EXT_REQUIRES(progress_role);
  void Handle(const OthersJoined& others) HVD_EXT_REQUIRES(progress_role);
  void Handle(const StepReached& reached) HVD_EXT_REQUIRES(progress_role);
  void Handle(AllJoined all) HVD_EXT_REQUIRES(progress_role);

  // Whether this rank has joined, so that a message may come at any time.
  bool waiting() const HVD_EXT_REQUIRES(progress_role) { return done_ != nullptr; }

 private:
  enum Mode { kAlone, kAnnounces, kJoined };

  // A channel's lane on a rank that has joined.
  struct Lane {
    std::deque<StepReached> due;
    int64_t open = -1;  // the place of this rank's step of zeros that is to be ended; -1: none
  };

  void AnnounceAll() HVD_EXT_REQUIRES(progress_role);
  // Does what the announcement asks for; false where it has to wait for runs under way.
  bool Follow(const std::shared_ptr<Channel>& channel, const StepReached& reached, Lane* lane)
      HVD_EXT_REQUIRES(progress_role);
  Status GiveZeros(const std::shared_ptr<Channel>& channel, const StepReached& reached) HVD_EXT_REQUIRES(progress_role);

  Core* const core_;
  Control* const control_;
  Registry* const registry_;
  Executor* const executor_;
  Calls* const calls_;
  Lanes* const lanes_;
  std::atomic<Mode> mode_{kAlone};

  // Of this rank's join.
  JoinEnded done_ HVD_EXT_GUARDED_BY(progress_role);       // null: it has not joined
  bool all_ HVD_EXT_GUARDED_BY(progress_role) = false;     // all have joined; zeros may still be due
  AllJoined end_ HVD_EXT_GUARDED_BY(progress_role);        // once all have joined
  bool others_ HVD_EXT_GUARDED_BY(progress_role) = false;  // others have joined, and this rank has not, or not again
  std::map<int64_t, Lane> due_ HVD_EXT_GUARDED_BY(progress_role);  // by lane

  // On rank 0.
  std::vector<char> joined_ HVD_EXT_GUARDED_BY(progress_role);  // by rank
  std::vector<std::string> payloads_ HVD_EXT_GUARDED_BY(progress_role);
  std::map<int64_t, StepReached> newest_ HVD_EXT_GUARDED_BY(progress_role);  // by lane: what was passed on last
};

}  // namespace hvd_ext

// The progress of an engine: one pass takes work from the inbox, handles control messages, moves the executor on and
// looks for stalls. The engine's thread makes passes and sleeps in between. A caller that would only wait for a result
// takes the progress lock and makes the passes itself, which spares waking two threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "engine/calls.h"
#include "engine/control.h"
#include "engine/core.h"
#include "engine/executor.h"
#include "engine/inbox.h"
#include "engine/joining.h"
#include "engine/lanes.h"
#include "engine/message.h"
#include "engine/partial_rounds.h"
#include "engine/registry.h"
#include "engine/stall_watch.h"
#include "shm/doorbell.h"

namespace hvd_ext {

// Whoever holds it has the progress role of its engine.
class ProgressLock {
 public:
  void Lock() HVD_EXT_ACQUIRE(progress_role) HVD_EXT_UNCHECKED;
  bool TryLock() HVD_EXT_TRY_ACQUIRE(true, progress_role) HVD_EXT_UNCHECKED;
  void Unlock() HVD_EXT_RELEASE(progress_role) HVD_EXT_UNCHECKED;
  bool IsMine() const { return holder_ == std::this_thread::get_id(); }

 private:
  Mutex mutex_;
  std::atomic<std::thread::id> holder_{};
};

class ProgressLoop {
 public:
  ProgressLoop(Core* core, Inbox* inbox, Registry* registry, Control* control, Executor* executor, Calls* calls,
               Lanes* lanes, PartialRounds* rounds, StallWatch* stalls, Joining* joining);

  // The engine's thread: until the inbox is stopped, and then to the end.
  void Run();
  bool IsMine() const { return lock_.IsMine(); }

  // A caller's progress. Begin: false where another thread makes progress already, or in a callback. After it Once
  // makes a pass, Until makes passes until `ended`, which a callback sets, the engine stops, or `most_s` have passed;
  // then End.
  bool BeginCaller() HVD_EXT_TRY_ACQUIRE(true, progress_role);
  void Once() HVD_EXT_REQUIRES(progress_role);
  void Until(const std::atomic<bool>& ended, double most_s) HVD_EXT_REQUIRES(progress_role);
  void EndCaller() HVD_EXT_RELEASE(progress_role);

  // See Engine::Stop and Engine::quiet.
  bool alone() const { return alone_; }
  bool quiet() const { return quiet_; }

 private:
  // Returns whether anything has moved. `watches`: stalls are looked for.
  bool Pass(bool watches) HVD_EXT_REQUIRES(progress_role);
  bool TakeInbox() HVD_EXT_REQUIRES(progress_role);
  bool ReceiveMessages() HVD_EXT_REQUIRES(progress_role);
  void Watch() HVD_EXT_REQUIRES(progress_role);
  void FailEverything(const Status& status, bool tell) HVD_EXT_REQUIRES(progress_role);

  void Handle(int peer, ControlMessage message) HVD_EXT_REQUIRES(progress_role);
  void HandleLeave(int peer) HVD_EXT_REQUIRES(progress_role);
  void Take(int peer, CallAnnouncement& m) HVD_EXT_REQUIRES(progress_role) { calls_->Handle(peer, std::move(m)); }
  void Take(int, CallStart& m) HVD_EXT_REQUIRES(progress_role) { calls_->Handle(m); }
  void Take(int, CallRefusal& m) HVD_EXT_REQUIRES(progress_role) { calls_->Handle(m); }
  void Take(int, CallKnown& m) HVD_EXT_REQUIRES(progress_role) { calls_->Handle(m); }
  void Take(int peer, RoundArrival& m) HVD_EXT_REQUIRES(progress_role) { rounds_->Handle(peer, m); }
  void Take(int, RoundsOpen& m) HVD_EXT_REQUIRES(progress_role) { rounds_->Handle(m); }
  void Take(int, LaneFailed& m) HVD_EXT_REQUIRES(progress_role) { lanes_->Handle(m); }
  void Take(int peer, LaneClosed& m) HVD_EXT_REQUIRES(progress_role) { lanes_->Handle(peer, m); }
  void Take(int peer, StallQuestion& m) HVD_EXT_REQUIRES(progress_role) { stalls_->Handle(peer, m); }
  void Take(int, StallProbe& m) HVD_EXT_REQUIRES(progress_role) { stalls_->Handle(m); }
  void Take(int peer, StallReport& m) HVD_EXT_REQUIRES(progress_role) { stalls_->Handle(peer, m); }
  void Take(int, StallVerdict& m) HVD_EXT_REQUIRES(progress_role);
  void Take(int peer, RankJoined& m) HVD_EXT_REQUIRES(progress_role) { joining_->Handle(peer, std::move(m)); }
  void Take(int, OthersJoined& m) HVD_EXT_REQUIRES(progress_role) { joining_->Handle(m); }
  void Take(int, StepReached& m) HVD_EXT_REQUIRES(progress_role) { joining_->Handle(m); }
  void Take(int, ZeroCall& m) HVD_EXT_REQUIRES(progress_role) { calls_->Handle(m); }
  void Take(int, AllJoined& m) HVD_EXT_REQUIRES(progress_role) { joining_->Handle(std::move(m)); }
  void Take(int, EngineFailed& m) HVD_EXT_REQUIRES(progress_role) { FailEverything(m.status, false); }
  void Take(int peer, ShuttingDown&) HVD_EXT_REQUIRES(progress_role) { HandleLeave(peer); }

  // Whether a message, or the end of one, is expected.
  bool Expecting() const HVD_EXT_REQUIRES(progress_role);
  // How long to sleep after a pass; 0: look again, negative: at once. `spin_s`: so long it looks again at first.
  double Pause(bool moved, double spin_s) const HVD_EXT_REQUIRES(progress_role);
  // Which rings wake the engine's thread after this pass.
  Doorbell::Hears OwnerHears() const HVD_EXT_REQUIRES(progress_role);
  void Sleep(uint32_t seen, double pause_s, Doorbell::Who who, Doorbell::Hears hears = Doorbell::kAll);
  bool Working() const HVD_EXT_REQUIRES(progress_role) { return executor_->busy() || calls_->open(); }
  // The end: gives work under way its time, then ends what is left.
  void Drain() HVD_EXT_REQUIRES(progress_role);
  void ShutDownHandshake() HVD_EXT_REQUIRES(progress_role);

  Core* const core_;
  Inbox* const inbox_;
  Registry* const registry_;
  Control* const control_;
  Executor* const executor_;
  Calls* const calls_;
  Lanes* const lanes_;
  PartialRounds* const rounds_;
  StallWatch* const stalls_;
  Joining* const joining_;
  ProgressLock lock_;
  uint32_t looked_at_ HVD_EXT_GUARDED_BY(progress_role) = 0;  // the doorbell, before this pass
  double moved_s_ HVD_EXT_GUARDED_BY(progress_role);
  double received_s_ HVD_EXT_GUARDED_BY(progress_role);
  double watched_s_ HVD_EXT_GUARDED_BY(progress_role);
  bool whole_ HVD_EXT_GUARDED_BY(progress_role) = false;  // nothing had failed when the engine was stopped
  std::atomic<bool> alone_{false};
  std::atomic<bool> quiet_{false};
};

}  // namespace hvd_ext

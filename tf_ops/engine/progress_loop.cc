#include "engine/progress_loop.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/interrupt.h"
#include "kernels/denormals.h"

namespace hvd_ext {
namespace {

constexpr double kSpin_s = 50e-6;  // messages often come at once
// A caller's thread has nothing else to do, and to be woken takes as long as a pass over a megabyte. Between hosts it
// waits for links, which takes longer.
constexpr double kCallerSpin_s = 500e-6;
constexpr double kShortestSleep_s = 20e-6;
constexpr double kLongestSleep_s = 10e-3;   // while messages are expected, but not soon
constexpr double kExpectingSleep_s = 1e-3;  // the longest sleep while messages are expected, for kPatience_s
constexpr double kPatience_s = 5;           // after this time without a message it is a stall, and no hurry
// A sleep is this part of the time in which nothing has moved: it delays what comes next by no more than a tenth.
constexpr double kSleepShare = 0.1;
// Where all peers ring for what they send, a sleep ends without a ring only for the stall watch.
constexpr double kRungSleep_s = 10e-3;
// While nothing is under way, no rank waits for this one: a call waits for all ranks, and this one rings when it calls.
// So the rings of peers do not end this sleep: what they send early is taken with this rank's own call.
constexpr double kIdleSleep_s = 100e-3;
// An idle rank with a partial channel is to take part in a round as soon as another rank begins it, and between hosts
// no doorbell rings: a look every 2 ms costs about 1 % of a core.
constexpr double kListeningSleep_s = 2e-3;
constexpr double kControl_s = 1e-3;  // between looks for control messages while no answer is expected
constexpr double kWatch_s = 10e-3;
constexpr int kMessagesPerPass = 64;  // data moves in between
constexpr double kDrainPatience = 3;  // the whole drain takes at most this many times drain_s, while there is progress

}  // namespace

double NowSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void ProgressLock::Lock() {
  mutex_.Lock();
  holder_ = std::this_thread::get_id();
}

bool ProgressLock::TryLock() {
  if (!mutex_.TryLock()) return false;
  holder_ = std::this_thread::get_id();
  return true;
}

void ProgressLock::Unlock() {
  holder_ = std::thread::id();
  mutex_.Unlock();
}

ProgressLoop::ProgressLoop(Core* core, Inbox* inbox, Registry* registry, Control* control, Executor* executor,
                           Calls* calls, Lanes* lanes, PartialRounds* rounds, StallWatch* stalls, Joining* joining)
    : core_(core),
      inbox_(inbox),
      registry_(registry),
      control_(control),
      executor_(executor),
      calls_(calls),
      lanes_(lanes),
      rounds_(rounds),
      stalls_(stalls),
      joining_(joining),
      moved_s_(NowSeconds()),
      received_s_(moved_s_),
      watched_s_(moved_s_) {}

void ProgressLoop::Run() {
  Doorbell* bell = core_->transport->doorbell();
  while (!inbox_->stopping()) {
    uint32_t seen = bell->Look();
    if (lock_.TryLock()) {
      double pause_s = Pause(Pass(true), kSpin_s);
      seen = looked_at_;
      Doorbell::Hears hears = OwnerHears();
      lock_.Unlock();
      // A stop before the look rings no more.
      if (!inbox_->stopping()) Sleep(seen, pause_s, Doorbell::kOwner, hears);
    } else {
      // A caller makes progress. When it ends, this thread looks for messages without a doorbell.
      bell->Sleep(seen, kIdleSleep_s, Doorbell::kOwner, Doorbell::kNobody);
    }
  }
  lock_.Lock();
  Drain();
  ShutDownHandshake();
  core_->transport->Close();
  lock_.Unlock();
}

bool ProgressLoop::BeginCaller() {
  if (lock_.IsMine() || !lock_.TryLock()) return false;
  core_->transport->doorbell()->Relieve();
  return true;
}

void ProgressLoop::Once() {
  if (!inbox_->stopping()) Pass(true);
}

void ProgressLoop::Until(const std::atomic<bool>& ended, double most_s) {
  const double spin_s = core_->transport->Rings() ? kCallerSpin_s : kSpin_s;
  const double until_s = NowSeconds() + most_s;
  while (!ended && !inbox_->stopping() && core_->now_s < until_s) {
    double pause_s = std::min(Pause(Pass(true), spin_s), until_s - core_->now_s);
    if (!ended) Sleep(looked_at_, pause_s, Doorbell::kCaller);
  }
}

void ProgressLoop::EndCaller() {
  Doorbell* bell = core_->transport->doorbell();
  Doorbell::Hears hears = OwnerHears();
  lock_.Unlock();
  bell->Resume(hears);
  // What is still expected may have come already, or may need another look without a ring: at the clock, or at MPI.
  if (hears == Doorbell::kAll || inbox_->HasWork() || inbox_->stopping()) bell->Ring(/*from_peer=*/false);
}

bool ProgressLoop::Pass(bool watches) {
  const WithDenormals denormals;  // this may be a thread of TensorFlow, and all ranks must add up the same
  bool moved = false;
  looked_at_ = core_->transport->doorbell()->Look();
  core_->now_s = NowSeconds();
  try {
    moved = TakeInbox();
    moved |= ReceiveMessages();
    Status status = executor_->Progress(core_->now_s, &moved);
    if (!status.ok()) core_->Break(std::move(status));
    moved |= joining_->Progress();
    if (watches && core_->now_s - watched_s_ >= kWatch_s) {
      watched_s_ = core_->now_s;
      Watch();
    }
  } catch (const std::exception& e) {
    core_->Break(Internal(std::string("the engine's thread: ") + e.what()));
  }
  if (!core_->broken.ok()) {
    const Status& broken = core_->broken;
    FailEverything({broken.code, core_->RankName(core_->rank) + " has failed: " + broken.message}, true);
    core_->broken = Status::Ok();
  }
  if (moved) moved_s_ = core_->now_s;
  return moved;
}

bool ProgressLoop::TakeInbox() {
  std::vector<Inbox::Work> work = inbox_->Take();
  for (Inbox::Work& item : work) {
    try {
      item();
    } catch (const std::exception& e) {  // the other items must run: each ends what a caller waits for
      core_->Break(Internal(std::string("the engine's thread: ") + e.what()));
    }
  }
  return !work.empty();
}

bool ProgressLoop::ReceiveMessages() {
  bool moved = false;
  ControlMessage message;
  while (control_->TakeOwn(&message)) {
    Handle(core_->rank, std::move(message));
    moved = true;
  }
  bool due = core_->transport->Rings() || rounds_->listening() || calls_->waiting() || stalls_->waiting() ||
             joining_->waiting();
  if (!due && core_->now_s - received_s_ < kControl_s) return moved;
  received_s_ = core_->now_s;
  for (int i = 0; i < kMessagesPerPass; ++i) {
    int peer = -1;
    Status status = control_->TakePeers(&peer, &message);
    if (!status.ok()) {
      core_->Break(std::move(status));
      return moved;
    }
    if (peer < 0) break;
    Handle(peer, std::move(message));
    moved = true;
  }
  return moved;
}

void ProgressLoop::Watch() {
  if (!core_->failure.ok()) return;
  Status status = stalls_->Look();
  if (status.ok()) status = calls_->Watch();
  if (status.ok()) status = rounds_->Watch();
  if (!status.ok()) FailEverything(status, true);
}

void ProgressLoop::Handle(int peer, ControlMessage message) {
  if (!core_->failure.ok() && !std::holds_alternative<ShuttingDown>(message)) return;
  std::visit(
      [&](auto& m) {
        AssertProgress();
        Take(peer, m);
      },
      message);
}

void ProgressLoop::Take(int, StallVerdict& verdict) {
  Status status = stalls_->Handle(verdict);
  if (!status.ok()) FailEverything(status, true);
}

// What the peer sent before stays good: only what waits for more from it fails (see StallWatch).
void ProgressLoop::HandleLeave(int peer) {
  control_->NoteLeft(peer);
  registry_->NoteLeft(peer);
  calls_->HandleLeave(peer);
  joining_->HandleLeave(peer);
}

void ProgressLoop::FailEverything(const Status& status, bool tell) {
  if (!core_->failure.ok()) return;
  Status fails = status;
  if (tell && status.code != Code::kStopped) {
    const std::vector<int>& numbers = core_->config.numbers;
    fails.message += numbers.empty() ? "; nothing works until shutdown() and init()"
                                     : "; nothing works" + InSet(numbers) +
                                           " until all ranks remove and add it, or shutdown() and init()";
  }
  core_->failure = fails;
  std::vector<Delivery> ended = registry_->Fail(fails);
  if (tell) control_->SendToOthers(EngineFailed{fails});
  executor_->FailAll(fails);
  calls_->EndAll(fails);
  joining_->End(fails);
  DeliverAll(ended);
}

bool ProgressLoop::Expecting() const {
  return executor_->busy() || calls_->waiting() || stalls_->waiting() || joining_->waiting();
}

Doorbell::Hears ProgressLoop::OwnerHears() const {
  const bool writes = core_->transport->ControlPending();  // what did not fit, and peers ring when there is room
  return Expecting() || writes || rounds_->listening() ? Doorbell::kAll : Doorbell::kItsProcess;
}

double ProgressLoop::Pause(bool moved, double spin_s) const {
  if (moved) return -1;
  double quiet_s = core_->now_s - moved_s_;
  bool expecting = Expecting();
  if (expecting && quiet_s < spin_s) return 0;
  if (core_->transport->Rings() && !executor_->polls())
    return expecting || core_->transport->ControlPending() ? kRungSleep_s : kIdleSleep_s;
  double longest_s = expecting && quiet_s < kPatience_s ? kExpectingSleep_s : kLongestSleep_s;
  if (!expecting && !core_->transport->ControlPending()) {
    longest_s = rounds_->listening() ? kListeningSleep_s : kIdleSleep_s;
  }
  return std::min(std::max(quiet_s * kSleepShare, kShortestSleep_s), longest_s);
}

void ProgressLoop::Sleep(uint32_t seen, double pause_s, Doorbell::Who who, Doorbell::Hears hears) {
  if (pause_s == 0) std::this_thread::yield();
  if (pause_s > 0) core_->transport->doorbell()->Sleep(seen, pause_s, who, hears);
}

void ProgressLoop::Drain() {
  const double drain_s = core_->config.drain_s;
  double begun_s = NowSeconds();
  moved_s_ = begun_s;
  while (true) {
    bool moved = Pass(false);
    if (!core_->failure.ok() || !Working() || core_->now_s - moved_s_ > drain_s) break;
    if (core_->now_s - begun_s > kDrainPatience * drain_s) break;
    Sleep(looked_at_, Pause(moved, kSpin_s), Doorbell::kOwner);
  }
  if (core_->failure.ok() && Working()) alone_ = true;
  whole_ = core_->failure.ok() && !alone_ && !registry_->AnyLaneFailed();
  FailEverything(Stopped("the engine has been shut down before this ended"), false);
  if (executor_->abandoned()) alone_ = true;
}

// The last message to the peers, and theirs. Waiting for theirs also gives the transport time to move what it still
// holds of ours.
void ProgressLoop::ShutDownHandshake() {
  Transport* transport = core_->transport.get();
  if (whole_) transport->LeaveDevices();
  control_->SendToOthers(ShuttingDown{});
  double begun_s = NowSeconds();
  moved_s_ = begun_s;
  while (!control_->AllHaveLeft() || transport->ControlPending()) {
    // The peers go on, perhaps for long: rank 0 may save a model. Our last message reaches them, and MPI_Finalize waits
    // for them.
    if (core_->now_s - begun_s > core_->config.handshake_s) {
      if (transport->ControlPending()) alone_ = true;
      return;
    }
    looked_at_ = transport->doorbell()->Look();
    core_->now_s = NowSeconds();
    received_s_ = 0;
    bool moved = ReceiveMessages();
    if (!core_->broken.ok()) {  // the transport is broken: no message can arrive
      alone_ = true;
      return;
    }
    if (moved) moved_s_ = core_->now_s;
    Sleep(looked_at_, Pause(moved, kSpin_s), Doorbell::kOwner);
  }
  quiet_ = whole_ && !alone_;
}

}  // namespace hvd_ext

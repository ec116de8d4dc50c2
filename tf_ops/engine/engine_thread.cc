// The engine's thread: one loop that takes work from the inbox, moves messages, and sleeps in between; and its end.
#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "engine/engine_state.h"

namespace hvd_ext {
namespace {

constexpr double kSpin_s = 50e-6;  // messages often come at once
constexpr double kShortestSleep_s = 20e-6;
constexpr double kLongestSleep_s = 10e-3;   // while messages are expected, but not soon
constexpr double kExpectingSleep_s = 1e-3;  // the longest sleep while messages are expected ...
constexpr double kPatience_s = 5;           // ... for this long; then it is a stall, and no hurry
// A sleep is this part of the time in which nothing has moved: it delays what comes next by no more than a tenth.
constexpr double kSleepShare = 0.1;
// Where all peers ring for what they send, sleeping is for the watches alone.
constexpr double kRungSleep_s = 10e-3;
constexpr double kIdleRungSleep_s = 100e-3;
constexpr double kControl_s = 1e-3;  // between looks at the control plane while no answer is expected
constexpr double kWatch_s = 10e-3;
constexpr int kMessagesPerPass = 64;  // data moves in between
constexpr double kDrainPatience = 3;  // of drain_s in all, while there is progress

}  // namespace

double NowSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Engine::State::Loop() {
  const double off_duty_s = transport->Rings() ? kIdleRungSleep_s : config.idle_s;
  while (!StopRequested()) {
    Doorbell* bell = transport->doorbell();
    uint32_t seen = bell->Look();
    if (TakeTurn(false)) {
      double pause_s = Pause(Pass(true));
      seen = looked_at_;
      EndTurn();
      Sleep(seen, pause_s, Doorbell::kOwner);
    } else {
      bell->Sleep(seen, off_duty_s, Doorbell::kOwner, /*on_duty=*/false);
    }
  }
  TakeTurn(true);
  Drain();
  Farewell();
  transport->Close();
  EndTurn();
}

bool Engine::State::StopRequested() {
  std::lock_guard<std::mutex> lock(mutex);
  return stopping;
}

bool Engine::State::Pass(bool running) {
  bool moved = false;
  looked_at_ = transport->doorbell()->Look();
  now_s_ = NowSeconds();
  try {
    moved = TakeInbox();
    moved |= ReceiveMessages();
    Status status = executor.Progress(now_s_, &moved);
    if (!status.ok() && broken_.ok()) broken_ = status;
    if (running && now_s_ - watched_s_ >= kWatch_s) {
      watched_s_ = now_s_;
      Watch();
    }
  } catch (const std::exception& e) {
    if (broken_.ok()) broken_ = Internal(std::string("the engine's thread: ") + e.what());
  }
  if (!broken_.ok()) {
    FailEverything({broken_.code, "rank " + std::to_string(Number(rank)) + " has failed: " + broken_.message}, true);
    broken_ = Status::Ok();
  }
  if (moved) moved_s_ = now_s_;
  return moved;
}

bool Engine::State::TakeInbox() {
  std::vector<std::function<void()>> work;
  {
    std::lock_guard<std::mutex> lock(mutex);
    work.swap(inbox);
  }
  for (std::function<void()>& item : work) {
    try {
      item();
    } catch (const std::exception& e) {  // the others must run: each ends what somebody waits for
      if (broken_.ok()) broken_ = Internal(std::string("the engine's thread: ") + e.what());
    }
  }
  return !work.empty();
}

bool Engine::State::ReceiveMessages() {
  bool moved = false;
  while (!to_self_.empty()) {
    ControlMessage message = std::move(to_self_.front());
    to_self_.pop_front();
    Handle(rank, std::move(message));
    moved = true;
  }
  bool due = transport->Rings() || !open_calls_.empty() || !inquiries_.empty() ||
             (coordinator_ != nullptr && coordinator_->waiting());
  if (!due && now_s_ - received_s_ < kControl_s) return moved;
  received_s_ = now_s_;
  for (int i = 0; i < kMessagesPerPass; ++i) {
    int peer = -1;
    std::string bytes;
    Status status = transport->ReceiveControl(&peer, &bytes);
    ControlMessage message;
    if (status.ok() && peer >= 0) status = Decode(bytes, &message);
    if (!status.ok()) {
      if (broken_.ok()) broken_ = status;
      return moved;
    }
    if (peer < 0) break;
    Handle(peer, std::move(message));
    moved = true;
  }
  return moved;
}

void Engine::State::Handle(int peer, ControlMessage message) {
  if (std::holds_alternative<ShuttingDown>(message)) return HandleLeave(peer);
  if (!failure.ok()) return;  // written by this thread only, so read without the mutex
  std::vector<Outgoing> out;
  if (auto* announcement = std::get_if<CallAnnouncement>(&message)) {
    if (coordinator_ != nullptr) coordinator_->Receive(peer, std::move(*announcement), now_s_, &out);
  } else if (auto* start = std::get_if<CallStart>(&message)) {
    StartCall(*start);
  } else if (auto* refusal = std::get_if<CallRefusal>(&message)) {
    RefuseCall(*refusal);
  } else if (auto* known = std::get_if<CallKnown>(&message)) {
    auto call = open_calls_.find(known->id);
    if (call != open_calls_.end()) call->second->heard_s = now_s_;
  } else if (auto* failed = std::get_if<LaneFailed>(&message)) {
    FailLane(failed->lane, failed->status, false);
  } else if (auto* closed = std::get_if<LaneClosed>(&message)) {
    auto [place, fresh] = closed_.try_emplace(closed->lane, Closed{closed->runs, peer});
    if (!fresh && closed->runs < place->second.runs) place->second = {closed->runs, peer};
    CheckClosed(closed->lane);
  } else if (auto* question = std::get_if<StallQuestion>(&message)) {
    HandleQuestion(peer, *question);
  } else if (auto* probe = std::get_if<StallProbe>(&message)) {
    HandleProbe(*probe);
  } else if (auto* report = std::get_if<StallReport>(&message)) {
    HandleReport(peer, *report);
  } else if (auto* verdict = std::get_if<StallVerdict>(&message)) {
    HandleVerdict(*verdict);
  } else if (auto* all = std::get_if<EngineFailed>(&message)) {
    FailEverything(all->status, false);
  }
  SendAll(out);
}

// What the peer sent before stays good: only what waits for more from it fails (see LostByLeave). Calls that rank 0 has
// started need no more announcements; those that it has not started can never start.
void Engine::State::HandleLeave(int peer) {
  left_s_.try_emplace(peer, now_s_);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (gone < 0) gone = peer;
  }
  if (coordinator_ != nullptr) {
    std::vector<Outgoing> out;
    coordinator_->Leave(peer, &out);
    SendAll(out);
  }
  if (peer == 0) EndCalls(Communication(HasLeft(0)));
}

void Engine::State::Send(int peer, const ControlMessage& message) {
  if (peer == rank) {
    to_self_.push_back(message);
    return;
  }
  Status status = transport->SendControl(peer, Encode(message));
  if (!status.ok() && broken_.ok() && failure.ok()) broken_ = status;
}

void Engine::State::SendToOthers(const ControlMessage& message) {
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) Send(peer, message);
  }
}

void Engine::State::SendAll(const std::vector<Outgoing>& out) {
  for (const Outgoing& outgoing : out) Send(outgoing.peer, outgoing.message);
}

void Engine::State::FailEverything(const Status& status, bool tell) {
  if (!failure.ok()) return;
  std::vector<Delivery> ended;
  Status fails = status;
  if (tell && status.code != Code::kStopped) {
    fails.message += config.numbers.empty() ? "; nothing works until shutdown() and init()"
                                            : "; nothing works" + InSet(config.numbers) +
                                                  " until all ranks remove and add it, or shutdown() and init()";
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    failure = fails;
    for (const std::shared_ptr<Channel>& channel : channels) {
      if (channel != nullptr) channel->Fail(fails, &ended);
    }
  }
  if (tell) SendToOthers(EngineFailed{fails});
  executor.FailAll(fails);
  EndCalls(fails);
  for (Delivery& delivery : ended) delivery.deliver(delivery.status, delivery.data);
}

void Engine::State::FailLane(int64_t lane, const Status& status, bool tell) {
  std::vector<Delivery> ended;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!lane_failures.try_emplace(lane, status).second) return;
    bool open = lane > kCallsLane && lane <= static_cast<int64_t>(channels.size());
    const std::shared_ptr<Channel>& channel = open ? channels[static_cast<size_t>(lane - 1)] : nullptr;
    if (channel != nullptr) channel->Fail(status, &ended);
  }
  if (tell) {
    SendToOthers(LaneFailed{lane, Communication("rank " + std::to_string(Number(rank)) + ": " + status.message)});
  }
  executor.Fail(lane, status);
  for (Delivery& delivery : ended) delivery.deliver(delivery.status, delivery.data);
}

bool Engine::State::Expecting() const {
  return executor.busy() || !open_calls_.empty() || !inquiries_.empty() ||
         (coordinator_ != nullptr && coordinator_->waiting());
}

// How long to sleep after a pass; 0: look again, negative: at once.
double Engine::State::Pause(bool moved) const {
  if (moved) return -1;
  double quiet_s = now_s_ - moved_s_;
  bool expecting = Expecting();
  if (expecting && quiet_s < kSpin_s) return 0;
  if (transport->Rings()) return expecting ? kRungSleep_s : kIdleRungSleep_s;
  double longest_s = expecting && quiet_s < kPatience_s ? kExpectingSleep_s : kLongestSleep_s;
  if (!expecting && !transport->ControlPending()) longest_s = config.idle_s;
  return std::min(std::max(quiet_s * kSleepShare, kShortestSleep_s), longest_s);
}

void Engine::State::Sleep(uint32_t seen, double pause_s, Doorbell::Who who) {
  if (pause_s == 0) std::this_thread::yield();
  if (pause_s > 0) transport->doorbell()->Sleep(seen, pause_s, who);
}

// Gives work under way its time, then ends what is left.
void Engine::State::Drain() {
  double begun_s = NowSeconds();
  moved_s_ = begun_s;
  while (true) {
    bool moved = Pass(false);
    bool working = executor.busy() || !open_calls_.empty();
    if (!failure.ok() || !working || now_s_ - moved_s_ > config.drain_s) break;
    if (now_s_ - begun_s > kDrainPatience * config.drain_s) break;
    Sleep(looked_at_, Pause(moved), Doorbell::kOwner);
  }
  if (failure.ok() && (executor.busy() || !open_calls_.empty())) alone = true;
  whole_ = failure.ok() && !alone && lane_failures.empty();
  // The inbox is empty and stays so: every entry point has seen `stopping` since.
  FailEverything(Stopped("the engine has been shut down before this ended"), false);
  if (executor.abandoned()) alone = true;
}

// The last words to the peers, and theirs. The time also lets the transport move what it still holds of our last
// messages.
void Engine::State::Farewell() {
  SendToOthers(ShuttingDown{});
  double begun_s = NowSeconds();
  moved_s_ = begun_s;
  while (static_cast<int>(left_s_.size()) < size - 1 || transport->ControlPending()) {
    // They go on, perhaps for long: rank 0 may save a model. Our last words reach them, and MPI_Finalize waits for
    // them.
    if (now_s_ - begun_s > config.farewell_s) {
      if (transport->ControlPending()) alone = true;
      return;
    }
    looked_at_ = transport->doorbell()->Look();
    now_s_ = NowSeconds();
    received_s_ = 0;
    bool moved = ReceiveMessages();
    if (!broken_.ok()) {  // the transport is broken: nobody can be heard
      alone = true;
      return;
    }
    if (moved) moved_s_ = now_s_;
    Sleep(looked_at_, Pause(moved), Doorbell::kOwner);
  }
  quiet = whole_ && !alone;
}

}  // namespace hvd_ext

// Who moves the work: the engine's thread, or a caller that would only wait for it. One at a time has the turn; all
// that is "on the engine's thread" is with it.
#include <utility>

#include "engine/engine_state.h"

namespace hvd_ext {

bool Engine::State::TakeTurn(bool wait) {
  if (wait) {
    turn_.lock();
  } else if (!turn_.try_lock()) {
    return false;
  }
  mover = std::this_thread::get_id();
  return true;
}

void Engine::State::EndTurn() {
  mover = std::thread::id();
  turn_.unlock();
}

bool Engine::State::BeginHelp() {
  if (IsMover() || !TakeTurn(false)) return false;
  transport->doorbell()->Relieve();
  return true;
}

void Engine::State::Help(const std::atomic<bool>& ended) {
  while (!ended && !StopRequested()) {
    double pause_s = Pause(Pass(true));
    if (!ended) Sleep(looked_at_, pause_s, Doorbell::kCaller);
  }
}

void Engine::State::EndHelp() {
  // What is still expected may need another look without a ring: of the clock, or at MPI.
  uint32_t seen = Expecting() || StopRequested() ? looked_at_ - 1 : looked_at_;
  EndTurn();
  transport->doorbell()->Resume(seen);
}

Engine::Helper::Helper(Engine* engine) : state_(engine->state_), helps_(state_->BeginHelp()) {}

Engine::Helper::~Helper() {
  if (helps_) state_->EndHelp();
}

// The help ends here and not with the helper: a caller that waits on, because the engine stops, must not keep the turn
// from the thread that ends what it waits for.
void Engine::Helper::Until(const std::atomic<bool>& ended) {
  if (!std::exchange(helps_, false)) return;
  state_->Help(ended);
  state_->EndHelp();
}

}  // namespace hvd_ext

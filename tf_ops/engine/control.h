// An engine's control messages: sending them, taking them in order, and which peers have sent their last.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "engine/coordinator.h"
#include "engine/core.h"
#include "engine/message.h"

namespace hvd_ext {

class Control {
 public:
  explicit Control(Core* core) : core_(core) {}

  // A failure to send breaks the engine (Core::Break).
  void Send(int peer, ControlMessage message) HVD_EXT_REQUIRES(progress_role);
  void SendToOthers(const ControlMessage& message) HVD_EXT_REQUIRES(progress_role);
  void SendAll(std::vector<Outgoing> out) HVD_EXT_REQUIRES(progress_role);

  // The next message that this rank has sent to itself; false: there is none.
  bool TakeOwn(ControlMessage* message) HVD_EXT_REQUIRES(progress_role);
  // The next message of a peer; *peer is -1 where none has come.
  Status TakePeers(int* peer, ControlMessage* message) HVD_EXT_REQUIRES(progress_role);

  void NoteLeft(int peer) HVD_EXT_REQUIRES(progress_role) { left_s_.try_emplace(peer, core_->now_s); }
  bool HasLeft(int peer) const HVD_EXT_REQUIRES(progress_role) { return left_s_.count(peer) > 0; }
  bool AllHaveLeft() const HVD_EXT_REQUIRES(progress_role) {
    return static_cast<int>(left_s_.size()) >= core_->size - 1;
  }
  // When the peer has left; negative: it has not.
  double LeftAt(int peer) const HVD_EXT_REQUIRES(progress_role);

 private:
  void SendBytes(int peer, std::string bytes) HVD_EXT_REQUIRES(progress_role);

  Core* const core_;
  std::deque<ControlMessage> to_self_ HVD_EXT_GUARDED_BY(progress_role);
  std::map<int, double> left_s_ HVD_EXT_GUARDED_BY(progress_role);
};

}  // namespace hvd_ext

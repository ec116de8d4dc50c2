#include "engine/control.h"

#include <string>
#include <utility>

namespace hvd_ext {

void Control::Send(int peer, ControlMessage message) {
  if (peer == core_->rank) {
    to_self_.push_back(std::move(message));
  } else {
    SendBytes(peer, Encode(message));
  }
}

void Control::SendBytes(int peer, std::string bytes) {
  Status status = core_->transport->SendControl(peer, std::move(bytes));
  if (!status.ok() && core_->failure.ok()) core_->Break(std::move(status));
}

void Control::SendToOthers(const ControlMessage& message) {
  const std::string bytes = Encode(message);
  for (int peer = 0; peer < core_->size; ++peer) {
    if (peer != core_->rank) SendBytes(peer, bytes);
  }
}

void Control::SendAll(std::vector<Outgoing> out) {
  for (Outgoing& outgoing : out) Send(outgoing.peer, std::move(outgoing.message));
}

bool Control::TakeOwn(ControlMessage* message) {
  if (to_self_.empty()) return false;
  *message = std::move(to_self_.front());
  to_self_.pop_front();
  return true;
}

Status Control::TakePeers(int* peer, ControlMessage* message) {
  std::string bytes;
  HVD_EXT_RETURN_IF_ERROR(core_->transport->ReceiveControl(peer, &bytes));
  return *peer < 0 ? Status::Ok() : Decode(bytes, message);
}

double Control::LeftAt(int peer) const {
  auto left = left_s_.find(peer);
  return left == left_s_.end() ? -1 : left->second;
}

}  // namespace hvd_ext

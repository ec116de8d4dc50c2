#include "engine/transport.h"

namespace hvd_ext {

Status Transport::MeantForAnother(int peer, const Label& expected, const Label& came) const {
  auto words = [this](const Label& label) {
    std::string run = names_ ? names_(label) : "run " + std::to_string(label.run);
    return label.segment == 0 ? run : run + ", segment " + std::to_string(label.segment);
  };
  return Internal("a message from rank " + std::to_string(peer) + " belongs to " + words(came) + ", but " +
                  words(expected) + " was to receive it: the ranks have counted their messages differently");
}

Status Transport::OfAnotherSize(int peer, int64_t tag, int64_t expected_nbytes, int64_t came_nbytes) {
  return Internal("a message from rank " + std::to_string(peer) + " with tag " + std::to_string(tag) + ": " +
                  std::to_string(came_nbytes) + " bytes were sent, but " + std::to_string(expected_nbytes) +
                  " were expected");
}

Status Transport::CheckMet(int peer, const Label& expected, int64_t expected_nbytes, const Label& came,
                           int64_t came_nbytes) const {
  if (!came.Belongs(expected)) return MeantForAnother(peer, expected, came);
  if (came_nbytes != expected_nbytes) return OfAnotherSize(peer, expected.tag, expected_nbytes, came_nbytes);
  return Status::Ok();
}

}  // namespace hvd_ext

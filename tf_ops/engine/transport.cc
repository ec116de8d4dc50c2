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

}  // namespace hvd_ext

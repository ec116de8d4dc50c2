// A collect that has come to its end.
#pragma once

#include <vector>

#include "engine/engine.h"

namespace hvd_ext {

// Call `deliver(status, data, memory)`, then let go of `memory`.
struct Delivery {
  Deliver deliver;
  Status status;
  const void* data = nullptr;
  Memory memory;
};

inline void DeliverAll(const std::vector<Delivery>& ended) {
  for (const Delivery& delivery : ended) delivery.deliver(delivery.status, delivery.data, delivery.memory);
}

}  // namespace hvd_ext

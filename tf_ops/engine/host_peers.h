// The ranks of a job that share memory with this one, and what they share. See MakeHostTransport in transport.h.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/device.h"
#include "engine/host_ring.h"
#include "engine/transport.h"
#include "shm/arena.h"
#include "shm/doorbell.h"

namespace hvd_ext {

struct HostPeer {
  std::shared_ptr<MappedArena> memory;
  HostRing out, in;  // the ring that this rank writes to, and the one that the peer writes to
  std::unique_ptr<Doorbell> bell;
  Medium medium = Medium::kNone;
};

// Fills `peers` by rank; null where `between` carries the messages to that rank. Both ranks of a pair come to the same
// answer. All ranks call it together, before any other message: it uses tag 0. `bell` lies in `arena`. `device` may be
// null.
Status FindHostPeers(Transport* between, const std::shared_ptr<Arena>& arena, Doorbell::Word* bell, Device* device,
                     std::vector<std::unique_ptr<HostPeer>>* peers);

}  // namespace hvd_ext

// Which ranks of a job share memory with this one, and what it shares with each. See transport.h: MakeHostTransport.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/arena.h"
#include "engine/doorbell.h"
#include "engine/host_ring.h"
#include "engine/transport.h"

namespace hvd_ext {

struct HostPeer {
  std::shared_ptr<MappedArena> memory;
  HostRing out, in;  // what we write to it; what it writes to us
  std::unique_ptr<Doorbell> bell;
};

// By rank; null: `between` carries what goes to it. Both ranks of a pair come to the same answer. All ranks call it
// together, before other messages: it uses tag 0. `bell` lies in `arena`.
Status FindHostPeers(Transport* between, const std::shared_ptr<Arena>& arena, Doorbell::Word* bell,
                     std::vector<std::unique_ptr<HostPeer>>* peers);

}  // namespace hvd_ext

// Transports over shared memory between ranks that are threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "engine/transport.h"
#include "harness.h"
#include "ranks.h"
#include "shm/arena.h"

namespace hvd_ext::test {

// Puts shared memory in front of each; a rank whose arena is null has none.
inline std::vector<std::shared_ptr<Transport>> ShareMemory(const std::vector<std::shared_ptr<Transport>>& between,
                                                           const std::vector<std::shared_ptr<Arena>>& arenas) {
  std::vector<std::shared_ptr<Transport>> transports(between.size());
  RunThreads(
      static_cast<int>(between.size()),
      [&](int rank) { CHECK_OK(MakeHostTransport(between[rank], arenas[rank], &transports[rank])); },
      [&] { between[0]->Abort(1); });
  return transports;
}

inline std::vector<std::shared_ptr<Arena>> Arenas(int size, int64_t capacity) {
  std::vector<std::shared_ptr<Arena>> arenas(static_cast<size_t>(size));
  for (std::shared_ptr<Arena>& arena : arenas) CHECK_OK(Arena::Make(capacity, &arena));
  return arenas;
}

// The rings of 8 ranks take 116 kB: in the small ones nearly all messages are in other memory.
constexpr int64_t kRoomyArena = 64 << 20, kSmallArena = 130 << 10;

template <int64_t kCapacity>
std::vector<std::shared_ptr<Transport>> MakeHostTransports(int size) {
  return ShareMemory(MakeThreadTransports(size), Arenas(size, kCapacity));
}

}  // namespace hvd_ext::test

// Memory of a rank that the other ranks of its host can map, so that a message between them is not copied on its way.
//
// It is a memory file without a name: nothing is left behind, however the process ends. The whole range of addresses is
// mapped once and at both ends; its pages are reserved as they are asked for.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

#include "engine/status.h"

namespace hvd_ext {

// What a peer needs to map an arena, and to be sure that it is the right one: a process id means another process in
// another container.
struct ArenaAddress {
  int64_t pid = -1;
  int64_t fd = -1;  // -1: no arena
  int64_t capacity = 0;
  std::array<uint64_t, 2> token{};  // random; the arena begins with it
};

class Arena {
 public:
  // Of at most `capacity` bytes, no page of which is reserved yet. Fails where the system has no such memory.
  static Status Make(int64_t capacity, std::shared_ptr<Arena>* arena);
  // As large as this host's memory, up to 64 GiB; addresses cost nothing. 0, so no arena, where they are limited.
  static int64_t DefaultCapacity();
  ~Arena();

  // 64-byte aligned, zeros; null when the arena or the host's memory is full. Any thread. It is given back with the
  // arena.
  char* Take(int64_t nbytes);
  bool Owns(const void* data) const {
    const char* at = static_cast<const char*>(data);
    return at >= base_ && at < base_ + address_.capacity;
  }
  int64_t OffsetOf(const void* data) const { return static_cast<const char*>(data) - base_; }
  const ArenaAddress& address() const { return address_; }

 private:
  friend class MappedArena;
  Arena(char* base, const ArenaAddress& address);

  char* const base_;
  const ArenaAddress address_;
  std::mutex mutex_;
  int64_t used_, reserved_ = 0;
};

// Another rank's arena, mapped here; stays valid when that rank has ended. Ranks of one process share their mappings,
// so that sanitizers see what they share.
class MappedArena {
 public:
  static Status Open(const ArenaAddress& address, std::shared_ptr<MappedArena>* mapped);
  ~MappedArena();

  // Null where the range is not inside the arena.
  char* At(int64_t offset, int64_t nbytes) const {
    bool inside = offset >= 0 && nbytes >= 0 && offset <= capacity_ - nbytes;
    return inside ? base_ + offset : nullptr;
  }

 private:
  MappedArena(char* base, int64_t capacity, std::shared_ptr<Arena> own);

  char* const base_;
  const int64_t capacity_;
  const std::shared_ptr<Arena> own_;  // of this process: then nothing was mapped
};

}  // namespace hvd_ext

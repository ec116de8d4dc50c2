// Memory of a process that the other processes of its host can map, so that what it holds need not be copied to them.
//
// An arena is a memory file without a name, so that nothing is left behind, however the process ends. Owner and peers
// map the whole range of addresses once; pages are reserved when memory is taken, or by whoever is about to use them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"

namespace hvd_ext {

// What a peer needs to map an arena, and to check that it is the right one: in another container the same process id
// means another process.
struct ArenaAddress {
  int64_t pid = -1;
  int64_t fd = -1;  // -1: no arena
  int64_t capacity = 0;
  std::array<uint64_t, 2> token{};  // random; the arena begins with it
};

class Arena {
 public:
  // Makes an arena of at most `capacity` bytes, with no page reserved yet. Fails where the system has no such memory.
  static Status Make(int64_t capacity, std::shared_ptr<Arena>* arena);
  // Returns the size of this host's memory, but at most 64 GiB: addresses that are not used cost nothing. Returns 0,
  // which means no arena, if the process's address space is limited.
  static int64_t DefaultCapacity();
  ~Arena();

  // Returns memory of zeros, 64-byte aligned, or null when the arena or the host's memory is full. Any thread may call
  // it. The memory is given back only with the arena.
  char* Take(int64_t nbytes);
  bool Owns(const void* data) const {
    const char* at = static_cast<const char*>(data);
    return at >= base_ && at < base_ + address_.capacity;
  }
  // Calls `pin` for the pages that are reserved and for those that are reserved later, and `unpin` for each of these
  // ranges before it is unmapped. Once at most.
  void PinBy(std::function<void(char*, int64_t)> pin, std::function<void(char*)> unpin);
  int64_t OffsetOf(const void* data) const { return static_cast<const char*>(data) - base_; }
  const ArenaAddress& address() const { return address_; }

 private:
  friend class MappedArena;
  Arena(char* base, const ArenaAddress& address);
  void Pin(int64_t offset, int64_t nbytes) HVD_EXT_REQUIRES(mutex_);

  char* const base_;
  const ArenaAddress address_;
  Mutex mutex_;
  int64_t used_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  int64_t reserved_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  std::function<void(char*, int64_t)> pin_ HVD_EXT_GUARDED_BY(mutex_);
  std::function<void(char*)> unpin_ HVD_EXT_GUARDED_BY(mutex_);
  std::vector<char*> pinned_ HVD_EXT_GUARDED_BY(mutex_);
};

// Another rank's arena, mapped here. It stays valid after that rank has ended. Ranks of one process share one mapping,
// so that sanitizers see the memory that they share.
class MappedArena {
 public:
  // With `reserves` the mapping can reserve pages, for which it keeps a descriptor of the file.
  static Status Open(const ArenaAddress& address, std::shared_ptr<MappedArena>* mapped, bool reserves = false);
  ~MappedArena();

  // Reserves the pages of a range, after which any process may touch them: to touch a page that the system cannot
  // provide would end the process. Pages that are reserved already stay as they are. Fails where the host's memory is
  // full. Any thread may call it. Memory that the owner takes is reserved by Take.
  Status Reserve(int64_t offset, int64_t nbytes);
  char* base() const { return base_; }
  int64_t capacity() const { return capacity_; }

  // Returns the memory at an offset, or null if the range is not inside the arena.
  char* At(int64_t offset, int64_t nbytes) const {
    bool inside = offset >= 0 && nbytes >= 0 && offset <= capacity_ - nbytes;
    return inside ? base_ + offset : nullptr;
  }

 private:
  MappedArena(char* base, int64_t capacity, int fd, std::shared_ptr<Arena> own);

  char* const base_;
  const int64_t capacity_;
  const int fd_;                      // of another process's arena, where the mapping reserves; else -1
  const std::shared_ptr<Arena> own_;  // an arena of this process, whose mapping is used; null for another process's
};

}  // namespace hvd_ext

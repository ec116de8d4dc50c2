// How one rank tells another of its host what it sends: a queue in shared memory with one writer and one reader, in
// different processes. It lies in the reader's arena, so that it outlives the writer.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace hvd_ext {

struct HostEntry {
  enum Kind : int32_t {
    kZeroCopy = 1,  // a message that lies in the writer's arena at `offset`, until kTaken comes with its id
    kInline = 2,    // a message, in `bytes`
    kBetween = 3,   // a message that is not in the writer's arena: the transport between hosts carries it
    kTaken = 4,     // the writer of this entry no longer needs message `id`, which the reader has sent
    kControl = 5,   // a part of a control message, in `bytes`; `tag` is 1 if another part follows
    kOnDevice = 6,  // as kZeroCopy, at `offset` in the block of the writer's device that `bytes` names
  };
  static constexpr int64_t kBytes = 88;

  Kind kind;
  int32_t tag;
  uint32_t run, segment;  // of a message's label
  int64_t id;
  int64_t offset;
  int64_t nbytes;
  char bytes[kBytes];
};
static_assert(sizeof(HostEntry) == 128, "two cache lines");

class HostRing {
 public:
  static constexpr uint64_t kEntries = 128;

  // What lies in shared memory: zeros at the start, 64-byte aligned.
  struct Memory {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> starved;  // the writer waits for a place and must be rung when there is one
    alignas(64) HostEntry entries[kEntries];
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "other processes see the plain word");

  explicit HostRing(Memory* memory = nullptr) : memory_(memory) {}

  // The writer's side. False if the ring is full: the reader's Pop then says when there is a place.
  bool Write(const HostEntry& entry) {
    if (place_ - seen_ == kEntries) {
      memory_->starved.store(1, std::memory_order_seq_cst);
      seen_ = memory_->read.load(std::memory_order_seq_cst);
      if (place_ - seen_ == kEntries) return false;
      memory_->starved.store(0, std::memory_order_relaxed);
    }
    // Bytes that an entry's kind does not use are never read, and not copied.
    HostEntry* to = &memory_->entries[place_ % kEntries];
    bool bare =
        entry.kind == HostEntry::kZeroCopy || entry.kind == HostEntry::kBetween || entry.kind == HostEntry::kTaken;
    std::memcpy(to, &entry, bare ? offsetof(HostEntry, bytes) : sizeof(entry));
    memory_->written.store(++place_, std::memory_order_release);
    return true;
  }

  // The reader's side: the next entry, or null. It stays until Pop.
  const HostEntry* Front() {
    if (place_ == seen_) seen_ = memory_->written.load(std::memory_order_acquire);
    return place_ == seen_ ? nullptr : &memory_->entries[place_ % kEntries];
  }
  // Gives the entry's place back. True if the writer waits for it and must be rung.
  bool Pop() {
    memory_->read.store(++place_, std::memory_order_seq_cst);
    return memory_->starved.load(std::memory_order_seq_cst) != 0 && memory_->starved.exchange(0) != 0;
  }

 private:
  Memory* memory_;
  uint64_t place_ = 0;  // of the next entry to write or to read
  uint64_t seen_ = 0;   // how far the other side was when last looked at
};

}  // namespace hvd_ext

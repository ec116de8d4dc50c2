#include "shm/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace hvd_ext {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "the kernel and other processes see the plain word");

void Doorbell::Ring(bool from_peer) {
  // This order is sequentially consistent with the two steps of a sleeper: either the sleeper has set its bit before
  // this read, or it sees the ring.
  word_->rings.fetch_add(1, std::memory_order_seq_cst);
  uint32_t asleep = word_->asleep.load(std::memory_order_seq_cst);
  if (from_peer) asleep &= ~kIdleOwner;
  // Both bits are set when the duty has just changed hands; then both threads are woken.
  if (asleep != 0) syscall(SYS_futex, &word_->rings, FUTEX_WAKE_BITSET, 2, nullptr, nullptr, asleep);
}

void Doorbell::Sleep(uint32_t seen, double seconds, Who who, Hears hears) {
  timespec until{};  // FUTEX_WAIT_BITSET takes an absolute time
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t nanoseconds = until.tv_nsec + static_cast<int64_t>(seconds * 1e9);
  until.tv_sec += static_cast<time_t>(nanoseconds / 1000000000);
  until.tv_nsec = static_cast<long>(nanoseconds % 1000000000);
  const uint32_t all = BitsOf(who);
  if (hears != kNobody) word_->asleep.fetch_or(BitOf(who, hears), std::memory_order_seq_cst);
  // Resume may change what the owner hears while it sleeps, so it waits for either bit.
  if (Look() == seen) syscall(SYS_futex, &word_->rings, FUTEX_WAIT_BITSET, seen, &until, nullptr, all);
  if (hears != kNobody) word_->asleep.fetch_and(~all, std::memory_order_seq_cst);
}

void Doorbell::Relieve() { word_->asleep.fetch_and(~BitsOf(kOwner), std::memory_order_seq_cst); }

void Doorbell::Resume(Hears hears) { word_->asleep.fetch_or(BitOf(kOwner, hears), std::memory_order_seq_cst); }

}  // namespace hvd_ext

// Wakes a thread by an event, also from another process. A sleeper reads the bell, then looks for work, and sleeps only
// if the bell has not rung since it read it. Ringing costs one atomic addition while the other thread is awake, and a
// system call while it sleeps.
//
// Two threads may sleep at one bell: its owner, and a caller that does the owner's work while it waits. One of them is
// on duty, and a ring wakes only that one. An owner that is idle hears only its own process: what a peer sends before
// this process takes part can wait until it does, and would cost two switches between threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace hvd_ext {

class Doorbell {
 public:
  // What the two sides share. It may lie in memory that several processes map, and starts as zeros.
  struct Word {
    std::atomic<uint32_t> rings{0};
    std::atomic<uint32_t> asleep{0};  // the bits of those who sleep, and of what they hear
  };
  enum Who : uint32_t { kOwner = 1, kCaller = 2 };
  enum Hears : uint32_t { kNobody, kItsProcess, kAll };

  Doorbell() : word_(&own_) {}
  explicit Doorbell(Word* shared) : word_(shared) {}  // `shared` outlives the bell
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // Any thread may call it. A sleeper that looks for work after the ring sees what the caller wrote before it.
  void Ring(bool from_peer = true);
  // Returns how often the bell has rung, modulo 2^32.
  uint32_t Look() const { return word_->rings.load(std::memory_order_seq_cst); }
  // Sleeps until the bell has rung since Look returned `seen`, or until `seconds` have passed; it may also wake up
  // spuriously. Rings that it does not hear do not wake it once it sleeps.
  void Sleep(uint32_t seen, double seconds, Who who = kOwner, Hears hears = kAll);
  // Puts a caller on duty: from now on a ring does not wake the owner, even if it sleeps.
  void Relieve();
  // Puts the owner on duty again. What has come before is not rung for again.
  void Resume(Hears hears);
  bool Asleep(Who who) const { return (word_->asleep.load(std::memory_order_seq_cst) & BitsOf(who)) != 0; }

 private:
  // Of an owner that hears only its process, in place of kOwner.
  static constexpr uint32_t kIdleOwner = 4;
  static uint32_t BitOf(Who who, Hears hears) {
    if (hears == kNobody) return 0;
    return who == kOwner && hears == kItsProcess ? kIdleOwner : static_cast<uint32_t>(who);
  }
  static uint32_t BitsOf(Who who) { return who == kOwner ? kOwner | kIdleOwner : static_cast<uint32_t>(who); }

  Word own_;
  Word* word_;
};

}  // namespace hvd_ext

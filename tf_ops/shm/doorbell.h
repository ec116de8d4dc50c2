// Waking a thread by event, also from another process: a sleeper looks at the bell, then for work, and sleeps only if
// nobody has rung since it looked. Ringing costs one atomic addition while the other is awake, and a system call while
// it sleeps.
//
// Two threads may sleep at one bell: its owner, and a caller that waits and does the owner's work meanwhile. One of
// them is on duty, and a ring wakes only that one.
#pragma once

#include <atomic>
#include <cstdint>

namespace hvd_ext {

class Doorbell {
 public:
  // What the two sides share. It may lie in memory that several processes map, and starts as zeros.
  struct Word {
    std::atomic<uint32_t> rings{0};
    std::atomic<uint32_t> asleep{0};  // a bit of Who for each that sleeps on duty
  };
  enum Who : uint32_t { kOwner = 1, kCaller = 2 };

  Doorbell() : word_(&own_) {}
  explicit Doorbell(Word* shared) : word_(shared) {}  // `shared` outlives the bell
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // Any thread. What was written before is seen by a sleeper that looks for work after it.
  void Ring();
  // How often it has rung, modulo 2^32.
  uint32_t Look() const { return word_->rings.load(std::memory_order_seq_cst); }
  // Sleeps until the bell has rung since Look gave `seen`, or the time is over; it may also end for no reason. Off
  // duty, rings do not end it.
  void Sleep(uint32_t seen, double seconds, Who who = kOwner, bool on_duty = true);
  // A caller goes on duty: a ring no longer wakes the owner, should it sleep.
  void Relieve();
  // The owner is on duty again, and is woken if the bell has rung since Look gave `seen`.
  void Resume(uint32_t seen);
  bool Asleep(Who who) const { return (word_->asleep.load(std::memory_order_seq_cst) & who) != 0; }

 private:
  Word own_;
  Word* word_;
};

}  // namespace hvd_ext

// Waking a thread by event, also from another process: a sleeper looks at the bell, then for work, and sleeps only if
// nobody has rung since it looked. Ringing costs one atomic addition while the other is awake, and a system call while
// it sleeps.
//
// Two may sleep at one bell, of whom one is on duty: the engine's thread, or a caller that waits and does its work
// meanwhile. Only who is on duty is woken.
#pragma once

#include <atomic>
#include <cstdint>

namespace hvd_ext {

class Doorbell {
 public:
  // What the two sides share; may lie in memory that several processes map, and starts as zeros.
  struct Word {
    std::atomic<uint32_t> rings{0};
    std::atomic<uint32_t> asleep{0};  // a bit for each that sleeps on duty
  };
  enum Who : uint32_t { kEngine = 1, kHelper = 2 };

  Doorbell() : word_(&own_) {}
  explicit Doorbell(Word* shared) : word_(shared) {}  // which outlives the bell
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // Any thread. What was written before is seen by a sleeper that looks for work after it.
  void Ring();
  // How often it has rung, modulo 2^32.
  uint32_t Look() const { return word_->rings.load(std::memory_order_seq_cst); }
  // Until it has rung since `seen` was looked at, or the time is over, or for no reason at all. Off duty: not for
  // rings.
  void Sleep(uint32_t seen, double seconds, Who who = kEngine, bool on_duty = true);
  // The helper takes over: the engine's thread is not woken, should it sleep.
  void Relieve();
  // ... and again for rings since `seen`.
  void Resume(uint32_t seen);
  bool Asleep(Who who) const { return (word_->asleep.load(std::memory_order_seq_cst) & who) != 0; }

 private:
  Word own_;
  Word* word_;
};

}  // namespace hvd_ext

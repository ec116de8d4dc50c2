// When the rounds of partial allreduces begin: pure logic, without messages, memory or a clock.
//
// A round is one allreduce of a whole step's gradients in which every rank takes part, also one that still computes its
// own: that one gives what it holds from earlier steps, or zeros. Step s of every rank takes the result of round s.
// Rank 0 hears which gradients are there and opens the rounds (RoundOpener); every rank decides for itself when it
// takes part in an open round, which is what bounds the staleness (RoundGate).
//
// Source: Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations"
// (eager-SGD), sections 4 and 5. The bound of Lemma 5.1 (4) is enforced for all modes here, and the quorum may be any.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "engine/spec.h"

namespace hvd_ext {

// The rank drawn for a round among `candidates` ranks, in [0, candidates): evenly, and the same for the same seed.
int64_t DrawnFor(uint64_t seed, int64_t round, int64_t candidates);

// What a round waits for that is not open.
struct RoundWait {
  int64_t round = 0;
  bool begun = false;      // some rank's gradient for it is there, so that this rank waits
  int64_t count = 0;       // of gradients
  std::vector<int> ranks;  // whose; `count` of these
};

// On rank 0: which rounds are open.
class RoundOpener {
 public:
  RoundOpener(const PartialSpec& rules, int size);

  // The gradient of the rank's step `step` is there. With `full` the round of this step waits for all ranks.
  void Arrive(int rank, int64_t step, bool full);
  // The rank gives no gradients until all ranks have left: no draw takes it, and no round waits for it.
  void Leave(int rank);
  void SetQuorum(int64_t quorum) { rules_.quorum = quorum; }

  // The newest open round.
  int64_t Opened();
  // Whether all ranks have left, which is answered once; they are back afterwards.
  bool TakeEnd();
  // What the round after the newest open one waits for.
  RoundWait Waits() const { return WaitOf(opened_ + 1); }

 private:
  struct Rank {
    int64_t arrived = 0;
    bool left = false;
  };
  RoundWait WaitOf(int64_t round) const;

  PartialSpec rules_;
  std::vector<Rank> ranks_;
  int64_t opened_ = 0;
  int64_t full_ = 0;  // the newest round that waits for all ranks
};

// On every rank: which open rounds it takes part in now.
class RoundGate {
 public:
  explicit RoundGate(int64_t staleness) : staleness_(staleness) {}

  void Arrive(int64_t step) { arrived_ = step; }  // this rank's gradient of the step is there, or the step has none
  void Open(int64_t round);                       // all rounds up to this one are open
  void Leave() { end_ = std::numeric_limits<int64_t>::max(); }
  void End(int64_t last);  // all ranks have left, after this round
  void Return() { end_ = 0; }

  // Begins the next round, if it is open and the bound allows it. *on_time: the gradient of its step is there.
  bool Begin(int64_t* round, bool* on_time);

  // Whether the next round is open, and the bound does not allow it. It holds for rounds that come after the end.
  bool AtBound() const { return begun_ < opened_ && begun_ >= end_ && begun_ + 1 - arrived_ > staleness_; }

  int64_t arrived() const { return arrived_; }
  int64_t begun() const { return begun_; }

 private:
  const int64_t staleness_;
  int64_t arrived_ = 0, opened_ = 0, begun_ = 0;
  int64_t end_ = 0;  // of a rank that has left: the last round in which it takes part without gradients
};

}  // namespace hvd_ext

#include "engine/rounds.h"

#include <algorithm>

namespace hvd_ext {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014): a full-period sequence of 64-bit numbers by a counter.
uint64_t Mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

// The remainder of a number from the last, incomplete stretch of 2^64 would favour small ranks: such a number is drawn
// again.
int64_t DrawnFor(uint64_t seed, int64_t round, int64_t candidates) {
  const uint64_t count = static_cast<uint64_t>(candidates);
  const uint64_t largest = UINT64_MAX - UINT64_MAX % count;
  uint64_t drawn = Mixed(Mixed(seed) ^ static_cast<uint64_t>(round));
  while (drawn >= largest) drawn = Mixed(drawn);
  return static_cast<int64_t>(drawn % count);
}

RoundOpener::RoundOpener(const PartialSpec& rules, int size) : rules_(rules), ranks_(static_cast<size_t>(size)) {}

void RoundOpener::Arrive(int rank, int64_t step, bool full) {
  Rank& one = ranks_[static_cast<size_t>(rank)];
  one.arrived = std::max(one.arrived, step);
  if (full) full_ = std::max(full_, step);
}

void RoundOpener::Leave(int rank) { ranks_[static_cast<size_t>(rank)].left = true; }

int64_t RoundOpener::Opened() {
  for (RoundWait next = Waits(); next.begun && next.count == 0; next = Waits()) ++opened_;
  return opened_;
}

bool RoundOpener::TakeEnd() {
  if (!std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.left; })) return false;
  for (Rank& rank : ranks_) rank = {opened_, false};
  return true;
}

RoundWait RoundOpener::WaitOf(int64_t round) const {
  RoundWait wait;
  wait.round = round;
  std::vector<int> candidates;  // the ranks that give a gradient to this round, now or later
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const bool here = ranks_[i].arrived >= round;
    if (here || !ranks_[i].left) candidates.push_back(static_cast<int>(i));
    if (!here && !ranks_[i].left) wait.ranks.push_back(static_cast<int>(i));
  }
  const int64_t size = static_cast<int64_t>(candidates.size()), missing = static_cast<int64_t>(wait.ranks.size());
  wait.begun = missing < size;
  if (round <= full_ || rules_.sync == Sync::kFull) {
    wait.count = missing;
  } else if (rules_.sync == Sync::kMajority && wait.begun) {
    const int drawn = candidates[static_cast<size_t>(DrawnFor(rules_.seed, rules_.before + round, size))];
    wait.count = ranks_[static_cast<size_t>(drawn)].arrived >= round ? 0 : 1;
    wait.ranks = {drawn};
  } else {
    const int64_t quorum = rules_.sync == Sync::kQuorum ? std::min(rules_.quorum, size) : 1;
    wait.count = std::max<int64_t>(0, quorum - (size - missing));
  }
  if (wait.count == 0) wait.ranks.clear();
  return wait;
}

void RoundGate::Open(int64_t round) { opened_ = std::max(opened_, round); }

void RoundGate::End(int64_t last) {
  Open(last);
  end_ = last;
}

bool RoundGate::Begin(int64_t* round, bool* on_time) {
  if (begun_ >= opened_ || AtBound()) return false;
  *round = ++begun_;
  *on_time = arrived_ >= begun_;
  return true;
}

}  // namespace hvd_ext

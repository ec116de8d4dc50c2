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

RoundOpener::RoundOpener(const RoundRules& rules, int size) : rules_(rules), ranks_(static_cast<size_t>(size)) {}

void RoundOpener::Arrive(int rank, int64_t step, bool full) {
  Rank& one = ranks_[static_cast<size_t>(rank)];
  one.arrived = std::max(one.arrived, step);
  if (full) full_ = std::max(full_, step);
}

void RoundOpener::Leave(int rank) { ranks_[static_cast<size_t>(rank)].left = true; }

int64_t RoundOpener::Opened() {
  while (MayOpen(opened_ + 1)) ++opened_;
  return opened_;
}

bool RoundOpener::TakeEnd() {
  if (!std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.left; })) return false;
  for (Rank& rank : ranks_) rank = {opened_, false};
  return true;
}

bool RoundOpener::MayOpen(int64_t round) const {
  std::vector<bool> here;  // of the ranks that give a gradient to this round, now or later
  for (const Rank& rank : ranks_) {
    if (rank.arrived >= round || !rank.left) here.push_back(rank.arrived >= round);
  }
  const int64_t candidates = static_cast<int64_t>(here.size());
  const int64_t arrived = std::count(here.begin(), here.end(), true);
  if (arrived == 0) return false;
  if (round <= full_) return arrived == candidates;
  switch (rules_.sync) {
    case Sync::kFull:
      return arrived == candidates;
    case Sync::kSolo:
      return true;
    case Sync::kMajority:
      return here[static_cast<size_t>(DrawnFor(rules_.seed, rules_.before + round, candidates))];
    case Sync::kQuorum:
      return arrived >= std::min(rules_.quorum, candidates);
  }
  return false;
}

void RoundGate::Open(int64_t round) { opened_ = std::max(opened_, round); }

bool RoundGate::Begin(int64_t* round, bool* on_time) {
  const bool waits = !left_ && begun_ + 1 - arrived_ > staleness_;  // for this rank's gradient
  if (begun_ >= opened_ || waits) return false;
  *round = ++begun_;
  *on_time = arrived_ >= begun_;
  return true;
}

}  // namespace hvd_ext

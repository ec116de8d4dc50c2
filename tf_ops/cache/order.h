// The order of an epoch: which sample stands at which position. It is a pure function of (seed, epoch, samples, parts,
// shuffle), computed for one position at a time without memory, so that every rank knows its samples without a word to
// the others and training resumes anywhere. tests/epoch_order.py has the same function in NumPy.
//
// Position p lies in part k = p % parts, at place i = p / parts. Part k holds the samples k, k + parts, k + 2 parts,
// ... and is permuted in itself: the sample at p is k + parts * Permuted(i). So the ranks of a job with `parts` ranks
// read the same part in every epoch.
//
// The permutation is a Feistel network of eight rounds over the smallest power of four that holds the part, walked
// until the result lies in the part (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The
// mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
// 2014).
#pragma once

#include <array>
#include <cstdint>

#include "base/status.h"

namespace hvd_ext {

class EpochOrder {
 public:
  // `samples` and `parts` are at least 1; seed and epoch may be any numbers.
  static Status Make(int64_t seed, int64_t epoch, int64_t samples, int64_t parts, bool shuffle, EpochOrder* order);

  // Sets *number to the sample at a position of [0, samples). Consecutive calls for one part are quickest.
  Status NumberAt(int64_t position, int64_t* number);
  // The seed of a sample in this epoch: it depends on seed, epoch and number alone, not on parts or position.
  std::array<int32_t, 2> SeedOf(int64_t number) const;

 private:
  static constexpr int kRounds = 8;
  void TakePart(int64_t part);
  int64_t Permuted(int64_t place) const;

  int64_t samples_ = 1, parts_ = 1;
  bool shuffle_ = false;
  uint64_t state_ = 0;  // of (seed, epoch)
  // of the part that was asked for last
  int64_t part_ = -1, length_ = 0;
  int half_bits_ = 1;
  std::array<uint64_t, kRounds> keys_{};
};

}  // namespace hvd_ext

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
#include <vector>

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

// The steps of one rank in each epoch. hvd_ext/data/native.py has the same fields in the same order.
struct EpochSteps {
  int64_t number;      // of steps in an epoch, at least 1
  int64_t batch_size;  // of this rank
  int64_t full;        // whether all batches are full: the rank's first samples come again behind its last one
  int64_t samples, parts;
  int64_t rank, size;
  int64_t seed, shuffle;
  int64_t elements;  // the number of this rank's samples in an epoch
  // The epoch whose rest was divided among other ranks than its begin; -1: none. Its number; the step with which the
  // rest begins, before which steps are left out; the position of that step in the order; and the number of this rank's
  // samples at the end, counted as if it had had full batches before.
  int64_t again_epoch, again_step, again_position, again_elements;
};

// Sets the numbers and seeds of the samples of this rank in a step, which is counted through all epochs.
Status SamplesOf(const EpochSteps& steps, int64_t step, std::vector<int64_t>* numbers,
                 std::vector<std::array<int32_t, 2>>* seeds);

}  // namespace hvd_ext

#include "cache/order.h"

#include <algorithm>
#include <string>
#include <utility>

namespace hvd_ext {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x *= 0x94d049bb133111eb;
  x ^= x >> 31;
  return x;
}

// The length of x in binary, 0 for 0.
int Bits(uint64_t x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }

// The remainder that has the sign of the divisor.
int64_t Modulo(int64_t x, int64_t divisor) { return (x % divisor + divisor) % divisor; }

}  // namespace

Status EpochOrder::Make(int64_t seed, int64_t epoch, int64_t samples, int64_t parts, bool shuffle, EpochOrder* order) {
  if (samples < 1) return Invalid("samples (" + std::to_string(samples) + "): must be at least 1");
  if (parts < 1) return Invalid("parts (" + std::to_string(parts) + "): must be at least 1");
  EpochOrder made;
  made.samples_ = samples;
  made.parts_ = parts;
  made.shuffle_ = shuffle;
  made.state_ = Mix(Mix(static_cast<uint64_t>(seed) + kGolden) ^ (static_cast<uint64_t>(epoch) + kGolden));
  *order = made;
  return Status::Ok();
}

Status EpochOrder::NumberAt(int64_t position, int64_t* number) {
  if (position < 0 || position >= samples_) {
    return Invalid("position (" + std::to_string(position) + "): must be in [0, " + std::to_string(samples_) +
                   "), the number of samples");
  }
  if (!shuffle_) {
    *number = position;  // k + parts * i
    return Status::Ok();
  }
  int64_t part = position % parts_;
  if (part != part_) TakePart(part);
  *number = part + parts_ * Permuted(position / parts_);
  return Status::Ok();
}

std::array<int32_t, 2> EpochOrder::SeedOf(int64_t number) const {
  uint64_t mixed = Mix(state_ ^ Mix(static_cast<uint64_t>(number) + 3 * kGolden));
  return {static_cast<int32_t>(static_cast<uint32_t>(mixed)), static_cast<int32_t>(static_cast<uint32_t>(mixed >> 32))};
}

void EpochOrder::TakePart(int64_t part) {
  part_ = part;
  length_ = (samples_ - part + parts_ - 1) / parts_;
  half_bits_ = std::max(1, (Bits(static_cast<uint64_t>(length_ - 1)) + 1) / 2);
  uint64_t state = Mix(state_ ^ (static_cast<uint64_t>(part) + 2 * kGolden));
  for (int round = 0; round < kRounds; ++round) keys_[round] = Mix(state + (round + 1) * kGolden);
}

int64_t EpochOrder::Permuted(int64_t place) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1, length = static_cast<uint64_t>(length_);
  uint64_t value = static_cast<uint64_t>(place);
  do {
    uint64_t left = value >> half_bits_, right = value & mask;
    for (uint64_t key : keys_) left = std::exchange(right, left ^ (Mix(right ^ key) & mask));
    value = left << half_bits_ | right;
  } while (value >= length);
  return static_cast<int64_t>(value);
}

Status SamplesOf(const EpochSteps& steps, int64_t step, std::vector<int64_t>* numbers,
                 std::vector<std::array<int32_t, 2>>* seeds) {
  if (steps.number < 1) return Invalid("number (" + std::to_string(steps.number) + "): must be at least 1");
  const int64_t of_epoch = Modulo(step, steps.number), epoch = (step - of_epoch) / steps.number;
  EpochOrder order;
  Status status = EpochOrder::Make(steps.seed, epoch, steps.samples, steps.parts, steps.shuffle != 0, &order);
  if (!status.ok()) return status;
  const bool again = epoch == steps.again_epoch;
  const int64_t elements = again ? steps.again_elements : steps.elements;
  const int64_t shift = again ? steps.again_position - steps.again_step * steps.batch_size * steps.size : 0;
  const int64_t first = of_epoch * steps.batch_size;
  int64_t end = first + steps.batch_size;
  if (steps.full == 0 || elements < 1) end = std::min(end, elements);
  numbers->clear();
  seeds->clear();
  for (int64_t mine = first; mine < end; ++mine) {
    const int64_t position = Modulo(shift + mine % elements * steps.size + steps.rank, steps.samples);
    int64_t number = 0;
    status = order.NumberAt(position, &number);
    if (!status.ok()) return status;
    numbers->push_back(number);
    seeds->push_back(order.SeedOf(number));
  }
  return Status::Ok();
}

}  // namespace hvd_ext

// The order of an epoch: a permutation of each part, equal to what the NumPy reference gives (tests/unit/data).
#include <array>
#include <set>

#include "cache/order.h"
#include "harness.h"

namespace hvd_ext {
namespace {

EpochOrder Order(int64_t seed, int64_t epoch, int64_t samples, int64_t parts, bool shuffle = true) {
  EpochOrder order;
  CHECK_OK(EpochOrder::Make(seed, epoch, samples, parts, shuffle, &order));
  return order;
}

int64_t At(EpochOrder& order, int64_t position) {
  int64_t number = -1;
  CHECK_OK(order.NumberAt(position, &number));
  return number;
}

std::vector<int64_t> All(EpochOrder order, int64_t samples) {
  std::vector<int64_t> numbers;
  for (int64_t position = 0; position < samples; ++position) numbers.push_back(At(order, position));
  return numbers;
}

// Every sample once, and each in its part.
void CheckPermutation(const std::vector<int64_t>& numbers, int64_t parts) {
  std::vector<bool> seen(numbers.size());
  for (size_t position = 0; position < numbers.size(); ++position) {
    int64_t number = numbers[position];
    CHECK(number >= 0 && number < static_cast<int64_t>(numbers.size()));
    CHECK_EQ(number % parts, static_cast<int64_t>(position) % parts);
    CHECK(!seen[number]);
    seen[number] = true;
  }
}

TEST("an epoch's order is a permutation of each part, for all small numbers of samples and parts") {
  for (int64_t samples = 1; samples <= 40; ++samples) {
    for (int64_t parts = 1; parts <= 17; ++parts) {  // some parts are empty, or hold one sample
      CheckPermutation(All(Order(samples, parts, samples, parts), samples), parts);
    }
  }
}

TEST("an epoch's order is a permutation for primes, powers of two and their neighbours, any seeds and epochs") {
  for (int64_t samples : {127, 128, 129, 1009, 4095, 4096, 4097, 65537}) {
    for (int64_t parts : {1, 3, 8}) {
      for (int64_t seed : {INT64_C(0), INT64_C(-1), INT64_MAX, INT64_MIN}) {
        CheckPermutation(All(Order(seed, seed / 3, samples, parts), samples), parts);
      }
    }
  }
  CheckPermutation(All(Order(42, 7, 1280000, 4), 1280000), 4);
}

TEST("seed and epoch change the order, and without shuffle it is that of the numbers") {
  std::set<std::vector<int64_t>> orders;
  for (int64_t seed : {0, 1, 2}) {
    for (int64_t epoch : {0, 1, 2}) orders.insert(All(Order(seed, epoch, 50, 2), 50));
  }
  CHECK_EQ(orders.size(), size_t{9});
  std::vector<int64_t> plain = All(Order(5, 6, 50, 3, false), 50);
  for (int64_t position = 0; position < 50; ++position) CHECK_EQ(plain[position], position);
}

TEST("every sample comes to every place about equally often") {
  constexpr int kSamples = 5, kEpochs = 5000;
  int counts[kSamples][kSamples] = {};
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    std::vector<int64_t> numbers = All(Order(11, epoch, kSamples, 1), kSamples);
    for (int place = 0; place < kSamples; ++place) ++counts[place][numbers[place]];
  }
  for (auto& row : counts) {
    for (int count : row) CHECK(count > 850 && count < 1150);  // 1000 with a deviation of 28
  }
}

TEST("orders and seeds are these, in C++ and in NumPy") {
  struct Golden {
    int64_t seed, epoch, samples, parts, position, number;
    int32_t low, high;
  };
  const Golden table[] = {
      {0, 0, 1, 1, 0, 0, 1098042292, 1767912456},
      {7, 1, 10, 2, 0, 4, 891688806, -834644864},
      {7, 1, 10, 2, 9, 1, -960518527, 78769134},
      {7, 1, 10, 1, 4, 8, -187175881, 987359057},
      {-1, 3, 1000, 7, 123, 634, 298844181, -864034719},
      {4611686018427387904, 2, 1280000, 4, 1279999, 507159, -1903041753, 1458990278},
      {42, 89, 1281167, 8, 640000, 12272, 1074373597, -411078771},
      {42, 90, 1281167, 8, 640000, 381152, 1025195972, 1544542567},
      {5, -2, 4097, 3, 4096, 2983, -1392051706, -451491645},
      {123456789, 0, 3000000000, 1, 2999999999, 2957774327, 1928574218, 1185537113},
  };
  for (const Golden& one : table) {
    EpochOrder order = Order(one.seed, one.epoch, one.samples, one.parts);
    CHECK_EQ(At(order, one.position), one.number);
    std::array<int32_t, 2> pair = order.SeedOf(one.number);
    CHECK_EQ(pair[0], one.low);
    CHECK_EQ(pair[1], one.high);
  }
}

TEST("an order of no samples, of no parts or at a position outside is refused") {
  EpochOrder order;
  CHECK_FAILS(EpochOrder::Make(0, 0, 0, 1, true, &order), Code::kInvalid, "samples (0): must be at least 1");
  CHECK_FAILS(EpochOrder::Make(0, 0, 1, 0, true, &order), Code::kInvalid, "parts (0): must be at least 1");
  order = Order(0, 0, 10, 3);
  int64_t number = 0;
  CHECK_FAILS(order.NumberAt(10, &number), Code::kInvalid, "position (10): must be in [0, 10)");
  CHECK_FAILS(order.NumberAt(-1, &number), Code::kInvalid, "position (-1)");
}

TEST("the steps of all ranks have each sample once, also where the rest of an epoch was divided again") {
  for (int64_t size : {1, 2, 3, 5}) {
    std::set<int64_t> seen;
    for (int64_t rank = 0; rank < size; ++rank) {
      // 60 samples; in epoch 1 the 30 at the end are divided again, by steps of 2 samples a rank, the last of 15 steps
      const int64_t left = 30 / size, from = 15 - (left + 1) / 2;
      EpochSteps steps = {15, 2, 0, 60, 1, rank, size, 3, 1, 30, 1, from, 30, 2 * from + left};
      std::vector<int64_t> numbers;
      std::vector<std::array<int32_t, 2>> seeds;
      for (int64_t step = from; step < 15; ++step) {
        CHECK_OK(SamplesOf(steps, 15 + step, &numbers, &seeds));
        CHECK_EQ(numbers.size(), seeds.size());
        for (int64_t number : numbers) CHECK(seen.insert(number).second);
      }
      CHECK_OK(SamplesOf(steps, 14, &numbers, &seeds));  // the last step of epoch 0
      CHECK_EQ(numbers.size(), size_t{2});
      steps.full = 1;
      CHECK_OK(SamplesOf(steps, 15 + 14, &numbers, &seeds));
      CHECK_EQ(numbers.size(), size_t{2});
      steps.number = 0;
      CHECK_FAILS(SamplesOf(steps, 0, &numbers, &seeds), Code::kInvalid, "number (0): must be at least 1");
    }
    CHECK_EQ(seen.size(), size_t{30});
  }
}

}  // namespace
}  // namespace hvd_ext

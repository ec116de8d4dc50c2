// The store: what is put in comes out, in any order, from any thread, from memory, disk or both, up to the limits.
#include <algorithm>
#include <atomic>
#include <future>
#include <random>

#include "cache/format.h"
#include "cache_stores.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

int64_t SizeOf(int64_t number) {
  constexpr int64_t kSizes[] = {0, 1, 3, 16, 17, 4095, 4096, 30000};
  return number % 11 < 8 ? kSizes[number % 11] : number * 7919 % 20000;
}

// Threads go over all numbers in orders of their own, as the ranks of a job do: what is missing is loaded and inserted,
// what is pending is looked up again, and every byte is compared. Returns how often a sample was loaded.
int64_t Pass(const std::vector<std::shared_ptr<Store>>& stores, int64_t samples, int64_t batch, unsigned seed) {
  std::atomic<int64_t> loads{0};
  auto read_all = [&](size_t thread) {
    Store* store = stores[thread].get();
    std::vector<int64_t> order = AllOf(samples);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed + static_cast<unsigned>(thread)));
    for (int64_t at = 0; at < samples; at += batch) {
      std::vector<int64_t> numbers(order.begin() + at, order.begin() + std::min(at + batch, samples));
      for (bool wait : {false, true}) {
        const Seen seen = LookUp(store, numbers, wait);
        for (const auto& [place, bytes] : seen.there) {
          const int64_t number = numbers[static_cast<size_t>(place)];
          CHECK(bytes == BytesOf(number, SizeOf(number)));
        }
        for (int64_t place : seen.missing) {
          const int64_t number = numbers[static_cast<size_t>(place)];
          ++loads;
          Put(store, number, BytesOf(number, SizeOf(number)));
        }
        CHECK(!wait || seen.pending.empty());
        std::vector<int64_t> left;
        for (int64_t place : seen.pending) left.push_back(numbers[static_cast<size_t>(place)]);
        numbers = left;
      }
    }
  };
  std::vector<std::future<void>> threads;
  for (size_t t = 0; t < stores.size(); ++t) threads.push_back(std::async(std::launch::async, read_all, t));
  for (std::future<void>& thread : threads) thread.get();
  return loads;
}

// With memory (bit 0 of `places`) and a disk (bit 1).
StoreOptions OptionsIn(const Folder& folder, int64_t samples, int places) {
  StoreOptions options = OptionsFor(samples);
  if (places & 1) options.memory_bytes = 64 << 20;
  if (places & 2) options.disk = folder / std::to_string(places);
  return options;
}

TEST("cache: what is inserted is found, byte for byte, and what is not is missing") {
  Folder folder;
  for (int places = 1; places < 4; ++places) {  // memory, disk, both
    std::shared_ptr<Store> store = Opened(OptionsIn(folder, 100, places));
    CHECK_EQ(LookUp(store.get(), {5, 7}).missing.size(), 2u);
    // Pieces make up one record.
    std::string bytes = BytesOf(5, 1000);
    Piece pieces[] = {{bytes.data(), 400}, {nullptr, 0}, {bytes.data() + 400, 600}};
    bool stored = false;
    CHECK_OK(store->Insert(5, pieces, 3, &stored));
    CHECK(stored);
    CHECK(Put(store.get(), 7, ""));
    Seen seen = LookUp(store.get(), {7, 9, 5, 7});
    CHECK_EQ(seen.there.at(0), "");
    CHECK_EQ(seen.there.at(2), bytes);
    CHECK_EQ(seen.there.at(3), "");
    CHECK(seen.missing == std::vector<int64_t>{1});
    StoreStatistics s = store->Statistics();
    CHECK_EQ(s.misses, 3);
    CHECK_EQ(s.memory_hits + s.disk_hits, 3);
    CHECK_EQ(s.memory_hit_bytes + s.disk_hit_bytes, 1000);
    CHECK_EQ(s.memory_inserted, places & 1 ? 2 : 0);
    CHECK_EQ(s.memory_records, places & 1 ? 2 : 0);
    CHECK_EQ(s.disk_inserted_bytes, places & 2 ? 1000 : 0);
    CHECK_EQ(s.disk_records, places & 2 ? 2 : 0);
    CHECK_EQ(s.memory_open, places & 1);
    CHECK_EQ(s.disk_open, places >> 1);
    CHECK_EQ(s.passed_through + s.damaged + s.taken_over + s.waits, 0);
    CHECK(WarningsOf(store.get()).empty());
  }
}

TEST("cache: without a place all is missing, and nobody waits") {
  std::shared_ptr<Store> store = Opened(OptionsFor(10));
  for (bool wait : {false, true}) CHECK_EQ(LookUp(store.get(), {1, 1, 2}, wait).missing.size(), 3u);
  CHECK(!Put(store.get(), 1, "x"));
  CHECK_EQ(store->Statistics().passed_through, 1);
}

TEST("cache: wrong options and numbers are refused in words") {
  std::shared_ptr<Store> store;
  StoreOptions less_than_none = OptionsFor(3), no_claims = OptionsFor(3);
  less_than_none.memory_bytes = -5;
  no_claims.claim_s = 0;
  CHECK_FAILS(Store::Open(OptionsFor(-1), &store), Code::kInvalid, "samples (-1)");
  CHECK_FAILS(Store::Open(less_than_none, &store), Code::kInvalid, "memory_bytes (-5)");
  CHECK_FAILS(Store::Open(no_claims, &store), Code::kInvalid, "claim_s");
  store = Opened(OptionsFor(3));
  std::vector<int64_t> missing, pending;
  bool stored = false;
  for (int64_t number : {-1, 3}) {
    CHECK_FAILS(store->Lookup(&number, 1, false, nullptr, &missing, &pending), Code::kInvalid, "must be one of 0 .. 2");
    CHECK_FAILS(store->Insert(number, nullptr, 0, &stored), Code::kInvalid, "must be one of 0 .. 2");
    store->Release(&number, 1);
  }
  CHECK(LookUp(Opened(OptionsFor(0)).get(), {}).missing.empty());
}

TEST("cache: threads in random orders load each sample once, from memory, disk and both") {
  constexpr int64_t kSamples = 300;
  Folder folder;
  for (int places = 1; places < 4; ++places) {
    std::vector<std::shared_ptr<Store>> stores(4, Opened(OptionsIn(folder, kSamples, places)));
    // Each reads all: an entry that was not ready at the first look may be at the second.
    int64_t loads = Pass(stores, kSamples, 16, static_cast<unsigned>(places));
    CHECK_EQ(loads, kSamples);
    CHECK_EQ(Pass(stores, kSamples, 16, 77), 0);
    CHECK(WarningsOf(stores[0].get()).empty());
    CHECK_EQ(stores[0]->Statistics().damaged, 0);
  }
}

TEST("cache: stores of one disk and of one memory load each sample once") {
  constexpr int64_t kSamples = 250;
  Folder folder;
  StoreOptions options = OptionsIn(folder, kSamples, 2);
  CHECK_EQ(Pass({Opened(options), Opened(options), Opened(options)}, kSamples, 10, 1), kSamples);

  options = OptionsIn(folder, kSamples, 1);
  std::vector<std::shared_ptr<Store>> ranks{Opened(options), Opened(options), Opened(options)};
  std::vector<ArenaAddress> addresses{{}};  // that of a rank without memory
  for (const auto& rank : ranks) addresses.push_back(rank->memory_address());
  for (const auto& rank : ranks) {
    int64_t taken = -1;
    CHECK_OK(rank->ShareMemory(addresses, &taken));
    CHECK_EQ(taken, 1);
  }
  CHECK_EQ(Pass(ranks, kSamples, 10, 2), kSamples);
  for (const auto& rank : ranks) CHECK_EQ(rank->Statistics().memory_records, kSamples);
}

TEST("cache: memory of other data is not shared, and a rank that can map none keeps its own") {
  StoreOptions options = OptionsFor(10);
  options.memory_bytes = 1 << 20;
  std::shared_ptr<Store> one = Opened(options), same = Opened(options);
  options.fingerprint[1] ^= 1;
  std::shared_ptr<Store> other = Opened(options);
  int64_t taken = 5;
  CHECK_FAILS(other->ShareMemory({one->memory_address()}, &taken), Code::kInvalid, "must be of the same data");
  ArenaAddress away = one->memory_address();
  away.token[0] ^= 1;
  CHECK_OK(same->ShareMemory({away}, &taken));
  CHECK_EQ(taken, -1);
  CHECK(Put(same.get(), 1, "x"));
  CHECK_EQ(one->Statistics().memory_records, 0);
  // What is shared outlives the rank that made it.
  CHECK_OK(same->ShareMemory({away, one->memory_address()}, &taken));
  CHECK_EQ(taken, 1);
  CHECK_EQ(same->memory_address().fd, -1);
  CHECK(Put(one.get(), 3, "abc"));
  one.reset();
  CHECK_EQ(RecordOf(same.get(), 3), "abc");
}

TEST("cache: a record larger than a segment passes through, with one warning") {
  StoreOptions options = OptionsFor(4);
  options.memory_bytes = 200 << 20;
  std::shared_ptr<Store> store = Opened(options);
  std::string large = std::string(static_cast<size_t>(kLargestRecord) - 1000, 'x') + BytesOf(1, 1000);
  CHECK(Put(store.get(), 0, large));
  large += 'x';
  CHECK_EQ(LookUp(store.get(), {1}).missing.size(), 1u);
  CHECK(!Put(store.get(), 1, large));
  CHECK(!Put(store.get(), 2, large));
  MustWarn(store.get(), "sample 1 (67108833 bytes) must have at most 67108832");
  CHECK_EQ(LookUp(store.get(), {1}).missing.size(), 1u);  // its claim was given back
  CHECK(Put(store.get(), 3, "small"));                    // the place is still open
  large.pop_back();
  CHECK(RecordOf(store.get(), 0) == large);
}

TEST("cache: room for half of the records takes half of them, in memory and on disk, and then closes in words") {
  constexpr int64_t kSamples = 200, kBytes = 3072;
  Folder folder;
  for (bool disk : {false, true}) {
    StoreOptions options = OptionsFor(kSamples);
    int64_t room = kSamples / 2 * (kBytes + kRecordHead);
    if (disk) {
      options.disk = folder / "disk";
      options.disk_bytes = room;
    } else {
      options.memory_bytes = room;
    }
    std::shared_ptr<Store> store = Opened(options);
    int64_t stored = 0;
    for (int64_t i = 0; i < kSamples; ++i) stored += Put(store.get(), i, BytesOf(i, kBytes)) ? 1 : 0;
    CHECK_EQ(stored, kSamples / 2);
    StoreStatistics s = store->Statistics();
    CHECK_EQ(s.memory_records + s.disk_records, kSamples / 2);
    CHECK_EQ(s.passed_through, kSamples / 2);
    CHECK_EQ(s.memory_open + s.disk_open, 0);
    MustWarn(store.get(), "its limit of " + std::to_string(room) + " bytes is reached; 100 of 200 samples");
    for (int epoch = 0; epoch < 2; ++epoch) {
      Seen seen = LookUp(store.get(), AllOf(kSamples));  // nothing is claimed any more: nothing would be stored
      CHECK_EQ(seen.there.size(), size_t{kSamples} / 2);
      CHECK_EQ(seen.missing.size(), size_t{kSamples} / 2);
    }
  }
}

TEST("cache: what memory has no room for is found on disk, and what is on disk comes into memory") {
  constexpr int64_t kSamples = 300;
  Folder folder;
  StoreOptions options = OptionsFor(kSamples);
  options.memory_bytes = 500000;
  options.disk = folder / "disk";
  {
    std::shared_ptr<Store> store = Opened(options);
    CHECK_EQ(Pass({store}, kSamples, 32, 5), kSamples);
    StoreStatistics s = store->Statistics();
    CHECK(s.memory_records > 20 && s.memory_records < kSamples);
    CHECK_EQ(s.disk_records, kSamples);
    CHECK_EQ(s.passed_through, 0);
    CHECK_EQ(Pass({store}, kSamples, 32, 6), 0);
    StoreStatistics now = store->Statistics();
    CHECK_EQ(now.memory_hits - s.memory_hits, s.memory_records);
    CHECK_EQ(now.disk_hits - s.disk_hits, kSamples - s.memory_records);
  }
  options.memory_bytes = 64 << 20;  // another job, with more memory
  std::shared_ptr<Store> store = Opened(options);
  CHECK_EQ(Pass({store, store}, kSamples, 32, 7), 0);
  StoreStatistics s = store->Statistics();
  CHECK_EQ(s.memory_records, kSamples);
  CHECK_EQ(s.memory_inserted, kSamples);
  int64_t from_disk = s.disk_hits;
  CHECK_EQ(Pass({store}, kSamples, 32, 8), 0);
  CHECK_EQ(store->Statistics().disk_hits, from_disk);
}

TEST("cache: too little free memory closes memory before anybody is killed for it") {
  Folder root;
  auto left = [&](int64_t kb) {
    WriteFile(root / "proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: " + std::to_string(kb) + " kB\n");
  };
  StoreOptions options = OptionsFor(100);
  options.memory_bytes = 64 << 20;
  options.memory_root = root / "";
  left(500000);
  std::shared_ptr<Store> store = Opened(options);
  std::string bytes = BytesOf(1, 1 << 20);
  int64_t stored = 0;
  for (int64_t i = 0; i < 20; ++i) stored += Put(store.get(), i, bytes) ? 1 : 0;
  CHECK_EQ(stored, 20);
  WriteFile(root / "proc/self/cgroup", "0::/\n");
  WriteFile(root / "sys/fs/cgroup/memory.max", "100000000\n");
  WriteFile(root / "sys/fs/cgroup/memory.current", "95000000\n");
  for (int64_t i = 20; i < 60; ++i) stored += Put(store.get(), i, bytes) ? 1 : 0;
  CHECK(stored >= 20 && stored < 30);  // what was reserved before is used
  MustWarn(store.get(), "memory.max leaves 5000000 bytes, and 10000000 must stay free");
  CHECK_EQ(store->Statistics().memory_records, stored);
  CHECK(RecordOf(store.get(), 0) == bytes);
}

}  // namespace
}  // namespace hvd_ext::test

// The places of the store: what stays on disk and in memory with a name, and what is done about files that are damaged,
// of other data, or not ours.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "cache/api.h"
#include "cache/format.h"
#include "cache_stores.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kSamples = 40;

StoreOptions OnDisk(const Folder& folder) {
  StoreOptions options = OptionsFor(kSamples);
  options.disk = folder / "disk";
  return options;
}

StoreOptions Kept(const Folder& folder) {
  StoreOptions options = OptionsFor(kSamples);
  options.memory_bytes = 1 << 20;
  options.keep = folder / "kept";
  return options;
}

std::vector<StoreOptions> Places(const Folder& folder) { return {OnDisk(folder), Kept(folder)}; }

std::string IndexOf(const StoreOptions& options) {
  return options.keep.empty() ? options.disk + "/index" : options.keep;
}

void Fill(const StoreOptions& options) {
  std::shared_ptr<Store> store = Opened(options);
  for (int64_t i = 0; i < kSamples; ++i) CHECK(Put(store.get(), i, BytesOf(i, 1000 + i)));
  CHECK(WarningsOf(store.get()).empty());
}

// Where the record of a sample lies among the records: the first bytes follow each other as they came.
int64_t RecordAt(int64_t number) {
  int64_t at = 0;
  for (int64_t i = 0; i < number; ++i) at += (kRecordHead + 1000 + i + kUnit - 1) / kUnit * kUnit;
  return at;
}

// Damages the byte at `at` of the record of a sample.
void Damage(const StoreOptions& options, int64_t number, int64_t at) {
  if (options.keep.empty()) Flip(options.disk + "/segment-000000", RecordAt(number) + at);
  if (!options.keep.empty()) Flip(options.keep, 4096 + RecordAt(number) + at);
}

void Overwrite(const std::string& path, int64_t at, int64_t word) {
  const int fd = open(path.c_str(), O_RDWR);
  CHECK_EQ(pwrite(fd, &word, 8, at), 8);
  close(fd);
}

// Checks which records are damaged, and that they can be stored again.
void OnlyDamaged(Store* store, const std::vector<int64_t>& damaged) {
  for (int64_t i = 0; i < kSamples; ++i) {
    bool there = std::find(damaged.begin(), damaged.end(), i) == damaged.end();
    Seen seen = LookUp(store, {i});
    CHECK_EQ(seen.there.size(), there ? 1u : 0u);
    CHECK(!there || seen.there.at(0) == BytesOf(i, 1000 + i));
  }
  CHECK_EQ(store->Statistics().damaged, static_cast<int64_t>(damaged.size()));
  for (int64_t i : damaged) CHECK(Put(store, i, BytesOf(i, 1000 + i)));
  for (int64_t i = 0; i < kSamples; ++i) CHECK(RecordOf(store, i) == BytesOf(i, 1000 + i));
  CHECK_EQ(store->Statistics().damaged, static_cast<int64_t>(damaged.size()));
}

Verified VerifiedBy(Store* store) {
  Verified memory, disk;
  CHECK_OK(store->Verify([](int64_t, int64_t) { return true; }, &memory, &disk));
  return {memory.records + disk.records, memory.bytes + disk.bytes, memory.damaged + disk.damaged};
}

TEST("cache places: what one job has stored the next one finds, on disk and in memory that stays") {
  Folder folder;
  for (const StoreOptions& options : Places(folder)) {
    Fill(options);
    std::shared_ptr<Store> store = Opened(options);
    OnlyDamaged(store.get(), {});
    StoreAbout about;
    CHECK_OK(LookAtIndex(IndexOf(options), &about));
    CHECK(std::equal(about.fingerprint, about.fingerprint + 2, options.fingerprint.begin()));
    CHECK_EQ(about.samples, kSamples);
    CHECK_EQ(about.records, kSamples);
    CHECK_EQ(about.record_bytes, RecordAt(kSamples));
    CHECK_EQ(VerifiedBy(store.get()).records, kSamples);
    Verified memory, disk;  // verifying can be ended early
    CHECK_OK(store->Verify([](int64_t, int64_t) { return false; }, &memory, &disk));
    CHECK_EQ(memory.records + disk.records, 0);
  }
  struct stat seen{};
  CHECK_EQ(stat((folder / "kept").c_str(), &seen), 0);
  CHECK_EQ(seen.st_mode & 0777, 0600u);
}

TEST("cache places: those who open a new cache at the same time open the same one") {
  Folder folder;
  StoreOptions options = Kept(folder);
  options.disk = folder / "disk";
  std::vector<std::shared_ptr<Store>> stores(6);
  std::vector<std::thread> threads;
  for (auto& store : stores) {
    threads.emplace_back([&] { CHECK_OK(Store::Open(options, &store)); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < stores.size(); ++i) CHECK(Put(stores[i].get(), static_cast<int64_t>(i), "x"));
  for (const auto& store : stores) {
    StoreStatistics s = store->Statistics();
    CHECK_EQ(s.memory_records, 6);
    CHECK_EQ(s.disk_records, 6);
    CHECK(WarningsOf(store.get()).empty());
  }
}

TEST("cache places: damaged bytes are found before they are used, counted and stored again; verifying finds them too") {
  Folder folder;
  for (const StoreOptions& options : Places(folder)) {
    Fill(options);
    Damage(options, 2, 0);                   // its number
    Damage(options, 5, 8);                   // its length
    Damage(options, 9, 12);                  // its checksum
    Damage(options, 20, kRecordHead + 500);  // a byte of it
    OnlyDamaged(Opened(options).get(), {2, 5, 9, 20});
    OnlyDamaged(Opened(options).get(), {});
    std::shared_ptr<Store> store = Opened(options);
    RecordOf(store.get(), 8);  // that it was right once does not count
    for (int64_t number : {7, 8}) Damage(options, number, 100);
    const Verified seen = VerifiedBy(store.get());
    CHECK_EQ(seen.records, kSamples - 2);
    CHECK_EQ(seen.damaged, 2);
    CHECK_EQ(LookUp(store.get(), {7}).missing.size(), 1u);
  }
}

TEST("cache places: a segment that is gone or cut off, or entries that point nowhere, are damage") {
  Folder folder;
  StoreOptions options = OnDisk(folder);
  Fill(options);
  CHECK_EQ(truncate((folder / "disk/segment-000000").c_str(), RecordAt(38) + 100), 0);
  OnlyDamaged(Opened(options).get(), {38, 39});
  Overwrite(folder / "disk/index", kEntriesAt + 8 * 3, static_cast<int64_t>(ReadyEntry(int64_t{5} << 40, 500)));
  OnlyDamaged(Opened(options).get(), {3});
  std::filesystem::remove(folder / "disk/segment-000000");
  std::shared_ptr<Store> store = Opened(options);
  CHECK_EQ(LookUp(store.get(), {1, 2}).missing.size(), 2u);
  CHECK(Put(store.get(), 1, "again"));
  CHECK_EQ(RecordOf(store.get(), 1), "again");
}

TEST("cache places: other data are refused in words, and what they are of stays") {
  Folder folder;
  for (const StoreOptions& options : Places(folder)) {
    Fill(options);
    std::shared_ptr<Store> store;
    StoreOptions of_other_data = options, of_more_samples = options;
    of_other_data.fingerprint[0] ^= 1;
    of_more_samples.samples = 41;
    CHECK_FAILS(Store::Open(of_other_data, &store), Code::kInvalid, "fingerprint 00000000000012340000000000005678");
    CHECK_FAILS(Store::Open(of_more_samples, &store), Code::kInvalid, "(40 samples");
    OnlyDamaged(Opened(options).get(), {});
  }
}

TEST("cache places: an index that is damaged, cut off or of another version starts empty, with a warning") {
  Folder folder;
  for (const StoreOptions& options : Places(folder)) {
    const std::string path = IndexOf(options);
    for (int way = 0; way < 4; ++way) {
      Fill(options);
      if (way == 0) Flip(path, kHeadAt);       // the magic number
      if (way == 1) Flip(path, kHeadAt + 8);   // the version
      if (way == 2) Flip(path, kHeadAt + 20);  // the fingerprint, against its checksum
      if (way == 3) CHECK_EQ(truncate(path.c_str(), 300), 0);
      StoreAbout about;
      CHECK_FAILS(LookAtIndex(path, &about), Code::kInvalid, way < 3 ? "must be an index of version 1" : "cut off");
      std::shared_ptr<Store> store = Opened(options);
      MustWarn(store.get(), "starts empty");
      CHECK_EQ(LookUp(store.get(), {1}).missing.size(), 1u);
      store.reset();
      if (options.keep.empty()) std::filesystem::remove_all(options.disk);
      std::filesystem::remove(options.keep);
    }
  }
}

TEST("cache places: memory that stays must be a plain file of this user, open to nobody else") {
  Folder folder;
  StoreOptions options = Kept(folder);
  std::shared_ptr<Store> store;
  Fill(options);
  CHECK_EQ(chmod(options.keep.c_str(), 0640), 0);
  CHECK_FAILS(Store::Open(options, &store), Code::kInvalid, "it is open to others");
  CHECK_EQ(chmod(options.keep.c_str(), 0600), 0);
  if (geteuid() == 0) {
    CHECK_EQ(chown(options.keep.c_str(), 12345, 12345), 0);
    CHECK_FAILS(Store::Open(options, &store), Code::kInvalid, "it is another user's");
    CHECK_EQ(chown(options.keep.c_str(), 0, 0), 0);
  }
  options.keep = folder / "link";
  CHECK_EQ(symlink((folder / "kept").c_str(), options.keep.c_str()), 0);
  CHECK_FAILS(Store::Open(options, &store), Code::kInvalid, "it is no plain file");
  options.keep = folder / "pipe";
  CHECK_EQ(mkfifo(options.keep.c_str(), 0600), 0);
  CHECK_FAILS(Store::Open(options, &store), Code::kInvalid, "it is no plain file");
}

TEST("cache places: memory that stays grows for a job that gives it more, and takes no more for one that gives less") {
  Folder folder;
  StoreOptions options = Kept(folder);
  options.memory_bytes = RecordAt(10);
  std::shared_ptr<Store> small = Opened(options);
  for (int64_t i = 0; i < kSamples; ++i) CHECK_EQ(Put(small.get(), i, BytesOf(i, 1000 + i)), i < 10);
  options.memory_bytes = 1 << 20;
  std::shared_ptr<Store> large = Opened(options);
  for (int64_t i = 0; i < kSamples; ++i) CHECK(Put(large.get(), i, BytesOf(i, 1000 + i)));
  // The first cannot reach what came after: it loads that, and calls nothing damaged.
  Seen seen = LookUp(small.get(), {3, 30});
  CHECK(seen.there.at(0) == BytesOf(3, 1003));
  CHECK(seen.missing == std::vector<int64_t>{1});
  CHECK_EQ(LookUp(small.get(), {30}, /*wait=*/true).missing.size(), 1u);
  CHECK_EQ(small->Statistics().damaged, 0);
  OnlyDamaged(large.get(), {});
  options.memory_bytes = RecordAt(5);
  std::shared_ptr<Store> less = Opened(options);
  OnlyDamaged(less.get(), {});
}

// Fills the store until it has no more room, of which there is enough for some records of 1 MB.
void RunsFull(const StoreOptions& options, const std::string& why) {
  std::shared_ptr<Store> store = Opened(options);
  int64_t stored = 0;
  std::string bytes = BytesOf(1, 1 << 20);
  for (int64_t i = 0; i < kSamples; ++i) stored += Put(store.get(), i, bytes) ? 1 : 0;
  CHECK(stored >= 7 && stored <= 12);
  StoreStatistics s = store->Statistics();
  CHECK_EQ(s.passed_through, kSamples - stored);
  CHECK_EQ(s.memory_open + s.disk_open, 0);
  MustWarn(store.get(), why);
  for (int64_t i = 0; i < kSamples; ++i) CHECK_EQ(LookUp(store.get(), {i}).there.size(), i < stored ? 1u : 0u);
}

TEST("cache places: a write that fails closes the disk with one warning, and the rest goes on") {
  Folder folder;
  const pid_t child = Child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{9 << 20, 9 << 20};
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    RunsFull(OnDisk(folder), "writing to it failed: File too large");
    return 0;
  });
  CHECK_EQ(ExitOf(child), 0);
}

TEST("cache places: a file system without room closes disk and memory, where the tests may mount a small one") {
  Folder folder;
  std::string small = folder / "small";
  CHECK_EQ(mkdir(small.c_str(), 0700), 0);
  const pid_t child = Child([&] {
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("small", small.c_str(), "tmpfs", 0, "size=12m") != 0) {
      return 0;
    }
    StoreOptions options = OnDisk(folder);
    options.disk = small + "/disk";
    RunsFull(options, "writing to it failed: No space left on device");
    std::filesystem::remove_all(options.disk);
    options = Kept(folder);
    options.memory_bytes = 64 << 20;
    options.keep = small + "/kept";
    RunsFull(options, "the host has no more for it: reserving 8388608 bytes: No space left on device");
    options.keep = small + "/more";
    options.samples = 2 << 20;  // the index has no room
    OnlyWarningOf(Opened(options).get());
    CHECK(!std::filesystem::exists(options.keep));
    return 0;
  });
  CHECK_EQ(ExitOf(child), 0);
}

TEST("cache places: without a folder or memory to be had the store does without them, with a warning each") {
  Folder folder;
  WriteFile(folder / "file", "not a folder");
  StoreOptions options = OptionsFor(10);
  options.disk = folder / "file";
  options.memory_bytes = int64_t{1} << 62;
  std::shared_ptr<Store> store = Opened(options);
  std::vector<std::string> warnings = WarningsOf(store.get());
  CHECK_EQ(warnings.size(), 2u);
  CHECK(warnings[0].find("does without memory: ") != std::string::npos);
  CHECK(warnings[1].find("does without its disk (") != std::string::npos);
  options.keep = folder / "nowhere/kept";
  options.memory_bytes = 1 << 20;
  CHECK_EQ(WarningsOf(Opened(options).get()).size(), 2u);
}

TEST("cache places: more segments than files may be open") {
  Folder folder;
  StoreOptions options = OnDisk(folder);
  options.samples = 300;
  std::shared_ptr<Store> store = Opened(options);
  // Each record begins a segment, as if the ones before it were full.
  for (int64_t i = 0; i < 300; ++i) {
    CHECK(Put(store.get(), i, BytesOf(i, 50)));
    Overwrite(folder / "disk/index", kHeadAt + 64, (i + 1) * kSegmentBytes - 10);
  }
  for (int64_t i = 0; i < 300; ++i) CHECK(RecordOf(store.get(), i * 7 % 300) == BytesOf(i * 7 % 300, 50));
  CHECK(std::filesystem::exists(folder / "disk/segment-000299"));
}

TEST("cache places: the C ABI says what is there, missing, pending or longer than the room for it") {
  HvdExtCacheOptions options{};
  options.name = "abi";
  options.samples = 10;
  options.memory_bytes = 1 << 20;
  int64_t cache = 0;
  CHECK_EQ(hvd_ext_cache_open(&options, &cache), 0);
  int32_t stored = 0;
  CHECK_EQ(hvd_ext_cache_insert(cache, 4, "hello", 5, &stored), 0);
  CHECK_EQ(stored, 1);
  int64_t numbers[] = {4, 5, 5, 4}, room[] = {5, 5, 5, 4}, nbytes[4];
  char to[4][8] = {};
  void* buffers[] = {to[0], to[1], to[2], to[3]};
  CHECK_EQ(hvd_ext_cache_lookup(cache, numbers, 4, 0, buffers, room, nbytes), 0);
  CHECK(std::vector<int64_t>(nbytes, nbytes + 4) == (std::vector<int64_t>{5, -1, -2, 5}));
  CHECK_EQ(std::string(to[0]), "hello");
  CHECK_EQ(to[3][0], 0);  // it had no room
  CHECK_EQ(hvd_ext_cache_release(cache, nullptr, 0), 0);
  CHECK_EQ(hvd_ext_cache_lookup(cache, numbers + 1, 1, 1, nullptr, nullptr, nbytes), 0);
  CHECK_EQ(nbytes[0], -1);
  CHECK_EQ(hvd_ext_cache_close(cache), 0);
  CHECK_EQ(hvd_ext_cache_lookup(cache, numbers, 1, 0, nullptr, nullptr, nbytes), static_cast<int>(Code::kInvalid));
  CHECK(std::string(hvd_ext_cache_error()).find("must be the number of an open cache") != std::string::npos);
}

}  // namespace
}  // namespace hvd_ext::test

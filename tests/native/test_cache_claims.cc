// Claims: who waits for whom, and what becomes of the claims of processes that are gone.
#include <atomic>
#include <chrono>
#include <thread>

#include "cache/claim.h"
#include "cache/format.h"
#include "cache_stores.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

using std::chrono::milliseconds;

StoreOptions InMemory(int64_t samples) {
  StoreOptions options = OptionsFor(samples);
  options.memory_bytes = 1 << 20;
  return options;
}

TEST("cache claims: a claim says whose it is, whether that process runs, and how old it is") {
  uint64_t claim = NewClaim();
  CHECK_EQ(StateOf(claim), kClaimed);
  CHECK(IsOwnClaim(claim));
  CHECK(!IsOwnClaim(kEmpty));
  CHECK(!IsStaleClaim(claim, 1));
  uint64_t of_nobody = claim | uint64_t{0x3fffff} << 42;  // no process has the largest id
  CHECK(!IsOwnClaim(of_nobody));
  CHECK(IsStaleClaim(of_nobody, 1000));
  uint64_t other_begin = claim ^ uint64_t{1} << 26;  // the id was given to another process since
  CHECK(IsStaleClaim(other_begin, 1000));
  uint64_t elsewhere = of_nobody ^ uint64_t{1} << 34;  // in another container the id says nothing
  CHECK(!IsStaleClaim(elsewhere, 1000));
  auto shifted = [](uint64_t from, int64_t eighths) {
    uint64_t time = (from >> 2) + static_cast<uint64_t>(eighths);
    return (from & ~(uint64_t{0xffffff} << 2)) | (time & 0xffffff) << 2;
  };
  for (uint64_t of : {claim, elsewhere}) {
    CHECK(!IsStaleClaim(shifted(of, -72), 10));
    CHECK(IsStaleClaim(shifted(of, -88), 10));
    CHECK(!IsStaleClaim(shifted(of, 72), 10));  // a clock that is behind
    CHECK(IsStaleClaim(shifted(of, 88), 10));
  }
}

TEST("cache claims: what is missing is claimed, and is pending for others until it is inserted") {
  std::shared_ptr<Store> store = Opened(InMemory(10));
  Seen seen = LookUp(store.get(), {3, 4, 3});
  CHECK(seen.missing == (std::vector<int64_t>{0, 1}));
  CHECK(seen.pending == std::vector<int64_t>{2});
  CHECK(LookUp(store.get(), {4, 3}).pending == (std::vector<int64_t>{0, 1}));
  Put(store.get(), 4, "four");
  seen = LookUp(store.get(), {4, 3});
  CHECK_EQ(seen.there.at(0), "four");
  CHECK(seen.pending == std::vector<int64_t>{1});
}

TEST("cache claims: a waiting call sleeps until the record is there") {
  std::shared_ptr<Store> store = Opened(InMemory(100));
  // On a busy machine the records may come before the call: then it is tried again.
  for (int64_t number = 0; number < 100 && store->Statistics().waits == 0; number += 2) {
    CHECK_EQ(LookUp(store.get(), {number, number + 1}).missing.size(), 2u);
    std::thread loader([&] {
      std::this_thread::sleep_for(milliseconds(40));
      Put(store.get(), number + 1, "second");
      Put(store.get(), number, "first");
    });
    Seen seen = LookUp(store.get(), {number + 1, number}, /*wait=*/true);
    loader.join();
    CHECK_EQ(seen.there.at(0), "second");
    CHECK_EQ(seen.there.at(1), "first");
  }
  StoreStatistics s = store->Statistics();
  CHECK_EQ(s.waits, 1);
  CHECK(s.waited_ns > 0);
  CHECK_EQ(s.taken_over, 0);
}

TEST("cache claims: a claim that is given back goes to who waits, one by one or all at once, or with its store") {
  Folder folder;
  StoreOptions options = OptionsFor(10);
  options.disk = folder / "disk";
  std::shared_ptr<Store> one = Opened(options), two = Opened(options);
  for (int way = 0; way < 3; ++way) {
    int64_t number = way;
    CHECK_EQ(LookUp(one.get(), {number}).missing.size(), 1u);
    CHECK_EQ(LookUp(two.get(), {number}).pending.size(), 1u);
    std::thread loader([&] {
      std::this_thread::sleep_for(milliseconds(20));
      if (way == 0) one->Release(&number, 1);
      if (way == 1) one->ReleaseAll();
      if (way == 2) one.reset();
    });
    CHECK_EQ(LookUp(two.get(), {number}, /*wait=*/true).missing.size(), 1u);
    loader.join();
    CHECK_EQ(two->Statistics().taken_over, 0);
  }
}

TEST("cache claims: a claim that is too old is taken over, and its owner's record is still welcome") {
  StoreOptions options = InMemory(10);
  options.claim_s = 0.25;
  std::shared_ptr<Store> store = Opened(options);
  CHECK_EQ(LookUp(store.get(), {3}).missing.size(), 1u);
  CHECK_EQ(LookUp(store.get(), {3}, /*wait=*/true).missing.size(), 1u);
  CHECK_EQ(store->Statistics().taken_over, 1);
  CHECK(Put(store.get(), 3, "three"));
  CHECK(Put(store.get(), 3, "three"));
  CHECK_EQ(RecordOf(store.get(), 3), "three");
  CHECK_EQ(store->Statistics().memory_inserted, 1);
}

TEST("cache claims: nobody waits for a place that has closed") {
  StoreOptions options = OptionsFor(10);
  options.memory_bytes = 64;
  std::shared_ptr<Store> store = Opened(options);
  CHECK_EQ(LookUp(store.get(), {1, 2}).missing.size(), 2u);
  std::thread loader([&] {
    std::this_thread::sleep_for(milliseconds(20));
    Put(store.get(), 1, std::string(100, 'x'));
  });
  CHECK_EQ(LookUp(store.get(), {2}, /*wait=*/true).missing.size(), 1u);
  loader.join();
}

TEST("cache claims: those of a process that was killed are taken over at once") {
  Folder folder;
  StoreOptions options = OptionsFor(50);
  options.disk = folder / "disk";
  std::vector<int64_t> numbers{1, 2, 3, 4, 5, 6};
  pid_t child = Child([&] {
    std::shared_ptr<Store> store = Opened(options);
    LookUp(store.get(), numbers);
    Put(store.get(), 5, "five");
    raise(SIGKILL);
    return 0;
  });
  while (waitid(P_PID, static_cast<id_t>(child), nullptr, WEXITED | WNOWAIT) != 0) {
  }
  // It is a zombie now, which nobody has waited for.
  std::shared_ptr<Store> store = Opened(options);
  CHECK_EQ(LookUp(store.get(), numbers).pending.size(), 5u);
  auto begin = std::chrono::steady_clock::now();
  Seen seen = LookUp(store.get(), numbers, /*wait=*/true);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
  CHECK_EQ(ExitOf(child), -SIGKILL);
  CHECK_EQ(seen.missing.size(), 5u);
  CHECK_EQ(seen.there.at(4), "five");
  CHECK_EQ(store->Statistics().taken_over, 5);
}

TEST("cache claims: another process maps the memory, reserves room in it and fills it") {
  int words[2];
  CHECK_EQ(pipe(words), 0);
  StoreOptions options = OptionsFor(200);
  options.memory_bytes = 32 << 20;
  pid_t child = Child([&] {  // before there is an arena: the child knows nothing of it
    ArenaAddress address;
    CHECK_EQ(read(words[0], &address, sizeof(address)), static_cast<ssize_t>(sizeof(address)));
    std::shared_ptr<Store> store = Opened(options);
    int64_t taken = -1;
    CHECK_OK(store->ShareMemory({address}, &taken));
    CHECK_EQ(taken, 0);
    for (int64_t i = 0; i < 200; i += 2) CHECK(Put(store.get(), i, BytesOf(i, 100000 + i)));
    return 0;
  });
  std::shared_ptr<Store> store = Opened(options);
  ArenaAddress address = store->memory_address();
  CHECK_EQ(write(words[1], &address, sizeof(address)), static_cast<ssize_t>(sizeof(address)));
  for (int64_t i = 1; i < 200; i += 2) CHECK(Put(store.get(), i, BytesOf(i, 100000 + i)));
  CHECK_EQ(ExitOf(child), 0);
  close(words[0]);
  close(words[1]);
  for (int64_t i = 0; i < 200; ++i) CHECK(RecordOf(store.get(), i) == BytesOf(i, 100000 + i));
}

}  // namespace
}  // namespace hvd_ext::test

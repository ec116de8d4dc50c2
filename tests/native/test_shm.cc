// Memory that ranks share, and the bell that they wake each other with.
#include <cstring>

#include "engine/buffer_pool.h"
#include "harness.h"
#include "ranks.h"
#include "shm/arena.h"
#include "shm/doorbell.h"

namespace hvd_ext::test {
namespace {

std::shared_ptr<Arena> Made(int64_t capacity) {
  std::shared_ptr<Arena> arena;
  CHECK_OK(Arena::Make(capacity, &arena));
  return arena;
}

TEST("arena: it hands out aligned zeros that do not overlap, until it is full") {
  std::shared_ptr<Arena> arena = Made(10 << 20);
  char* before = arena->Take(0);
  CHECK(before != nullptr);
  for (int64_t nbytes : {1, 64, 65, 100000, 5000000}) {
    char* data = arena->Take(nbytes);
    CHECK(data != nullptr);
    CHECK_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
    CHECK(data > before);
    for (int64_t i = 0; i < nbytes; i += 4096) CHECK_EQ(data[i], 0);
    std::memset(before, 'x', static_cast<size_t>(data - before));
    before = data;
    CHECK(arena->Owns(data) && arena->Owns(data + nbytes - 1));
  }
  CHECK(arena->Take(6 << 20) == nullptr);
  CHECK(arena->Take(1 << 20) != nullptr);  // a smaller request may still fit
  char other = 0;
  CHECK(!arena->Owns(&other));
}

TEST("arena: another one's memory is mapped where its address is right, and refused in words where not") {
  std::shared_ptr<Arena> arena = Made(1 << 20);
  char* data = arena->Take(100);
  std::shared_ptr<MappedArena> mapped;
  CHECK_OK(MappedArena::Open(arena->address(), &mapped));
  std::memcpy(data, "hello", 6);
  CHECK_EQ(std::string(mapped->At(arena->OffsetOf(data), 100)), "hello");
  CHECK(mapped->At(1 << 20, 0) != nullptr);
  CHECK(mapped->At((1 << 20) - 3, 4) == nullptr);
  CHECK(mapped->At(-1, 1) == nullptr);
  CHECK(mapped->At(1, -1) == nullptr);

  ArenaAddress wrong = arena->address();
  wrong.token[1] ^= 1;
  CHECK_FAILS(MappedArena::Open(wrong, &mapped), Code::kInternal, "is another rank's arena");
  wrong.capacity += 4096;
  CHECK_FAILS(MappedArena::Open(wrong, &mapped), Code::kInternal, "has 1048576 bytes, must have 1052672");
  wrong.fd = 0;
  CHECK_FAILS(MappedArena::Open(wrong, &mapped), Code::kInternal, "must be an arena of hvd_ext");
  wrong.fd = 1 << 20;
  CHECK_FAILS(MappedArena::Open(wrong, &mapped), Code::kInternal, "readlink of /proc/");
  const int64_t offset = arena->OffsetOf(data);
  arena.reset();
  CHECK_EQ(std::string(mapped->At(offset, 100)), "hello");  // what is mapped stays
}

TEST("arena: a pool takes from it while there is room, and from elsewhere after that") {
  std::shared_ptr<Arena> arena = Made(1 << 20);
  BufferPool pool(arena);
  std::vector<Buffer> buffers;
  int shared = 0;
  for (int i = 0; i < 20; ++i) {
    buffers.push_back(pool.Take(100000));
    std::memset(buffers.back().data(), i, 100000);
    shared += arena->Owns(buffers.back().data());
  }
  CHECK(shared >= 5 && shared < 20);
  buffers.clear();
  int64_t before = pool.allocations();
  for (int i = 0; i < 20; ++i) buffers.push_back(pool.Take(100000));
  CHECK_EQ(pool.allocations(), before);
}

TEST("arena: a buffer keeps it alive") {
  Buffer buffer;
  {
    std::shared_ptr<Arena> arena = Made(1 << 20);
    BufferPool pool(arena);
    buffer = pool.Take(1000);
  }
  std::memset(buffer.data(), 1, 1000);
}

TEST("doorbell: a ring since the look ends the sleep, one before it does not") {
  Doorbell bell;
  bell.Ring();
  uint32_t seen = bell.Look();
  auto begin = std::chrono::steady_clock::now();
  bell.Sleep(seen, 0.02);
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(20));
  bell.Ring();
  bell.Sleep(seen, 1e6);
  CHECK_EQ(bell.Look(), seen + 1);
}

TEST("doorbell: whoever sleeps on duty is woken, the other is not") {
  Doorbell bell;
  std::atomic<bool> owner_woke{false}, caller_woke{false};
  uint32_t seen = bell.Look();
  std::thread owner([&] {
    bell.Sleep(seen, 1e6);
    owner_woke = true;
  });
  Until("the owner's sleep", [&] { return bell.Asleep(Doorbell::kOwner); });
  bell.Relieve();
  std::thread caller([&] {
    while (bell.Look() == seen) bell.Sleep(seen, 1e6, Doorbell::kCaller);
    caller_woke = true;
  });
  Until("the caller's sleep", [&] { return bell.Asleep(Doorbell::kCaller); });
  bell.Ring();
  Until("the caller", [&] { return caller_woke.load(); });
  caller.join();
  bell.Resume(Doorbell::kAll);
  bell.Ring();
  Until("the owner", [&] { return owner_woke.load(); });
  owner.join();
}

TEST("doorbell: an idle owner hears its own process only") {
  Doorbell bell;
  std::atomic<int> sleeps{0};
  std::atomic<bool> ended{false};
  std::thread owner([&] {
    while (!ended) {
      ++sleeps;
      bell.Sleep(bell.Look(), 1e6, Doorbell::kOwner, Doorbell::kItsProcess);
    }
  });
  for (int i = 0; i < 20; ++i) {
    Until("the owner's sleep", [&] { return bell.Asleep(Doorbell::kOwner); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    bell.Ring();
  }
  CHECK(sleeps.load() < 10);  // a few rings may come just before the owner sleeps
  ended = true;
  bell.Ring(/*from_peer=*/false);
  owner.join();
}

TEST("doorbell: no ring is lost, however the two sides meet") {
  Doorbell there, back;
  constexpr int kRounds = 5000;
  std::atomic<int> balls{0};
  auto play = [&](Doorbell* mine, Doorbell* other, int turn) {
    for (int i = 0; i < kRounds; ++i) {
      while (true) {
        uint32_t seen = mine->Look();
        if (balls.load() == 2 * i + turn) break;
        mine->Sleep(seen, 1e6);
      }
      ++balls;
      other->Ring();
    }
  };
  std::thread first([&] { play(&there, &back, 0); });
  play(&back, &there, 1);
  first.join();
  CHECK_EQ(balls.load(), 2 * kRounds);
}

}  // namespace
}  // namespace hvd_ext::test

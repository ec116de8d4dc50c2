// The loop over a pool's threads in which the caller works too: every unit runs once, whenever the threads start.
#include <atomic>
#include <memory>
#include <thread>

#include "harness.h"
#include "kernels/workers.h"

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hvd_ext::test {
namespace {

constexpr int64_t kLong = 1'000'000;  // nanoseconds of a unit

TEST("workers: each unit is done once, by the caller and the threads that come") {
  for (int64_t threads : {2, 3, 8}) {
    std::vector<std::thread> pool;
    const ParallelFor loop = WithTheCaller(threads, [&pool](auto work) { pool.emplace_back([work] { work(); }); });
    for (int64_t total : {1, 2, 5, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(total));
      loop(total, kLong, [&seen](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      for (const auto& times : seen) CHECK_EQ(times.load(), 1);
    }
    for (std::thread& thread : pool) thread.join();
  }
}

TEST("workers: the call waits for a unit that another thread has taken") {
  std::thread other;
  const ParallelFor loop = WithTheCaller(2, [&other](auto work) { other = std::thread([work] { work(); }); });
  std::atomic<int> begun{0}, ended{0};
  loop(2, kLong, [&](int64_t, int64_t) {
    ++begun;
    while (begun < 2) std::this_thread::yield();  // each of the two has one
    if (std::this_thread::get_id() == other.get_id()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ++ended;
  });
  CHECK_EQ(ended.load(), 2);
  other.join();
}

TEST("workers: threads that never come are not waited for, and late ones touch nothing") {
  std::vector<std::function<void()>> late;
  const ParallelFor loop = WithTheCaller(4, [&late](auto work) { late.emplace_back(work); });
  auto done = std::make_unique<int>(0);
  loop(10, kLong, [&done](int64_t begin, int64_t end) { *done += static_cast<int>(end - begin); });
  CHECK_EQ(*done, 10);
  CHECK_EQ(late.size(), size_t{3});
  done.reset();
  for (const auto& work : late) work();
}

TEST("workers: no thread is woken for little work, and none that would have no unit") {
  int woken = 0;
  int64_t units = 0;
  const ParallelFor loop = WithTheCaller(8, [&woken](auto) { ++woken; });
  const auto count = [&units](int64_t begin, int64_t end) { units += end - begin; };
  loop(100, 10, count);
  CHECK_EQ(woken, 0);
  loop(3, kLong, count);
  CHECK_EQ(woken, 2);
  loop(0, kLong, count);
  CHECK_EQ(woken, 2);
  CHECK_EQ(units, int64_t{103});
}

#if defined(__SSE__) || defined(__x86_64__)
TEST("workers: denormals count on threads that flush them, which do so again afterwards") {
  constexpr unsigned kFlushes = 0x8040;
  std::thread other;
  unsigned after = 0;
  const ParallelFor loop = WithTheCaller(2, [&](auto work) {
    other = std::thread([&after, work] {
      _mm_setcsr(_mm_getcsr() | kFlushes);
      work();
      after = _mm_getcsr() & kFlushes;
    });
  });
  std::atomic<int> begun{0};
  std::vector<float> sums(2);
  const volatile float part = 0x1p-140f;
  loop(2, kLong, [&](int64_t begin, int64_t) {
    ++begun;
    while (begun < 2) std::this_thread::yield();  // each of the two has one
    sums[static_cast<size_t>(begin)] = part + part;
  });
  other.join();
  CHECK(sums == std::vector<float>(2, 0x1p-139f));
  CHECK_EQ(after, kFlushes);
}
#endif

}  // namespace
}  // namespace hvd_ext::test

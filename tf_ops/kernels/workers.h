// A ParallelFor over the threads of a pool in which the calling thread works too.
//
// The calling thread takes one unit after the other, and so does every thread of the pool that starts in time. The call
// returns when all units are done, and does not wait for threads that have not started. A pool's own parallel loop
// often waits for one of its threads to wake up before any work starts, and then for all of them, which takes longer
// than a short selection.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "kernels/denormals.h"
#include "kernels/topk.h"

namespace hvd_ext {

class UnitsOfWork {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;

  // A thread that starts after all units have been taken does not touch `body`, which may no longer exist then.
  UnitsOfWork(int64_t total, const Body* body) : total_(total), body_(body), left_(total) {}

  void Work() {
    for (int64_t unit; (unit = next_.fetch_add(1)) < total_;) {
      (*body_)(unit, unit + 1);
      if (left_.fetch_sub(1) > 1) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_all();
    }
  }

  void Wait() {
    // Another thread's last unit ends soon if that thread has a core, so it is worth yielding before sleeping.
    for (int i = 0; i < kYields && left_ > 0; ++i) std::this_thread::yield();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  static constexpr int kYields = 100;

  const int64_t total_;
  const Body* const body_;
  std::atomic<int64_t> next_{0}, left_;
  std::mutex mutex_;
  std::condition_variable done_;
};

// Returns a ParallelFor over `threads` threads, including the caller. schedule(closure) hands a closure to the pool,
// which calls it at some later time. The threads of the pool compute with denormals; the calling thread stays in its
// mode.
template <typename Schedule>
ParallelFor WithTheCaller(int64_t threads, Schedule schedule) {
  constexpr int64_t kWorthWaking = 20'000;  // nanoseconds of work that are worth waking a thread for
  return [threads, schedule](int64_t total, int64_t cost, const UnitsOfWork::Body& body) {
    const int64_t helpers = std::min({threads - 1, total - 1, total * cost / kWorthWaking});
    if (helpers < 1) return body(0, total);
    auto units = std::make_shared<UnitsOfWork>(total, &body);
    for (int64_t i = 0; i < helpers; ++i) {
      schedule([units] {
        const WithDenormals denormals;
        units->Work();
      });
    }
    units->Work();
    units->Wait();
  };
}

}  // namespace hvd_ext

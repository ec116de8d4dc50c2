// A ParallelFor over the threads of a pool in which the calling thread works too.
//
// It takes one unit after the other, and so does every thread of the pool that comes in time. The call returns when the
// units are done: it does not wait for threads that have not come. A pool's own loop often waits for one of its threads
// to wake up before anything happens, and then for all of them, which takes longer than a short selection.
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

  // `body` is not touched once all units have been taken: a thread that comes later may find it gone.
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
    // the last unit of another thread ends soon, if it has a core
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

// Gives a ParallelFor on `threads` threads, the caller counted; schedule(closure) has a pool call it some time. On the
// pool's threads denormals count; on the caller's they do if it says so.
template <typename Schedule>
ParallelFor WithTheCaller(int64_t threads, Schedule schedule) {
  constexpr int64_t kWorthWaking = 20'000;  // nanoseconds of work
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

// Loops on threads, for kernels that are given one.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "kernels/workers.h"

namespace hvd_ext::test {

// A loop in `threads` parts, each on a thread of its own, the last part first.
inline ParallelFor Threads(int threads) {
  return [threads](int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    std::vector<std::thread> running;
    for (int64_t t = threads - 1; t >= 0; --t) {
      const int64_t begin = total * t / threads, end = total * (t + 1) / threads;
      if (begin < end) running.emplace_back([&body, begin, end] { body(begin, end); });
    }
    for (std::thread& thread : running) thread.join();
  };
}

}  // namespace hvd_ext::test

// Ranks as threads, and waiting without a busy loop.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/transport.h"
#include "harness.h"

namespace hvd_ext::test {

// Runs `rank_main(rank)` for each rank in a thread of its own; `abort` is called when one has failed, and must make the
// others end. Then throws what the first rank to fail has thrown.
inline void RunThreads(int size, const std::function<void(int)>& rank_main, const std::function<void()>& abort) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  std::atomic<int> first{-1};
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        rank_main(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
        int nobody = -1;
        first.compare_exchange_strong(nobody, rank);
        abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first >= 0) std::rethrow_exception(errors[first]);
}

using Transports = std::vector<std::shared_ptr<Transport>>;

inline void RunOn(const Transports& transports, const std::function<void(Transport*)>& rank_main) {
  RunThreads(
      static_cast<int>(transports.size()), [&](int rank) { rank_main(transports[rank].get()); },
      [&] { transports[0]->Abort(1); });
}

inline void RunRanks(int size, const std::function<void(Transport*)>& rank_main) {
  RunOn(MakeThreadTransports(size), rank_main);
}

// Calls `step` until it returns true; fails after a minute, which only a hang takes.
inline void Until(const std::string& what, const std::function<bool()>& step) {
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (int i = 0; !step(); ++i) {
    if (std::chrono::steady_clock::now() > deadline) throw Failure(what + " did not happen in 60 s");
    if (i < 10) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

inline bool IsDone(Transport* transport, const std::unique_ptr<Request>& request) {
  bool done = false;
  CHECK_OK(transport->Test(request.get(), &done));
  return done;
}

inline void Finish(Transport* transport, const std::vector<std::unique_ptr<Request>>& requests) {
  for (const std::unique_ptr<Request>& request : requests) {
    Until("the end of a message on rank " + std::to_string(transport->rank()),
          [&] { return IsDone(transport, request); });
  }
}

// Waits until a message has failed, and gives its error.
inline Status FailureOf(Transport* transport, const std::unique_ptr<Request>& request) {
  Status status;
  Until("the failure of a message on rank " + std::to_string(transport->rank()), [&] {
    bool done = false;
    status = transport->Test(request.get(), &done);
    CHECK(!done || !status.ok());
    return !status.ok();
  });
  return status;
}

inline std::pair<int, std::string> NextControl(Transport* transport) {
  std::pair<int, std::string> received{-1, ""};
  Until("a control message to rank " + std::to_string(transport->rank()), [&] {
    CHECK_OK(transport->ReceiveControl(&received.first, &received.second));
    return received.first >= 0;
  });
  return received;
}

}  // namespace hvd_ext::test

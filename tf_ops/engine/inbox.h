// Work for the engine's thread, from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "base/mutex.h"
#include "shm/doorbell.h"

namespace hvd_ext {

class Inbox {
 public:
  using Work = std::function<void()>;

  explicit Inbox(Doorbell* doorbell) : doorbell_(doorbell) {}

  // Refuses, with false, when Stop has been called: what is posted is done before the engine's thread ends.
  bool Post(Work work);
  void Stop();
  bool stopping() const { return stopping_; }

  bool HasWork() const {
    MutexLock lock(&mutex_);
    return !work_.empty();
  }
  // The engine's thread: all that has been posted since the last time.
  std::vector<Work> Take();

 private:
  Doorbell* const doorbell_;
  mutable Mutex mutex_;
  std::vector<Work> work_ HVD_EXT_GUARDED_BY(mutex_);
  std::atomic<bool> stopping_{false};  // set with the mutex held, so that Post knows; read without it
};

}  // namespace hvd_ext

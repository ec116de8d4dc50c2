// Locks whose use clang checks (make lint): an attribute says which lock guards a member, and which lock a function
// needs, takes or must not hold. Other compilers ignore the attributes.
#pragma once

#include <mutex>

#ifdef __clang__
#define HVD_EXT_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define HVD_EXT_THREAD_SAFETY(attribute)
#endif

#define HVD_EXT_CAPABILITY(kind) HVD_EXT_THREAD_SAFETY(capability(kind))
#define HVD_EXT_SCOPED_CAPABILITY HVD_EXT_THREAD_SAFETY(scoped_lockable)
#define HVD_EXT_GUARDED_BY(lock) HVD_EXT_THREAD_SAFETY(guarded_by(lock))
#define HVD_EXT_REQUIRES(...) HVD_EXT_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define HVD_EXT_EXCLUDES(...) HVD_EXT_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define HVD_EXT_ACQUIRE(...) HVD_EXT_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define HVD_EXT_TRY_ACQUIRE(...) HVD_EXT_THREAD_SAFETY(try_acquire_capability(__VA_ARGS__))
#define HVD_EXT_RELEASE(...) HVD_EXT_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define HVD_EXT_ASSERT(...) HVD_EXT_THREAD_SAFETY(assert_capability(__VA_ARGS__))
#define HVD_EXT_RETURNS_LOCK(lock) HVD_EXT_THREAD_SAFETY(lock_returned(lock))
#define HVD_EXT_UNCHECKED HVD_EXT_THREAD_SAFETY(no_thread_safety_analysis)

namespace hvd_ext {

class HVD_EXT_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() HVD_EXT_ACQUIRE() { mutex_.lock(); }
  void Unlock() HVD_EXT_RELEASE() { mutex_.unlock(); }
  bool TryLock() HVD_EXT_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

class HVD_EXT_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) HVD_EXT_ACQUIRE(mutex) : mutex_(mutex) { mutex_->Lock(); }
  ~MutexLock() HVD_EXT_RELEASE() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

}  // namespace hvd_ext

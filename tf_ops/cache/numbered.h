// Objects that other parts of the process know by a number.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"

namespace hvd_ext {

// T is a pointer. Every number is given once, beginning with 1.
template <typename T>
class Numbered {
 public:
  int64_t Add(T object) {
    MutexLock lock(&mutex_);
    objects_[++last_] = std::move(object);
    return last_;
  }
  // Returns null where there is no object of this number.
  T Find(int64_t number) {
    MutexLock lock(&mutex_);
    auto found = objects_.find(number);
    return found == objects_.end() ? nullptr : found->second;
  }
  // The same, and forgets the object.
  T Remove(int64_t number) {
    MutexLock lock(&mutex_);
    auto found = objects_.find(number);
    if (found == objects_.end()) return nullptr;
    T object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  Mutex mutex_;
  int64_t last_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  std::unordered_map<int64_t, T> objects_ HVD_EXT_GUARDED_BY(mutex_);
};

}  // namespace hvd_ext

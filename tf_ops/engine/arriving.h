// The last tensor of a bucket that has started while the tensor is still copied into it, so that its first segments
// travel meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "engine/buffer_pool.h"

namespace hvd_ext {

struct Arriving {
  // Bytes [begin, end) of the buffer come in ascending order; all others are there.
  Arriving(std::shared_ptr<Buffer> b, int64_t begin, int64_t e) : buffer(std::move(b)), end(e), copied(begin) {}

  const std::shared_ptr<Buffer> buffer;  // the copy ends, also where the bucket's run fails before
  const int64_t end;
  std::atomic<int64_t> copied;  // what lies before it has come

  bool Has(int64_t first, int64_t last) const {
    return first >= end || std::min(last, end) <= copied.load(std::memory_order_acquire);
  }
};

}  // namespace hvd_ext

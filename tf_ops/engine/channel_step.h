// A step of a channel: its tensors as they arrive, and its buckets' memory from the first tensor to the last collect.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/engine.h"
#include "engine/error_feedback.h"
#include "engine/layout.h"
#include "engine/trace.h"

namespace hvd_ext {

// A collect that is complete: call `deliver(status, data, memory)`, then let go of `memory`.
struct Delivery {
  Deliver deliver;
  Status status;
  const void* data = nullptr;
  Memory memory;
};

inline void DeliverAll(const std::vector<Delivery>& ended) {
  for (const Delivery& delivery : ended) delivery.deliver(delivery.status, delivery.data, delivery.memory);
}

// What a bucket of a layout carries from step to step.
struct BucketState {
  const std::shared_ptr<Feedback> feedback;  // null: not sparse
  int64_t running = 0;                       // its runs that are queued or have started, and have not ended
};
using BucketStates = std::vector<BucketState>;

// What is const belongs to the step for good; the rest is guarded by its channel's lock.
struct ChannelStep {
  struct Tensor {
    enum { kMissing, kCopying, kHere } state = kMissing;
    bool collected = false;
    Deliver waiting;
  };
  struct Bucket {
    std::shared_ptr<Buffer> input;   // this rank's gradients, until they are given to a run
    std::shared_ptr<Buffer> buffer;  // of the run, then the result
    std::shared_ptr<Buffer> kept;    // a copy of what was given to the run, where it may have to be given again
    int64_t here = 0;
    int64_t collected = 0;
    double first_s = -1;  // when its first tensor came; only while a trace runs
    bool ended = false;   // its result may be collected
    Status status;
  };

  // The layout may have more tensors than the `tensors` that a rank submits.
  ChannelStep(int64_t n, const TopKStep& t, std::shared_ptr<const Layout> l, std::shared_ptr<BucketStates> s,
              int64_t submitted)
      : number(n),
        topk(t),
        layout(std::move(l)),
        states(std::move(s)),
        arrival_offset_s(static_cast<size_t>(submitted)),
        tensors(layout->places.size()),
        buckets(layout->buckets.size()) {}

  Bucket& bucket(int64_t i) { return buckets[static_cast<size_t>(i)]; }
  Tensor& tensor(int64_t i) { return tensors[static_cast<size_t>(i)]; }
  int64_t NumBuckets() const { return static_cast<int64_t>(buckets.size()); }

  // The rank begins to submit; what it has submitted to the step before is void.
  void Begin() {
    begin_s = NowSeconds();
    reserved = here = 0;
    for (Tensor& tensor : tensors) tensor.state = Tensor::kMissing;
    for (Bucket& bucket : buckets) bucket.here = 0;
  }

  const int64_t number;
  const TopKStep topk;
  const std::shared_ptr<const Layout> layout;
  const std::shared_ptr<BucketStates> states;
  double begin_s = 0;
  double end_s = 0;                      // when the newest of its runs ended
  std::vector<double> arrival_offset_s;  // by tensor, after begin_s
  std::vector<Tensor> tensors;
  std::vector<Bucket> buckets;
  int64_t reserved = 0;  // tensors that came or are being copied
  int64_t here = 0;
  int64_t queued = 0;   // runs that are queued or have started, from the first bucket on
  int64_t ended = 0;    // runs
  int64_t waiting = 0;  // collects that wait, or whose tensor is being handed over
  double wait_s = -1;   // since when at least one has waited
};

}  // namespace hvd_ext

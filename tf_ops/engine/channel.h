// The steps of one channel: which tensors have come, which buckets are full and in line, who waits for a result. Pure
// bookkeeping; every member is called with the engine's mutex held, and callbacks are handed back to be called without
// it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/engine.h"
#include "engine/stall.h"
#include "engine/trace.h"
#include "plan/plan.h"

namespace hvd_ext {

struct ChannelStep;

// A collect that has come to its end: call `deliver(status, data)`, then let go of `buffer`.
struct Delivery {
  Deliver deliver;
  Status status;
  const void* data = nullptr;
  std::shared_ptr<Buffer> buffer;
};

class Channel {
 public:
  // `plans` are the buckets'. Check has accepted the spec.
  Channel(ChannelSpec spec, int64_t lane, std::vector<std::shared_ptr<const Plan>> plans, Trace* trace = nullptr);
  static Status Check(const ChannelSpec& spec);

  // See Engine::BeginStep. *lost: buckets of the broken step are on their way, so the lane must fail with the status.
  Status BeginStep(std::vector<Delivery>* ended, bool* lost);

  // A submit is Reserve, the copy to `to` without the mutex, then Arrive, which says which buckets are full and next in
  // line.
  Status Reserve(int64_t tensor, int64_t nbytes, BufferPool* pool, std::shared_ptr<ChannelStep>* step, char** to);
  Status Arrive(const std::shared_ptr<ChannelStep>& step, int64_t tensor, std::vector<int64_t>* full);

  // Fills `delivery` and returns true where the collect ends at once; else it ends when its bucket does.
  bool Collect(int64_t tensor, int64_t ticket, Deliver deliver, Delivery* delivery);
  void EndBucket(ChannelStep* step, int64_t bucket, const Status& status, std::vector<Delivery>* ended);

  // So many of what EndBucket has ended are with those who waited.
  void Delivered(ChannelStep* step, int64_t count);

  // Ends all collects, and all that come later, with `status`; the first failure stays. Results that are there stay
  // good.
  void Fail(const Status& status, std::vector<Delivery>* ended);

  LaneReport Report() const;
  std::string NameOfBucket(int64_t bucket, const ChannelStep& step) const;  // "bucket 1 of 'Adam' (step 3)"

  const ChannelSpec& spec() const { return spec_; }
  int64_t lane() const { return lane_; }
  int64_t queued() const { return queued_; }  // buckets so far, over all steps
  const std::shared_ptr<const Plan>& plan(int64_t bucket) const { return plans_[static_cast<size_t>(bucket)]; }
  int64_t bucket_elements(int64_t bucket) const { return bucket_elements_[static_cast<size_t>(bucket)]; }
  bool uses(const Plan* plan) const;

 private:
  struct Place {
    int64_t bucket, offset_nbytes, nbytes;
  };

  Status CheckTensor(int64_t tensor) const;
  ChannelStep* Find(int64_t ticket) const;
  Status HalfWay(const ChannelStep& step) const;
  void EndWaiting(ChannelStep* step, const Status& status, std::vector<Delivery>* ended);
  void EndOne(ChannelStep* step, int64_t tensor, Deliver deliver, Delivery* delivery);
  std::vector<std::string> Missing(const ChannelStep& step, int64_t bucket) const;  // bucket -1: all

  ChannelSpec spec_;
  int64_t lane_;
  Trace* trace_;
  std::vector<std::shared_ptr<const Plan>> plans_;
  std::vector<Place> places_;                       // by tensor
  std::vector<int64_t> bucket_elements_;            // by bucket
  std::deque<std::shared_ptr<ChannelStep>> steps_;  // the last is the current one
  int64_t next_step_ = 1;
  int64_t queued_ = 0;
  Status failure_;
};

struct ChannelStep {
  struct Tensor {
    enum { kMissing, kCopying, kHere } state = kMissing;
    bool collected = false;
    Deliver waiting;
  };
  struct Bucket {
    std::shared_ptr<Buffer> buffer;
    int64_t here = 0;
    int64_t collected = 0;
    double first_s = -1;  // its first tensor came; only while a trace runs
    bool ended = false;
    Status status;
  };

  int64_t number = 0;
  std::vector<Tensor> tensors;
  std::vector<Bucket> buckets;
  int64_t reserved = 0;  // tensors that came or are being copied
  int64_t here = 0;
  int64_t queued = 0;   // buckets in line or further
  int64_t waiting = 0;  // collects that wait, or whose tensor is being handed over
  double wait_s = -1;   // ... since then without a break; only while a trace runs
};

}  // namespace hvd_ext

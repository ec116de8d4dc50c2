// The steps of one channel: which tensors have come, which buckets are full and in line, who waits for a result. Pure
// bookkeeping; every member is called with the engine's mutex held, and callbacks are handed back to be called without
// it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/engine.h"
#include "engine/error_feedback.h"
#include "engine/sparse_run.h"
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
  // `plans` are the buckets', `dense_plans` those of the sparse ones, null for the others. Check and CheckPlans have
  // accepted them. Throws std::bad_alloc.
  Channel(ChannelSpec spec, int64_t lane, std::vector<std::shared_ptr<const Plan>> plans,
          std::vector<std::shared_ptr<const Plan>> dense_plans, Trace* trace = nullptr);
  static Status Check(const ChannelSpec& spec);
  static Status CheckPlans(const ChannelSpec& spec, const std::vector<std::shared_ptr<const Plan>>& plans,
                           const std::vector<std::shared_ptr<const Plan>>& dense_plans);

  // See Engine::BeginStep and Engine::BeginSparseStep, which gives the density. *lost: buckets of the broken step are
  // on their way, so the lane must fail with the status.
  Status BeginStep(std::optional<double> density, std::vector<Delivery>* ended, bool* lost);

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
  int64_t bucket_elements(int64_t bucket) const { return bucket_elements_[static_cast<size_t>(bucket)]; }
  bool uses(const Plan* plan) const;

  // channel_sparse.cc; see Engine.
  bool has_sparse() const { return has_sparse_; }
  Status EndStep(bool commit);
  Status GetKept(int64_t bucket, KeptShard* shard) const;
  Status CopyKept(int64_t bucket, Kept which, float* to, const float* from);
  SparseStatistics GetSparseStatistics() const;
  // Of a sparse bucket's run in a step: its plan, and what it works with. Null for others.
  const std::shared_ptr<const Plan>& PlanOf(const ChannelStep& step, int64_t bucket) const;
  std::shared_ptr<SparseRun> MakeRun(const ChannelStep& step, int64_t bucket) const;

 private:
  struct Place {
    int64_t bucket, offset_nbytes, nbytes;
  };

  static Status CheckSparse(const std::string& where, const BucketSpec& bucket, int64_t elements);
  Status CheckDensity(std::optional<double> density) const;
  void DropOpenStep();
  Status FindFeedback(int64_t bucket, Feedback** feedback) const;
  Status CheckTensor(int64_t tensor) const;
  ChannelStep* Find(int64_t ticket) const;
  Status HalfWay(const ChannelStep& step) const;
  void EndWaiting(ChannelStep* step, const Status& status, std::vector<Delivery>* ended);
  void EndOne(ChannelStep* step, int64_t tensor, Deliver deliver, Delivery* delivery);
  std::vector<std::string> Missing(const ChannelStep& step, int64_t bucket) const;  // bucket -1: all

  ChannelSpec spec_;
  int64_t lane_;
  Trace* trace_;
  std::vector<std::shared_ptr<const Plan>> plans_, dense_plans_;
  std::vector<Place> places_;                       // by tensor
  std::vector<int64_t> bucket_elements_;            // by bucket
  std::deque<std::shared_ptr<ChannelStep>> steps_;  // the last is the current one
  int64_t next_step_ = 1;
  int64_t queued_ = 0;
  Status failure_;
  bool has_sparse_ = false;
  bool sparse_step_ = false;                         // begun and not ended
  std::vector<std::shared_ptr<Feedback>> feedback_;  // by bucket; null: not sparse
  std::vector<int64_t> running_;                     // by bucket: its runs, queued or further, that have not ended
  std::shared_ptr<SparseCounters> counters_ = std::make_shared<SparseCounters>();
  int64_t committed_ = 0, dropped_ = 0;
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
  double density = 1;
  std::vector<Tensor> tensors;
  std::vector<Bucket> buckets;
  int64_t reserved = 0;  // tensors that came or are being copied
  int64_t here = 0;
  int64_t queued = 0;   // buckets in line or further
  int64_t waiting = 0;  // collects that wait, or whose tensor is being handed over
  double wait_s = -1;   // ... since then without a break; only while a trace runs
};

}  // namespace hvd_ext

// When the runs of a channel's steps start, and what this rank gives to them. A channel calls its gate with its lock
// held, except for what any thread may ask.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/buffer_pool.h"
#include "engine/channel_step.h"
#include "engine/stall.h"

namespace hvd_ext {

class PartialGate;

class StepGate {
 public:
  virtual ~StepGate() = default;

  // Whether the step may begin on this rank. `skips`: it has no gradient of this rank.
  virtual Status BeginStep(int64_t /*step*/, bool /*skips*/) { return Status::Ok(); }
  // The step under way is given up before all its tensors have arrived. Returns whether some are in a run already, and
  // sets *newest to the newest step whose number is not given again.
  virtual bool AbandonStep(const ChannelStep& step, int64_t* newest) = 0;
  // Whether the run of the step's next bucket starts when `arrived` of the bucket's tensors are there.
  virtual bool MayStart(const ChannelStep& step, int64_t bucket, int64_t arrived) const = 0;
  // All tensors of the step have arrived. Returns whether the engine's thread must look at the channel.
  virtual bool Arrive(ChannelStep*) { return false; }
  // Whether all runs of a step, *step, start now. The step may not have begun on this rank.
  virtual bool BeginRound(int64_t* /*step*/) { return false; }
  // The buffer of a run that starts, with what this rank gives to it. Throws std::bad_alloc.
  virtual std::shared_ptr<Buffer> Contribution(ChannelStep* step, int64_t bucket) = 0;
  // Where gradients are written before they are given to a run: in memory of the device, or of the host if the gate
  // works on them.
  virtual BufferPool* PoolOfInputs(BufferPool* of_device) const { return of_device; }
  // The run of a bucket has ended. Returns the buckets [first, last) whose results may be collected from now on.
  virtual std::pair<int64_t, int64_t> EndRun(ChannelStep* step, int64_t bucket, std::vector<Delivery>* ended) = 0;
  virtual void Fail(const Status&, std::vector<Delivery>* /*ended*/) {}
  // What this rank says of the lane when it is asked. `under_way`: a step lacks tensors.
  virtual LaneReport::State StateOf(bool under_way) const = 0;
  // Corrects the channel's answer: the newest step that has begun, and the newest one that is over.
  virtual void Progress(int64_t* /*step*/, int64_t* /*over*/) const {}

  // --- Any thread. Whether the channel of this name may get another layout, and whether it may be given results.
  virtual Status CheckSwitch(const std::string& /*channel*/) const { return Status::Ok(); }
  virtual Status CheckGiveResult(const std::string& /*channel*/) const { return Status::Ok(); }
  // Whether a rank with the channel of this name may join.
  virtual Status CheckJoin(const std::string& /*channel*/) const { return Status::Ok(); }
  // Finds the gate of a channel whose rounds are partial. kInvalid where its steps wait for all ranks.
  virtual Status FindPartial(const std::string& channel, PartialGate** gate) = 0;
};

// A bucket starts when its tensors have arrived and the bucket before it has started. Has no state.
class SynchronousGate : public StepGate {
 public:
  bool AbandonStep(const ChannelStep& step, int64_t*) override { return step.queued > 0; }
  bool MayStart(const ChannelStep& step, int64_t bucket, int64_t arrived) const override {
    return arrived == step.layout->bucket(bucket).tensors();
  }
  std::shared_ptr<Buffer> Contribution(ChannelStep* step, int64_t bucket) override {
    return std::exchange(step->bucket(bucket).input, nullptr);
  }
  std::pair<int64_t, int64_t> EndRun(ChannelStep*, int64_t bucket, std::vector<Delivery>*) override {
    return {bucket, bucket + 1};
  }
  LaneReport::State StateOf(bool under_way) const override {
    return under_way ? LaneReport::kOpen : LaneReport::kNotBegun;
  }
  Status FindPartial(const std::string& channel, PartialGate**) override {
    return Invalid("channel " + Quoted(channel) + ": its steps wait for all ranks; only partial rounds have that");
  }
};

}  // namespace hvd_ext

// The steps of one channel: which tensors have come, which runs are in line, and who waits for a result. Its gate
// (step_gate.h) says when runs start. Any thread; a channel has a lock of its own. Callbacks are handed back, to be
// called without it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/arriving.h"
#include "engine/buffer_pool.h"
#include "engine/channel_step.h"
#include "engine/engine.h"
#include "engine/layout.h"
#include "engine/sparse_run.h"
#include "engine/stall.h"
#include "engine/step_gate.h"
#include "engine/trace.h"
#include "plan/plan.h"

namespace hvd_ext {

class Channel {
 public:
  // A run that may start.
  struct Ready {
    std::shared_ptr<ChannelStep> step;
    int64_t bucket;
    std::shared_ptr<Buffer> buffer;
    std::shared_ptr<const Arriving> arriving;  // null: all tensors have come
  };
  struct Begun {
    int64_t step = 0;
    std::vector<Delivery> ended;
    bool lost = false;  // the channel has failed: parts of the broken step are on their way, so the lane must fail too
  };

  // Throws std::bad_alloc. `device`: where its buckets lie. `layout` may have more tensors than the rank submits, after
  // those of `tensor_names`.
  Channel(std::string name, std::vector<std::string> tensor_names, std::shared_ptr<const Layout> layout, int64_t lane,
          std::shared_ptr<StepGate> gate, Trace* trace, std::shared_ptr<Device> device = HostDevice(),
          bool on_device = false);

  const std::string& name() const { return name_; }
  int64_t lane() const { return lane_; }
  StepGate* gate() const { return gate_.get(); }
  // Whether its steps have a density: its first layout had sparse buckets. A later one may have none.
  bool has_density() const { return has_density_; }
  bool on_device() const { return on_device_; }  // ChannelSpec::on_device
  // Whether the layout of a step, or the one that the next step takes, uses the plan.
  bool Uses(const Plan* plan) const HVD_EXT_EXCLUDES(mutex_);

  // The next step takes this layout. Residuals and velocities begin at zero: who switches has read them before, and
  // writes them after. Refused during a top-k step, where a tensor has another size, and where sparse buckets come to a
  // channel whose steps have no density.
  Status Switch(const std::vector<std::string>& tensor_names, std::shared_ptr<const Layout> layout)
      HVD_EXT_EXCLUDES(state_mutex_, mutex_);
  // Calls `call` once, before step `step` or the first one after it begins, on the thread that begins it.
  void AtStep(int64_t step, std::function<void(int64_t step)> call) HVD_EXT_EXCLUDES(mutex_);
  bool HasCallBeforeStep() const HVD_EXT_EXCLUDES(mutex_);
  // What is to be called before the next step; null: nothing. *step: the number of that step.
  std::function<void(int64_t step)> TakeCallBeforeStep(int64_t* step) HVD_EXT_EXCLUDES(mutex_);
  // The newest complete steps, at most `most`, the oldest first.
  std::vector<StepTimes> Times(int64_t most) const HVD_EXT_EXCLUDES(mutex_);
  // How far this rank is; null: no step has begun, or it was given up.
  std::optional<StepPlace> Place() const HVD_EXT_EXCLUDES(mutex_);
  int64_t runs() const HVD_EXT_EXCLUDES(mutex_);  // queued so far, over all steps
  // Whether no run is queued or under way, or none can end.
  bool IsQuiet() const HVD_EXT_EXCLUDES(mutex_);
  int64_t tensors() const { return static_cast<int64_t>(tensor_names_.size()); }
  int64_t NbytesOf(int64_t tensor) const HVD_EXT_EXCLUDES(mutex_);
  // The newest step that has begun, and the newest one that is complete; 0: none.
  void Progress(int64_t* step, int64_t* over) const HVD_EXT_EXCLUDES(mutex_);

  // See Engine::BeginStep and Engine::BeginTopKStep, which gives `topk`. With `skips`, which not all gates allow, the
  // step has no gradient of this rank.
  Status BeginStep(const std::optional<TopKStep>& topk, bool skips, Begun* begun)
      HVD_EXT_EXCLUDES(state_mutex_, mutex_);

  // A submit is Reserve, Core::Fill of its place in `buffer`, then Arrive. *ready: the engine's thread must look at the
  // channel. Where Reserve gives `arriving`, the tensor is large and the last that its bucket lacks: the bucket is
  // ready already, and the copy says how far it is.
  Status Reserve(int64_t tensor, int64_t nbytes, BufferPool* pool, std::shared_ptr<ChannelStep>* step,
                 std::shared_ptr<Buffer>* buffer, std::shared_ptr<Arriving>* arriving) HVD_EXT_EXCLUDES(mutex_);
  Status Arrive(const std::shared_ptr<ChannelStep>& step, int64_t tensor, bool* ready) HVD_EXT_EXCLUDES(mutex_);
  // Makes the runs of the gate's next round ready; false where none may begin. Throws std::bad_alloc.
  bool BeginRound() HVD_EXT_EXCLUDES(mutex_);
  // Takes the next run; false where none is ready. All ranks start their runs in this order.
  bool TakeReady(Ready* ready) HVD_EXT_EXCLUDES(mutex_);

  // Fills `delivery` and returns true where the collect ends at once; else it ends when its bucket does.
  bool Collect(int64_t tensor, int64_t ticket, Deliver deliver, Delivery* delivery) HVD_EXT_EXCLUDES(mutex_);
  // See Engine.
  Status GiveResult(int64_t tensor, const void* data, int64_t nbytes) HVD_EXT_EXCLUDES(mutex_);
  // `result`: the bucket's reduced tensors. Returns how many collects of the step have ended.
  int64_t EndRun(ChannelStep* step, int64_t bucket, const Status& status, std::shared_ptr<Buffer> result,
                 std::vector<Delivery>* ended) HVD_EXT_EXCLUDES(mutex_);

  // The deliveries of `count` collects that EndRun has given have been made.
  void Delivered(ChannelStep* step, int64_t count) HVD_EXT_EXCLUDES(mutex_);

  // Ends all collects, and all that come later, with `status`; the first failure stays. Results that are there stay
  // good.
  void Fail(const Status& status, std::vector<Delivery>* ended) HVD_EXT_EXCLUDES(mutex_);

  LaneReport Report() const HVD_EXT_EXCLUDES(mutex_);
  Status CheckTensor(int64_t tensor) const;
  std::string NameOfBucket(int64_t bucket, const ChannelStep& step) const;  // "bucket 1 of 'Adam' (step 3)"

  // channel_sparse.cc; see Engine.
  Status EndStep(bool commit) HVD_EXT_EXCLUDES(state_mutex_, mutex_);
  Status GetFeedback(int64_t bucket, FeedbackShard* shard) const HVD_EXT_EXCLUDES(mutex_);
  Status ReadFeedback(int64_t bucket, FeedbackArray which, float* to) HVD_EXT_EXCLUDES(state_mutex_, mutex_);
  Status WriteFeedback(int64_t bucket, FeedbackArray which, const float* from) HVD_EXT_EXCLUDES(state_mutex_, mutex_);
  TopKStatistics GetTopKStatistics() const HVD_EXT_EXCLUDES(mutex_);
  // What the run of a sparse bucket works with; null for other buckets.
  std::shared_ptr<SparseRun> MakeSparseRun(const ChannelStep& step, int64_t bucket) const;

 private:
  BucketStates StatesOf(const Layout& layout) const;
  bool IsComplete(const ChannelStep& step) const HVD_EXT_REQUIRES(mutex_);
  Status CheckTopK(const std::optional<TopKStep>& topk) const HVD_EXT_REQUIRES(mutex_);
  void DropOpenStep() HVD_EXT_REQUIRES(mutex_);
  // Gives up the step under way, not all of whose tensors have come. An error unless none has.
  Status AbandonStep(Begun* begun) HVD_EXT_REQUIRES(mutex_);
  std::shared_ptr<ChannelStep> StepOf(int64_t number, const TopKStep& topk) HVD_EXT_REQUIRES(mutex_);
  void QueueNext(const std::shared_ptr<ChannelStep>& step, std::shared_ptr<const Arriving> arriving)
      HVD_EXT_REQUIRES(mutex_);
  Status FindFeedback(int64_t bucket, Feedback** feedback) const HVD_EXT_REQUIRES(mutex_);
  // Finds what has an array of a bucket; refused during a step.
  Status FindArray(int64_t bucket, FeedbackArray which, Feedback** feedback) const HVD_EXT_REQUIRES(mutex_);
  void EndWaiting(ChannelStep* step, const Status& status, std::vector<Delivery>* ended) HVD_EXT_REQUIRES(mutex_);
  void EndOne(ChannelStep* step, int64_t tensor, Deliver deliver, Delivery* delivery) HVD_EXT_REQUIRES(mutex_);
  void NoteDelivered(ChannelStep* step, int64_t count) HVD_EXT_REQUIRES(mutex_);
  void FailNow(const Status& status, std::vector<Delivery>* ended) HVD_EXT_REQUIRES(mutex_);
  // The tensors of a bucket that have not come; bucket -1: of all.
  std::vector<std::string> Missing(const ChannelStep& step, int64_t bucket) const HVD_EXT_REQUIRES(mutex_);
  const std::string& NameOf(int64_t tensor) const { return tensor_names_[static_cast<size_t>(tensor)]; }

  const std::string name_;
  const std::vector<std::string> tensor_names_;
  const int64_t lane_;
  const std::shared_ptr<StepGate> gate_;
  Trace* const trace_;
  const std::shared_ptr<Device> device_;
  const bool has_density_, on_device_;
  const std::shared_ptr<SparseCounters> counters_ = std::make_shared<SparseCounters>();
  // Held while residuals are copied, which takes long, and to begin or end a step; taken before `mutex_`. So neither
  // submits nor the engine's thread wait for such a copy.
  Mutex state_mutex_;
  mutable Mutex mutex_;
  // The layout that the next step takes, and what its buckets carry from step to step.
  std::shared_ptr<const Layout> layout_ HVD_EXT_GUARDED_BY(mutex_);
  std::shared_ptr<BucketStates> states_ HVD_EXT_GUARDED_BY(mutex_);
  std::map<int64_t, std::shared_ptr<ChannelStep>> steps_ HVD_EXT_GUARDED_BY(mutex_);  // by number
  std::shared_ptr<ChannelStep> current_ HVD_EXT_GUARDED_BY(mutex_);  // the newest that has begun; null: none, abandoned
  std::deque<Ready> ready_ HVD_EXT_GUARDED_BY(mutex_);               // not taken yet
  int64_t begun_ HVD_EXT_GUARDED_BY(mutex_) = 0;                     // the number of the newest step
  std::map<int64_t, std::shared_ptr<std::vector<char>>> given_ HVD_EXT_GUARDED_BY(mutex_);  // by GiveResult, by tensor
  int64_t queued_ HVD_EXT_GUARDED_BY(mutex_) = 0;  // runs so far, over all steps
  StepPlace place_ HVD_EXT_GUARDED_BY(mutex_);     // of the newest step
  Status failure_ HVD_EXT_GUARDED_BY(mutex_);
  bool topk_step_ HVD_EXT_GUARDED_BY(mutex_) = false;  // begun and not ended
  int64_t committed_ HVD_EXT_GUARDED_BY(mutex_) = 0, dropped_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  std::deque<StepTimes> times_ HVD_EXT_GUARDED_BY(mutex_);  // of the newest complete steps
  int64_t call_at_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  std::function<void(int64_t step)> call_ HVD_EXT_GUARDED_BY(mutex_);
};

}  // namespace hvd_ext

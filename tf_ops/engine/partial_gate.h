// The gate of a channel whose rounds do not wait for all ranks (rounds.h). Round s is the runs of step s on all ranks.
// It begins on a rank by the rules of rounds, whether or not the rank's gradients of step s are there: the rank gives
// what it holds, and the new gradients if they are there. Gradients that come after their round are held for the next
// one: nothing is lost.
//
// Any thread; a lock of its own, which a channel takes while it holds its own. Callbacks are handed back, to be called
// without it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/buffer_pool.h"
#include "engine/engine.h"
#include "engine/layout.h"
#include "engine/rounds.h"
#include "engine/step_gate.h"

namespace hvd_ext {

class PartialGate : public StepGate {
 public:
  // The last bucket of `layout` is the table of who takes part: for each rank the newest step whose gradient is in this
  // round or was in one before, then for each rank its flags. No rank submits it. `pool`: of the host's memory.
  PartialGate(std::string channel, std::shared_ptr<const Layout> layout, const PartialSpec& spec, int rank, int size,
              BufferPool* pool);
  static int64_t TableElements(int size) { return 2 * static_cast<int64_t>(size); }

  const PartialSpec& spec() const { return spec_; }

  Status BeginStep(int64_t step, bool skips) override HVD_EXT_EXCLUDES(mutex_);
  bool AbandonStep(const ChannelStep& step, int64_t* newest) override HVD_EXT_EXCLUDES(mutex_);
  bool MayStart(const ChannelStep&, int64_t, int64_t) const override { return false; }
  bool Arrive(ChannelStep* step) override HVD_EXT_EXCLUDES(mutex_);
  bool BeginRound(int64_t* step) override HVD_EXT_EXCLUDES(mutex_);
  std::shared_ptr<Buffer> Contribution(ChannelStep* step, int64_t bucket) override HVD_EXT_EXCLUDES(mutex_);
  BufferPool* PoolOfInputs(BufferPool*) const override { return pool_; }
  // The results of a round may be collected together, when its last run has ended.
  std::pair<int64_t, int64_t> EndRun(ChannelStep* step, int64_t bucket, std::vector<Delivery>* ended) override
      HVD_EXT_EXCLUDES(mutex_);
  void Fail(const Status& status, std::vector<Delivery>* ended) override HVD_EXT_EXCLUDES(mutex_);
  LaneReport::State StateOf(bool under_way) const override HVD_EXT_EXCLUDES(mutex_);
  void Progress(int64_t* step, int64_t* over) const override HVD_EXT_EXCLUDES(mutex_);
  Status CheckSwitch(const std::string& channel) const override;
  Status CheckJoin(const std::string& channel) const override;
  Status CheckGiveResult(const std::string& channel) const override;
  Status FindPartial(const std::string&, PartialGate** gate) override;

  // --- The user. The round of the step after the next `ahead` - 1 ones takes all ranks.
  void Flush(int64_t ahead) HVD_EXT_EXCLUDES(mutex_);
  // Small bits that are sent with this rank's contributions, until they are set again.
  void SetFlags(int64_t flags) HVD_EXT_EXCLUDES(mutex_);
  // Calls `done(true)` when the round of this rank's next step is over, `done(false)` when all ranks have left and this
  // one has taken all rounds.
  void AwaitRound(NextRound done) HVD_EXT_EXCLUDES(mutex_);
  std::vector<RoundInfo> Rounds(int64_t first, int64_t most) const HVD_EXT_EXCLUDES(mutex_);
  // Between steps: what is held of a tensor; zeros where nothing is. *held: whether anything is held of any tensor.
  void ReadHeld(int64_t tensor, void* to, bool* held) const HVD_EXT_EXCLUDES(mutex_);
  void WriteHeld(int64_t tensor, const void* from) HVD_EXT_EXCLUDES(mutex_);

  // --- The progress role. The newest arrival that rank 0 has not been sent; false: there is none.
  bool TakeArrival(int64_t* step, bool* full) HVD_EXT_EXCLUDES(mutex_);
  void Open(int64_t round) HVD_EXT_EXCLUDES(mutex_);
  // On rank 0: a rank has announced its gradient of a step.
  void Came(int rank, int64_t step) HVD_EXT_EXCLUDES(mutex_);
  void Leave() HVD_EXT_EXCLUDES(mutex_);
  // All ranks have left, and `last` was their last round.
  void End(int64_t last, std::vector<Delivery>* ended) HVD_EXT_EXCLUDES(mutex_);
  // The round that this rank waits for and has not begun; 0: none, or one that has begun still runs.
  int64_t WaitsFor() const HVD_EXT_EXCLUDES(mutex_);

 private:
  using Gradients = std::shared_ptr<Buffer>;  // of a bucket
  // A round that has begun and is not over.
  struct Round {
    double begin_s = 0;
    bool on_time = false;  // this rank's gradients of the step were there
  };

  int64_t buckets() const { return static_cast<int64_t>(layout_->buckets.size()) - 1; }  // without the table
  Gradients Zeros(int64_t bucket) const;
  Gradients Sum(int64_t bucket, Gradients older, Gradients newer) const;
  Gradients Table() const HVD_EXT_REQUIRES(mutex_);
  void NoteRound(const ChannelStep& step, double begin_s) HVD_EXT_REQUIRES(mutex_);
  void Requeue(ChannelStep* step) HVD_EXT_REQUIRES(mutex_);
  void Answer(std::vector<Delivery>* ended) HVD_EXT_REQUIRES(mutex_);
  std::deque<RoundInfo>::iterator InfoFrom(int64_t round) HVD_EXT_REQUIRES(mutex_);  // the first from this round on

  const std::string name_;
  const std::shared_ptr<const Layout> layout_;
  const PartialSpec spec_;
  const int rank_, size_;
  BufferPool* const pool_;

  mutable Mutex mutex_;
  RoundGate rounds_ HVD_EXT_GUARDED_BY(mutex_);
  std::vector<Gradients> held_ HVD_EXT_GUARDED_BY(mutex_);  // by bucket; null: nothing
  std::map<int64_t, Round> running_ HVD_EXT_GUARDED_BY(mutex_);
  std::deque<RoundInfo> infos_ HVD_EXT_GUARDED_BY(mutex_);  // by number; that of an earlier round may come later
  std::map<int64_t, std::vector<double>> came_ HVD_EXT_GUARDED_BY(mutex_);  // of steps whose round is not over
  int64_t step_ HVD_EXT_GUARDED_BY(mutex_) = 0;                             // the newest that has begun on this rank
  int64_t over_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  int64_t announced_ HVD_EXT_GUARDED_BY(mutex_) = 0;  // the newest arrival that rank 0 has been sent
  int64_t last_ HVD_EXT_GUARDED_BY(mutex_) = -1;      // after the end: the last round
  int64_t flush_ HVD_EXT_GUARDED_BY(mutex_) = 0;      // the step whose round is to take all ranks; 0: none
  int64_t full_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  int64_t flags_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  NextRound awaiting_ HVD_EXT_GUARDED_BY(mutex_);
  Status failure_ HVD_EXT_GUARDED_BY(mutex_);
};

}  // namespace hvd_ext

// The steps of a channel whose rounds do not wait for all ranks (rounds.h): a step's gradients come here, a round takes
// what is here, and the results of rounds wait here for the steps that they belong to. Gradients that come after their
// round are held for the next one: nothing is lost.
//
// Any thread; a lock of its own. Callbacks are handed back, to be called without it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/delivery.h"
#include "engine/engine.h"
#include "engine/rounds.h"

namespace hvd_ext {

class PartialSteps {
 public:
  struct Tensor {
    std::string name;
    DType dtype;
    int64_t elements;
    int64_t nbytes() const { return elements * static_cast<int64_t>(SizeOf(dtype)); }
  };

  // A whole step's gradients, tensor after tensor.
  using Gradients = std::shared_ptr<std::vector<char>>;

  // What this rank gives to a round: null where it gives zeros.
  struct Contribution {
    int64_t round = 0;
    int64_t arrived = 0;  // the newest step whose gradient is in this round or was in one before
    int64_t flags = 0;
    Gradients gradients;
  };

  PartialSteps(std::string name, std::vector<Tensor> tensors, const PartialSpec& spec, int rank, int size);

  const PartialSpec& spec() const { return spec_; }
  int64_t tensors() const { return static_cast<int64_t>(tensors_.size()); }
  const Tensor& tensor(int64_t i) const { return tensors_[static_cast<size_t>(i)]; }

  // --- The steps of this rank. A submit is Reserve, the copy to `to`, then Arrive. *whole: the step's gradient is
  // there.
  Status BeginStep() HVD_EXT_EXCLUDES(mutex_);
  Status Reserve(int64_t tensor, int64_t nbytes, int64_t* step, char** to) HVD_EXT_EXCLUDES(mutex_);
  Status Arrive(int64_t step, int64_t tensor, bool* whole) HVD_EXT_EXCLUDES(mutex_);
  // A step without a gradient of this rank; its round must be over.
  Status SkipStep(int64_t* step) HVD_EXT_EXCLUDES(mutex_);
  // As Channel::Collect.
  bool Collect(int64_t tensor, int64_t step, Deliver deliver, Delivery* delivery) HVD_EXT_EXCLUDES(mutex_);
  // The round of the step after the next `ahead` - 1 ones takes all ranks.
  void Flush(int64_t ahead) HVD_EXT_EXCLUDES(mutex_);
  // Small bits that travel with this rank's contributions, until they are set again.
  void SetFlags(int64_t flags) HVD_EXT_EXCLUDES(mutex_);
  // Calls `done(true)` when the round of this rank's next step is over, `done(false)` when all ranks have left and this
  // one has taken all rounds.
  void AwaitRound(NextRound done) HVD_EXT_EXCLUDES(mutex_);
  // The newest step that has begun, and the newest round that is over.
  void Progress(int64_t* step, int64_t* over) const HVD_EXT_EXCLUDES(mutex_);

  // --- The rounds; whoever has the progress lock.
  // What is told to rank 0 of a gradient that is there: false, where nothing is new.
  bool TakeArrival(int64_t* step, bool* full) HVD_EXT_EXCLUDES(mutex_);
  void Open(int64_t round) HVD_EXT_EXCLUDES(mutex_);
  // On rank 0: the word has come that a rank's gradient of a step is there.
  void Came(int rank, int64_t step) HVD_EXT_EXCLUDES(mutex_);
  void Leave() HVD_EXT_EXCLUDES(mutex_);
  // All ranks have left, and `last` was their last round.
  void End(int64_t last, std::vector<std::function<void()>>* ended) HVD_EXT_EXCLUDES(mutex_);
  // The round that this rank waits for and has not begun; 0: none, or one that has begun still runs.
  int64_t WaitsFor() const HVD_EXT_EXCLUDES(mutex_);
  // Whether the next round is open, and the bound of the staleness does not let this rank take part.
  bool AtBound() const HVD_EXT_EXCLUDES(mutex_);
  // Begins the next round, if it may begin.
  bool BeginRound(Contribution* given) HVD_EXT_EXCLUDES(mutex_);
  // Writes this rank's part of a tensor; tensor `tensors()` is the table of who takes part.
  void Write(const Contribution& given, int64_t tensor, char* to) const;
  // A tensor's sum is there. When all are, the round is over.
  void EndTensor(int64_t round, int64_t tensor, const Status& status, const void* data, const Memory& memory,
                 std::vector<std::function<void()>>* ended) HVD_EXT_EXCLUDES(mutex_);
  void Fail(const Status& status, std::vector<Delivery>* ended) HVD_EXT_EXCLUDES(mutex_);

  // --- What is known
  std::vector<RoundInfo> Rounds(int64_t first, int64_t most) const HVD_EXT_EXCLUDES(mutex_);
  // Between steps: what is held of a tensor; zeros where nothing is.
  Status ReadHeld(int64_t tensor, void* to, bool* held) const HVD_EXT_EXCLUDES(mutex_);
  Status WriteHeld(int64_t tensor, const void* from) HVD_EXT_EXCLUDES(mutex_);

  // The table of who takes part, as a tensor: for each rank `arrived`, then for each rank its flags.
  static int64_t TableElements(int size) { return 2 * static_cast<int64_t>(size); }

 private:
  struct Round {
    std::vector<Deliver> waiting;
    std::vector<const void*> data;
    std::vector<Memory> memory;
    std::vector<bool> collected;
    int64_t ended = 0, taken = 0;
    bool over = false;
    Status status;
    double begin_s = 0, wait_s = -1;
    Gradients given;  // kept where what was given may be held again
  };

  Round& At(int64_t round) HVD_EXT_REQUIRES(mutex_);
  void GiveOne(Round* round, int64_t tensor, Deliver deliver, Delivery* delivery) HVD_EXT_REQUIRES(mutex_);
  void EndRound(int64_t number, Round* round) HVD_EXT_REQUIRES(mutex_);
  void Hold(Gradients older, Gradients newer) HVD_EXT_REQUIRES(mutex_);
  bool IsFinite(const std::vector<const void*>& data) const;
  Gradients TakeMemory() HVD_EXT_REQUIRES(mutex_);
  NextRound Answer(bool* more) HVD_EXT_REQUIRES(mutex_);
  std::deque<RoundInfo>::iterator InfoFrom(int64_t round) HVD_EXT_REQUIRES(mutex_);  // the first from this round on
  Status CheckTensor(int64_t tensor) const;
  std::string Named(int64_t tensor) const;
  char* PartOf(const Gradients& gradients, int64_t tensor) const {
    return gradients->data() + begins_[static_cast<size_t>(tensor)];
  }

  const std::string name_;
  const std::vector<Tensor> tensors_;
  const PartialSpec spec_;
  const int rank_, size_;
  std::vector<int64_t> begins_;  // of the tensors in Gradients, and the end

  mutable Mutex mutex_;
  RoundGate gate_ HVD_EXT_GUARDED_BY(mutex_);
  int64_t step_ HVD_EXT_GUARDED_BY(mutex_) = 0;        // the step under way, or the last one
  std::vector<bool> here_ HVD_EXT_GUARDED_BY(mutex_);  // the step's tensors that are reserved
  int64_t whole_ HVD_EXT_GUARDED_BY(mutex_) = 0;       // the newest step whose gradient is there
  int64_t copied_ HVD_EXT_GUARDED_BY(mutex_) = 0;      // the step's tensors that are there
  Gradients staged_ HVD_EXT_GUARDED_BY(mutex_);        // of the step under way, or waiting for its round
  Gradients held_ HVD_EXT_GUARDED_BY(mutex_);          // null: nothing
  std::vector<Gradients> spare_ HVD_EXT_GUARDED_BY(mutex_);
  std::map<int64_t, Round> rounds_ HVD_EXT_GUARDED_BY(mutex_);  // not yet taken by their steps
  std::deque<RoundInfo> infos_ HVD_EXT_GUARDED_BY(mutex_);      // by number; that of an earlier round may come later
  std::map<int64_t, std::vector<double>> came_ HVD_EXT_GUARDED_BY(mutex_);  // of steps whose round is not over
  int64_t over_ HVD_EXT_GUARDED_BY(mutex_) = 0, told_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  int64_t last_ HVD_EXT_GUARDED_BY(mutex_) = -1;  // after the end: the last round
  int64_t flush_ HVD_EXT_GUARDED_BY(mutex_) = 0;  // the step whose round is to take all ranks; 0: none
  int64_t full_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  int64_t flags_ HVD_EXT_GUARDED_BY(mutex_) = 0;
  NextRound awaiting_ HVD_EXT_GUARDED_BY(mutex_);
  Status failure_ HVD_EXT_GUARDED_BY(mutex_);
};

}  // namespace hvd_ext

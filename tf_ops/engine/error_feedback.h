// The residual and the velocity of a sparse bucket on this rank, and what error feedback does with them. A step reads
// one pair of arrays and writes another, and a commit exchanges the two: before it, nothing has happened.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "kernels/topk.h"
#include "plan/plan.h"

namespace hvd_ext {

// floor(density * elements + 1/2) in IEEE double.
int64_t EntriesOf(double density, int64_t elements);

// The elements of a bucket that a plan selects from or folds.
FeedbackShard ShardOf(const Plan& plan, int64_t elements);

class Feedback {
 public:
  // `shard`: the elements of the bucket that SELECT and FOLD cover. `tensor_begins`: the elements at which the bucket's
  // tensors begin. Throws std::bad_alloc.
  Feedback(const SparseSpec& spec, const FeedbackShard& shard, const std::vector<int64_t>& tensor_begins);

  const SparseSpec& spec() const { return spec_; }
  const FeedbackShard& shard() const { return shard_; }
  // The borders of the segments from which entries are selected, in elements of the bucket: those of the shard, and
  // with per_tensor those of its tensors.
  const std::vector<int64_t>& cuts() const { return cuts_; }

  // The channel calls these, with its lock held, while no run uses the arrays.
  void Commit();
  // The array that the next step reads; empty where there is none. It keeps its size.
  std::vector<float>* Get(FeedbackArray which);

  // The rest is the progress thread's. One run at a time uses the arrays: Enter says whether this one may, and then
  // none other may until Leave.
  bool Enter();
  void Leave() { used_ = false; }
  // How many entries a step of this density selects from a segment, and from the shard.
  int64_t EntriesIn(double density, size_t segment) const;
  int64_t EntriesAt(double density) const;
  // What a step reads and writes; `units` is the shard in the bucket's buffer.
  ErrorFeedback Arrays(const TopKStep& step, const float* units);
  void Fold(const TopKStep& step, float* units);
  // Adds to the residual what a vector does not send; `element` of the bucket lies in the shard.
  void Return(int64_t element, float value) { Return(element, 1, &value); }
  void Return(int64_t element, int64_t count, const float* values);

 private:
  const SparseSpec spec_;
  const FeedbackShard shard_;
  std::vector<int64_t> cuts_;
  std::vector<float> residual_, next_residual_, velocity_, next_velocity_;
  bool used_ = false;
};

}  // namespace hvd_ext

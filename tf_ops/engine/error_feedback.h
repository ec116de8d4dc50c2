// The residual and the velocity of a sparse bucket on this rank, and what error feedback does with them. A step reads
// one pair of arrays and writes another, and a commit exchanges the two: before it, nothing has happened.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/engine.h"
#include "engine/sparse_vector.h"
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

  // The channel calls these, with its lock held, while no run uses the arrays.
  void Commit();
  // The array that the next step reads; empty where there is none. It keeps its size.
  std::vector<float>* Get(FeedbackArray which);

  // The rest is the progress thread's. One run at a time uses the arrays: Enter says whether this one may, and then
  // none other may until Leave.
  bool Enter();
  void Leave() { used_ = false; }
  // How many entries a step of this density selects from the shard: the sum over its segments.
  int64_t EntriesAt(double density) const;
  // `units` is the shard in the bucket's buffer. Rounds the values of `own` to the wire's dtype.
  void Select(const TopKStep& step, uint64_t seed, const float* units, TopKScratch* scratch, BufferPool* pool,
              SparseVector* own);
  void Fold(const TopKStep& step, float* units);
  // Adds to the residual what was selected and is not sent; `element` of the bucket lies in the shard.
  void Return(int64_t element, float value);

 private:
  ErrorFeedback Arrays(const TopKStep& step, const float* units);
  int64_t EntriesIn(double density, size_t segment) const;

  const SparseSpec spec_;
  const FeedbackShard shard_;
  std::vector<int64_t> cuts_;  // the borders of the segments, in elements of the bucket
  std::vector<float> residual_, next_residual_, velocity_, next_velocity_;
  std::vector<TopKSegment> segments_;
  std::vector<int64_t> counts_;
  bool used_ = false;
};

}  // namespace hvd_ext

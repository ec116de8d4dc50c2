// What a sparse bucket keeps on this rank from step to step, and what error feedback does with it. A step writes into
// second arrays, which become the first when it is committed: until then nothing has happened.
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

// What of a bucket a plan selects or folds.
KeptShard ShardOf(const Plan& plan, int64_t elements);

class Feedback {
 public:
  // `shard`: the elements of the bucket that SELECT and FOLD are about. `tensor_begins`: where the bucket's tensors
  // begin in it. Throws std::bad_alloc.
  Feedback(const SparseSpec& spec, const KeptShard& shard, const std::vector<int64_t>& tensor_begins);

  const SparseSpec& spec() const { return spec_; }
  const KeptShard& shard() const { return shard_; }

  // Whoever holds the engine's mutex, while no run uses it.
  void Commit();
  // The array that a step starts from; null: there is none.
  float* Get(Kept which);

  // The engine's thread. One run at a time uses it: Enter says whether this one may.
  bool Enter();
  void Leave() { used_ = false; }
  // The shard's k at a density, which is that of all its segments.
  int64_t EntriesAt(double density) const;
  // `units` is the shard in the bucket's buffer. The vector's values are rounded as they will travel.
  void Select(double density, uint64_t seed, const float* units, TopKScratch* scratch, BufferPool* pool,
              SparseVector* own);
  void Fold(float* units);
  // Gives back what was selected and is not sent; `element` of the bucket lies in the shard.
  void Return(int64_t element, float value);

 private:
  ErrorFeedback Arrays(const float* units);
  int64_t EntriesIn(double density, size_t segment) const;

  const SparseSpec spec_;
  const KeptShard shard_;
  std::vector<int64_t> cuts_;  // the borders of the segments, in elements of the bucket
  std::vector<float> residual_, next_residual_, velocity_, next_velocity_;
  std::vector<TopKSegment> segments_;
  std::vector<int64_t> counts_;
  bool used_ = false;
};

}  // namespace hvd_ext

// The residual and the velocity of a sparse bucket on this rank, and what error feedback does with them. A step reads
// one pair of arrays and writes another, and a commit exchanges the two: before it, nothing has happened.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "kernels/topk.h"
#include "plan/plan.h"

namespace hvd_ext {

// floor(density * elements + 1/2) in IEEE double.
int64_t EntriesOf(double density, int64_t elements);

// The elements of a bucket that a plan selects from or folds.
FeedbackShard ShardOf(const Plan& plan, int64_t elements);

// Whether a device can do all that a bucket's plans do with the residual; else it lies in the host's memory.
bool KeepsFeedback(const Device& device, const SparseSpec& spec, const Plan& plan);

class Feedback {
 public:
  // `shard`: the elements of the bucket that SELECT and FOLD cover. `tensor_begins`: the elements at which the bucket's
  // tensors begin. The arrays lie in the device's memory. Throws std::bad_alloc.
  Feedback(const SparseSpec& spec, const FeedbackShard& shard, const std::vector<int64_t>& tensor_begins,
           std::shared_ptr<Device> device = HostDevice());

  const SparseSpec& spec() const { return spec_; }
  Device* device() const { return device_.get(); }
  const FeedbackShard& shard() const { return shard_; }
  // The borders of the segments from which entries are selected, in elements of the bucket: those of the shard, and
  // with per_tensor those of its tensors.
  const std::vector<int64_t>& cuts() const { return cuts_; }

  // The channel calls these, with its lock held, while no run uses the arrays.
  void Commit();
  // The array that the next step reads, of the shard's elements; empty where there is none.
  Buffer* Get(FeedbackArray which);
  // Copies values into an array, or out of one; they wait for the device.
  Buffer ArrayOf(const float* values);
  void Read(const Buffer& array, float* to) const;

  // The rest is the progress thread's. One run at a time uses the arrays: Enter says whether this one may, and then
  // none other may until Leave.
  bool Enter();
  void Leave() { used_ = false; }
  // How many entries a step of this density selects from a segment, and from the shard.
  int64_t EntriesIn(double density, size_t segment) const;
  int64_t EntriesAt(double density) const;
  // What a step reads and writes; `units` is the shard in the bucket's buffer.
  ErrorFeedback Arrays(const TopKStep& step, const float* units);
  void Fold(Queue* queue, const TopKStep& step, float* units);
  // Adds to the residual what a vector does not send; elements of the bucket that lie in the shard. The positions and
  // the values are messages.
  void Return(Queue* queue, const int32_t* positions, const float* values, int64_t count);
  // The same, where the arrays lie in the host's memory.
  void Return(int64_t element, float value) { Return(element, 1, &value); }
  void Return(int64_t element, int64_t count, const float* values);

 private:
  template <typename Body>
  void InPieces(const Body& body) const;

  const SparseSpec spec_;
  const FeedbackShard shard_;
  std::vector<int64_t> cuts_;
  const std::shared_ptr<Device> device_;
  BufferPool pool_;
  Buffer residual_, next_residual_, velocity_, next_velocity_;
  bool used_ = false;
};

}  // namespace hvd_ext

// What the ops of the selection share: their inputs k and offsets, their outputs, their memory and threads.
#pragma once

#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/topk.h"
#include "ops/kernel_parts.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ext {

// The inputs k and offsets, and the outputs values indices and counts, by their places.
inline absl::Status PickShapes(tensorflow::shape_inference::InferenceContext* c, int k_input, int values, int indices,
                               int counts) {
  tensorflow::shape_inference::ShapeHandle k, offsets;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(k_input), 1, &k));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(k_input + 1), 1, &offsets));
  tensorflow::shape_inference::DimensionHandle segments;
  TF_RETURN_IF_ERROR(c->Subtract(c->Dim(offsets, 0), 1, &segments));
  TF_RETURN_IF_ERROR(c->Merge(segments, c->Dim(k, 0), &segments));
  tensorflow::shape_inference::DimensionHandle picks = c->UnknownDim();
  if (const tensorflow::Tensor* known = c->input_tensor(k_input)) {
    int64_t sum = 0;
    for (int64_t i = 0; i < known->NumElements(); ++i) sum += known->flat<int64_t>()(i);
    if (sum >= 0) picks = c->MakeDim(sum);
  }
  c->set_output(values, c->Vector(picks));
  c->set_output(indices, c->Vector(picks));
  c->set_output(counts, c->Vector(segments));
  return absl::OkStatus();
}

// Kernels may run several times at once: each run borrows its own memory.
class Scratches {
 public:
  std::unique_ptr<TopKScratch> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<TopKScratch>();
    auto scratch = std::move(free_.back());
    free_.pop_back();
    return scratch;
  }
  void Give(std::unique_ptr<TopKScratch> scratch) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(scratch));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<TopKScratch>> free_;
};

// Reads and checks the segments.
inline absl::Status SegmentsOf(const tensorflow::Tensor& k, const tensorflow::Tensor& offsets, int64_t elements,
                               bool wide, std::vector<TopKSegment>* segments, int64_t* picks) {
  if (k.dims() != 1 || offsets.dims() != 1 || offsets.NumElements() != k.NumElements() + 1) {
    return Invalid("offsets (shape ", offsets.shape().DebugString(), "): must have one element more than k (shape ",
                   k.shape().DebugString(), "), both of one dimension");
  }
  if (!wide && elements > std::numeric_limits<int32_t>::max()) {
    return Invalid("indices (int32): must hold every position; x has ", elements, " elements; ask for int64");
  }
  const auto places = offsets.vec<int64_t>();
  const auto ks = k.vec<int64_t>();
  if (places(0) != 0 || places(k.NumElements()) != elements) {
    return Invalid("segments (from ", places(0), " to ", places(k.NumElements()), "): must cover x; it has ", elements,
                   " elements");
  }
  *picks = 0;
  for (int64_t s = 0; s < k.NumElements(); ++s) {
    const int64_t length = places(s + 1) - places(s);
    if (length < 0 || places(s + 1) > elements) {
      return Invalid("segment ", s, " (", length, " elements): must have 0 or more; offsets must ascend");
    }
    if (ks(s) < 0 || ks(s) > length) {
      return Invalid("k (", ks(s), "): must be from 0 to the number of elements; segment ", s, " has ", length);
    }
    segments->push_back({places(s), length, ks(s)});
    *picks += ks(s);
  }
  return absl::OkStatus();
}

// Outputs of the picks, and what is not used of them afterwards.
struct Picks {
  tensorflow::Tensor* values = nullptr;
  tensorflow::Tensor* indices = nullptr;
  tensorflow::Tensor* counts = nullptr;

  absl::Status Allocate(tensorflow::OpKernelContext* context, int first, int64_t picks, int64_t segments) {
    TF_RETURN_IF_ERROR(context->allocate_output(first, tensorflow::TensorShape({picks}), &values));
    TF_RETURN_IF_ERROR(context->allocate_output(first + 1, tensorflow::TensorShape({picks}), &indices));
    return context->allocate_output(first + 2, tensorflow::TensorShape({segments}), &counts);
  }
  int64_t* Counts() { return counts->vec<int64_t>().data(); }
  void* Indices() { return const_cast<char*>(indices->tensor_data().data()); }
  void* Values() { return const_cast<char*>(values->tensor_data().data()); }

  void ClearUnused(const std::vector<TopKSegment>& segments) {
    int64_t place = 0;
    const size_t index_size = tensorflow::DataTypeSize(indices->dtype());
    const size_t value_size = tensorflow::DataTypeSize(values->dtype());
    for (size_t s = 0; s < segments.size(); ++s) {
      const int64_t begin = place + Counts()[s];
      place += segments[s].k;
      const size_t unused = static_cast<size_t>(place - begin);
      if (unused == 0) continue;
      std::memset(static_cast<char*>(Indices()) + begin * index_size, 0xff, unused * index_size);
      std::memset(static_cast<char*>(Values()) + begin * value_size, 0, unused * value_size);
    }
  }
};

}  // namespace hvd_ext

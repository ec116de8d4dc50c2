#include "kernels/feedback_gpu.h"

#include "kernels/each.h"
#include "kernels/each_gpu.h"

namespace hvd_ext::gpu {
namespace {

struct AccumulateEach {
  ErrorFeedback feedback;
  float* accumulated;
  HVD_EXT_EACH void operator()(int64_t i) const {
    const float a = Accumulated(feedback, i);
    feedback.next_residual[i] = 0;
    accumulated[i] = a;
  }
};

struct TakeEach {
  float *residual, *velocity;  // a velocity that is not masked is null
  const int32_t* picks;
  HVD_EXT_EACH void operator()(int64_t i) const {
    residual[picks[i]] = 0;
    if (velocity != nullptr) velocity[picks[i]] = 0;
  }
};

struct EntryEach {
  float* data;
  int64_t base;
  const int32_t* positions;
  const float* values;
  HVD_EXT_EACH void operator()(int64_t i) const { data[positions[i] - base] += values[i]; }
};

}  // namespace

void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated, cudaStream_t stream) {
  ForEach(AccumulateEach{feedback, accumulated}, elements, stream);
}

void Take(const ErrorFeedback& feedback, const int32_t* picks, int64_t count, cudaStream_t stream) {
  float* masked = feedback.correction.masks ? feedback.next_velocity : nullptr;
  ForEach(TakeEach{feedback.next_residual, masked, picks}, count, stream);
}

void AddEntries(float* data, int64_t base, const int32_t* positions, const float* values, int64_t count,
                cudaStream_t stream) {
  ForEach(EntryEach{data, base, positions, values}, count, stream);
}

}  // namespace hvd_ext::gpu

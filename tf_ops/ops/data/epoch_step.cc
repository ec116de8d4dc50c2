// HvdExt>EpochStep: the samples of one rank in a step of an epoch, and a seed for each of them.
#include <algorithm>

#include "cache/order.h"
#include "ops/data/capi.h"

namespace hvd_ext {
namespace {

constexpr int64_t kFields = sizeof(EpochSteps) / sizeof(int64_t);

void RunStep(void*, TF_OpKernelContext* context) {
  Run run(context);
  const TF_Tensor* fields = run.Vector(0, "steps");
  const int64_t step = run.Scalar(1, "step");
  if (!run.ok()) return;
  if (TF_Dim(fields, 0) < kFields) {
    return run.Fail(TF_INVALID_ARGUMENT, "steps (" + ShapeOf(fields) + "): must have " + std::to_string(kFields) +
                                             " numbers or more, the fields of EpochSteps");
  }
  std::vector<int64_t> numbers;
  std::vector<std::array<int32_t, 2>> seeds;
  run.Take(SamplesOf(*DataOf<const EpochSteps>(fields), step, &numbers, &seeds));
  if (!run.ok()) return;
  const int64_t count = static_cast<int64_t>(numbers.size());
  TF_Tensor* first = run.Output(0, TF_INT64, {count});
  TF_Tensor* second = run.Output(1, TF_INT32, {count, 2});
  if (!run.ok()) return;
  std::copy(numbers.begin(), numbers.end(), DataOf<int64_t>(first));
  std::copy(seeds.begin(), seeds.end(), DataOf<std::array<int32_t, 2>>(second));
}

void StepShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
  ShapePointer fields = FirstInput(context, 1, status);
  if (fields == nullptr) return;
  ShapePointer numbers = VectorOf(context, -1);
  SetOutput(context, 0, numbers.get());
  ShapePointer pairs = Concatenated(context, numbers.get(), VectorOf(context, 2).get(), status);
  if (pairs != nullptr) SetOutput(context, 1, pairs.get());
}

[[maybe_unused]] const bool registered = Register({
    "HvdExt>EpochStep",
    {"steps: int64", "step: int64"},
    {"numbers: int64", "seeds: int32"},
    {},
    StepShapes,
    nullptr,
    RunStep,
    nullptr,
});

}  // namespace
}  // namespace hvd_ext

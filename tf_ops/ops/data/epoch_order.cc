// HvdExt>EpochOrder: the samples at some positions of an epoch, and a seed for each of them.
#include "cache/order.h"
#include "ops/data/capi.h"

namespace hvd_ext {
namespace {

void RunOrder(void* kernel, TF_OpKernelContext* context) {
  Run run(context);
  const TF_Tensor* positions = run.Vector(0, "positions");
  int64_t seed = run.Scalar(1, "seed"), epoch = run.Scalar(2, "epoch");
  int64_t samples = run.Scalar(3, "samples"), parts = run.Scalar(4, "parts");
  if (!run.ok()) return;
  EpochOrder order;
  run.Take(EpochOrder::Make(seed, epoch, samples, parts, *static_cast<bool*>(kernel), &order));
  int64_t count = TF_Dim(positions, 0);
  TF_Tensor* numbers = run.Output(0, TF_INT64, {count});
  TF_Tensor* seeds = run.Output(1, TF_INT32, {count, 2});
  for (int64_t i = 0; i < count && run.ok(); ++i) {
    int64_t number = 0;
    run.Take(order.NumberAt(DataOf<const int64_t>(positions)[i], &number));
    DataOf<int64_t>(numbers)[i] = number;
    std::array<int32_t, 2> pair = order.SeedOf(number);
    DataOf<int32_t>(seeds)[2 * i] = pair[0];
    DataOf<int32_t>(seeds)[2 * i + 1] = pair[1];
  }
}

void OrderShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
  ShapePointer positions = FirstInput(context, 1, status);
  if (positions == nullptr) return;
  SetOutput(context, 0, positions.get());
  ShapePointer pairs = Concatenated(context, positions.get(), VectorOf(context, 2).get(), status);
  if (pairs != nullptr) SetOutput(context, 1, pairs.get());
}

[[maybe_unused]] const bool registered = Register({
    "HvdExt>EpochOrder",
    {"positions: int64", "seed: int64", "epoch: int64", "samples: int64", "parts: int64"},
    {"numbers: int64", "seeds: int32"},
    {"shuffle: bool = true"},
    OrderShapes,
    [](TF_OpKernelConstruction* construction) { return MakeFlag(construction, "shuffle"); },
    RunOrder,
    DropFlag,
});

}  // namespace
}  // namespace hvd_ext

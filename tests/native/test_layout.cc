// How a channel's description becomes a layout. What Check refuses is tested through the engine.
#include <memory>

#include "engine/layout.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

struct Described {
  ChannelSpec spec;
  std::vector<std::shared_ptr<const Plan>> plans, dense_plans;
};

std::shared_ptr<const Plan> PlanOn(int64_t feedback_begin, bool sparse = false) {
  auto plan = std::make_shared<Plan>();
  plan->units = 2;
  plan->feedback_begin = feedback_begin;
  plan->feedback_count = feedback_begin < 0 ? 0 : 1;
  plan->sparse = sparse;
  return plan;
}

// Bucket 0 has tensors 2 and 0. Bucket 1 has tensor 1, and its selection is from the tensor's second half.
Described TwoBuckets() {
  Described described;
  described.spec.name = "Adam";
  described.spec.tensor_names = {"a", "b", "c"};
  described.spec.elements = {3, 10, 4};
  BucketSpec dense{DType::kFloat64, {}, ReduceOp::kSum, 1, 1 << 20, {2, 0}};
  BucketSpec sparse{DType::kFloat32, {}, ReduceOp::kAverage, 2, 0, {1}};
  sparse.sparse = SparseSpec{};
  sparse.sparse->dense_above = 0.25;
  described.spec.buckets = {dense, sparse};
  described.plans = {PlanOn(-1), PlanOn(1, true)};
  described.dense_plans = {nullptr, PlanOn(1)};
  return described;
}

Status Make(const Described& d, std::shared_ptr<const Layout>* layout) {
  HVD_EXT_RETURN_IF_ERROR(Layout::Check(d.spec));
  return Layout::Make(d.spec, d.plans, d.dense_plans, layout);
}

TEST("layout: it says where each tensor lies, and what each bucket holds") {
  const Described d = TwoBuckets();
  std::shared_ptr<const Layout> layout;
  CHECK_OK(Make(d, &layout));
  auto place = [&](int64_t tensor) {
    const Layout::Place& p = layout->place(tensor);
    return std::vector<int64_t>{p.bucket, p.offset_nbytes, p.nbytes};
  };
  CHECK(place(0) == (std::vector<int64_t>{0, 32, 24}));
  CHECK(place(1) == (std::vector<int64_t>{1, 0, 40}));
  CHECK(place(2) == (std::vector<int64_t>{0, 0, 32}));
  CHECK_EQ(layout->bucket(0).elements, 7);
  CHECK_EQ(layout->bucket(0).tensors(), 2);
  CHECK(layout->TensorBegins(0) == (std::vector<int64_t>{0, 4}));
  CHECK_EQ(layout->BucketOf(1).elements, 10);
  CHECK(layout->has_sparse);
}

TEST("layout: a step's density decides between a sparse bucket's plans, and layouts know the plans they use") {
  const Described d = TwoBuckets();
  std::shared_ptr<const Layout> layout;
  CHECK_OK(Make(d, &layout));
  CHECK(layout->bucket(1).PlanAt(0.249) == d.plans[1]);
  CHECK(layout->bucket(1).PlanAt(0.25) == d.dense_plans[1]);
  CHECK(layout->bucket(0).PlanAt(1) == d.plans[0]);
  for (const auto& plan : {d.plans[0], d.plans[1], d.dense_plans[1]}) CHECK(layout->Uses(plan.get()));
  CHECK(!layout->Uses(PlanOn(0).get()));
}

TEST("layout: plans that do not fit their buckets are refused with words") {
  std::shared_ptr<const Layout> layout;
  Described d = TwoBuckets();
  d.plans[0] = PlanOn(0, true);
  CHECK_FAILS(Make(d, &layout), Code::kInvalid, "bucket 0: its plan (1) is sparse, so the bucket must be sparse too");
  d = TwoBuckets();
  d.dense_plans[1] = PlanOn(0);
  CHECK_FAILS(Make(d, &layout), Code::kInvalid,
              "bucket 1: its plan selects from the elements [5, 10) of the bucket, and its dense plan must fold "
              "the same elements; it folds [0, 5)");
}

}  // namespace
}  // namespace hvd_ext::test

#include "engine/layout.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/codec.h"
#include "engine/error_feedback.h"
#include "kernels/quantize.h"

namespace hvd_ext {
namespace {

std::string Range(const FeedbackShard& shard) {
  return "[" + std::to_string(shard.begin) + ", " + std::to_string(shard.begin + shard.elements) + ")";
}

Status CheckSparse(const std::string& where, const BucketSpec& bucket, int64_t elements) {
  const SparseSpec& sparse = *bucket.sparse;
  if (bucket.dtype != DType::kFloat32) {
    return Invalid(where + ": a sparse bucket must be of float32, it is of " + NameOf(bucket.dtype));
  }
  if (elements > std::numeric_limits<int32_t>::max()) {
    return Invalid(where + ": a sparse bucket must have less than 2^31 elements, it has " + std::to_string(elements) +
                   "; make the buckets smaller");
  }
  if (!IsVectorCodec(sparse.codec)) return Invalid(where + ": there is no codec " + Quoted(sparse.codec));
  const DType value_wire = sparse.value_wire.value_or(DType::kFloat32);
  HVD_EXT_RETURN_IF_ERROR(Require(sparse.selector >= Selector::kExact && sparse.selector <= Selector::kRandom,
                                  where + ": selector", sparse.selector, "must be in [0, 4]"));
  HVD_EXT_RETURN_IF_ERROR(
      Require(sparse.samplings >= 1, where + ": samplings", sparse.samplings, "must be at least 1"));
  HVD_EXT_RETURN_IF_ERROR(
      Require(sparse.threshold >= 0, where + ": threshold", sparse.threshold, "must not be negative"));
  HVD_EXT_RETURN_IF_ERROR(
      Require(sparse.dense_above >= 0, where + ": dense_above", sparse.dense_above, "must not be negative"));
  HVD_EXT_RETURN_IF_ERROR(Require(!sparse.has_momentum || (sparse.momentum >= 0 && sparse.momentum < 1),
                                  where + ": momentum", sparse.momentum, "must be in [0, 1)"));
  HVD_EXT_RETURN_IF_ERROR(Require(value_wire == DType::kFloat32 || IsWire(value_wire),
                                  where + ": the selected values' dtype on the way", value_wire,
                                  "must be float32, float16 or bfloat16 (0, 2 or 3)"));
  HVD_EXT_RETURN_IF_ERROR(
      Require(Quantization::IsRight(sparse.bits, 64), where + ": bits", sparse.bits, "must be 8, 4 or 1"));
  HVD_EXT_RETURN_IF_ERROR(Require(Quantization::IsRight(8, sparse.block), where + ": block", sparse.block,
                                  "must be a multiple of 64, at most 4096"));
  return Require(sparse.indices >= SparseIndices::kSmallest && sparse.indices <= SparseIndices::kBitmap,
                 where + ": indices", sparse.indices, "must be in [0, 3]");
}

}  // namespace

Status Layout::Check(const ChannelSpec& spec) {
  std::string name = "channel " + Quoted(spec.name) + ": ";
  if (spec.tensor_names.size() != spec.elements.size()) {
    return Invalid(name + "it must have as many tensor names (" + std::to_string(spec.tensor_names.size()) +
                   ") as tensor sizes (" + std::to_string(spec.elements.size()) + ")");
  }
  std::vector<int> uses(spec.elements.size());
  for (size_t i = 0; i < spec.buckets.size(); ++i) {
    const BucketSpec& bucket = spec.buckets[i];
    std::string where = name + "bucket " + std::to_string(i);
    HVD_EXT_RETURN_IF_ERROR(Require(SizeOf(bucket.dtype) > 0 && bucket.dtype != DType::kBytes, where + ": dtype",
                                    bucket.dtype, "must be one that can be summed"));
    HVD_EXT_RETURN_IF_ERROR(Require(bucket.op == ReduceOp::kSum || bucket.op == ReduceOp::kAverage, where + ": op",
                                    bucket.op, "must be sum (0) or average (1)"));
    HVD_EXT_RETURN_IF_ERROR(CheckWire(where + ": ", bucket.dtype, bucket.wire));
    if (bucket.tensors.empty()) return Invalid(where + ": it must hold a tensor");
    int64_t elements = 0;
    for (int64_t tensor : bucket.tensors) {
      if (tensor < 0 || tensor >= static_cast<int64_t>(uses.size())) {
        return Invalid(where + ": tensor (" + std::to_string(tensor) + ") must be in [0, " +
                       std::to_string(uses.size()) + ")");
      }
      ++uses[static_cast<size_t>(tensor)];
      elements += std::max<int64_t>(0, spec.elements[static_cast<size_t>(tensor)]);
    }
    if (bucket.sparse) HVD_EXT_RETURN_IF_ERROR(CheckSparse(where, bucket, elements));
  }
  for (size_t i = 0; i < uses.size(); ++i) {
    std::string tensor = name + "tensor " + Quoted(spec.tensor_names[i]);
    if (uses[i] != 1) return Invalid(tensor + " must be in exactly one bucket, it is in " + std::to_string(uses[i]));
    HVD_EXT_RETURN_IF_ERROR(
        Require(spec.elements[i] >= 0, tensor + ": elements", spec.elements[i], "must not be negative"));
  }
  return Status::Ok();
}

Status Layout::Make(const ChannelSpec& spec, std::vector<std::shared_ptr<const Plan>> plans,
                    std::vector<std::shared_ptr<const Plan>> dense_plans, std::shared_ptr<const Layout>* layout) {
  auto made = std::make_shared<Layout>();
  made->places.resize(spec.elements.size());
  for (size_t i = 0; i < spec.buckets.size(); ++i) {
    const std::string where = "channel " + Quoted(spec.name) + ": bucket " + std::to_string(i);
    Bucket bucket{spec.buckets[i], std::move(plans[i]), std::move(dense_plans[i])};
    int64_t nbytes_each = static_cast<int64_t>(SizeOf(bucket.spec.dtype));
    for (int64_t tensor : bucket.spec.tensors) {
      int64_t elements = spec.elements[static_cast<size_t>(tensor)];
      made->places[static_cast<size_t>(tensor)] = {static_cast<int64_t>(i), bucket.elements * nbytes_each,
                                                   elements * nbytes_each};
      bucket.elements += elements;
    }
    if (!bucket.spec.sparse && bucket.plan->sparse) {
      return Invalid(where + ": its plan (" + std::to_string(bucket.spec.plan) +
                     ") is sparse, so the bucket must be sparse too");
    }
    if (bucket.spec.sparse) {
      made->has_sparse = true;
      const FeedbackShard selected = ShardOf(*bucket.plan, bucket.elements);
      const FeedbackShard folded = ShardOf(*bucket.dense_plan, bucket.elements);
      if (selected.begin != folded.begin || selected.elements != folded.elements) {
        return Invalid(where + ": its plan selects from the elements " + Range(selected) +
                       " of the bucket, and its dense plan must fold the same elements; it folds " + Range(folded));
      }
    }
    made->buckets.push_back(std::move(bucket));
  }
  *layout = std::move(made);
  return Status::Ok();
}

bool Layout::Uses(const Plan* plan) const {
  return std::any_of(buckets.begin(), buckets.end(), [plan](const Bucket& bucket) {
    return bucket.plan.get() == plan || bucket.dense_plan.get() == plan;
  });
}

std::vector<int64_t> Layout::TensorBegins(int64_t i) const {
  std::vector<int64_t> begins;
  for (int64_t tensor : bucket(i).spec.tensors) {
    begins.push_back(place(tensor).offset_nbytes / static_cast<int64_t>(SizeOf(bucket(i).spec.dtype)));
  }
  return begins;
}

}  // namespace hvd_ext

// How the steps of a channel reduce its tensors, as one frozen value: which tensors lie in which bucket and where, and
// each bucket's plan, wire, segments and selection. A step takes its channel's layout at its beginning and uses only
// that one until its end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "plan/plan.h"

namespace hvd_ext {

struct Layout {
  struct Bucket {
    BucketSpec spec;
    std::shared_ptr<const Plan> plan;
    std::shared_ptr<const Plan> dense_plan;  // of a sparse bucket; null for others
    int64_t elements = 0;

    int64_t tensors() const { return static_cast<int64_t>(spec.tensors.size()); }
    int64_t nbytes() const { return elements * static_cast<int64_t>(SizeOf(spec.dtype)); }
    // The plan of a step of this density.
    const std::shared_ptr<const Plan>& PlanAt(double density) const {
      return spec.sparse && density >= spec.sparse->dense_above ? dense_plan : plan;
    }
  };
  // Where a tensor lies.
  struct Place {
    int64_t bucket, offset_nbytes, nbytes;
  };

  std::vector<Bucket> buckets;
  std::vector<Place> places;  // by tensor
  bool has_sparse = false;

  const Bucket& bucket(int64_t i) const { return buckets[static_cast<size_t>(i)]; }
  const Place& place(int64_t tensor) const { return places[static_cast<size_t>(tensor)]; }
  const Bucket& BucketOf(int64_t tensor) const { return bucket(place(tensor).bucket); }
  bool Uses(const Plan* plan) const;
  // The elements at which a bucket's tensors begin in it.
  std::vector<int64_t> TensorBegins(int64_t bucket) const;

  // Refuses a description that no plan can make right.
  static Status Check(const ChannelSpec& spec);
  // Of a description that Check has accepted. `plans` are the buckets', `dense_plans` those of the sparse ones, null
  // for the others.
  static Status Make(const ChannelSpec& spec, std::vector<std::shared_ptr<const Plan>> plans,
                     std::vector<std::shared_ptr<const Plan>> dense_plans, std::shared_ptr<const Layout>* layout);
};

}  // namespace hvd_ext

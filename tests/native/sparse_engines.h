// Sparse plans of small jobs, steps of a channel with one sparse bucket, and their expected results.
#pragma once

#include <cmath>

#include "engine/error_feedback.h"
#include "engine/sparse_vector.h"
#include "engines.h"
#include "plan/plan.h"

namespace hvd_ext::test {

constexpr int64_t kSelect = 4, kSendSparse = 5, kRecvSparse = 6, kClear = 7, kAdd = 8, kPack = 9, kMerge = 10,
                  kTake = 11, kFold = 12, kReselect = 13;

// Hosts of equal size, rank = host * local + place. With local = 1 every rank selects from all elements.
struct Shape {
  int hosts, local;

  int size() const { return hosts * local; }
};

// HiTopK with `sums`.
inline Rows SumsOfPieces(int rank, const Shape& shape) {
  Rows rows{shape.local * shape.hosts, {}};
  const int host = rank / shape.local, place = rank % shape.local, first = host * shape.local;
  const int shard = place * shape.hosts, own = shard + host;  // in units
  auto others = [](int count, int without, auto&& use) {
    for (int i = 0; i < count; ++i) {
      if (i != without) use(i);
    }
  };
  auto in_host = [&](int64_t round, int64_t send, int64_t receive, bool of_peers) {
    others(shape.local, place,
           [&](int p) { rows.Add(round, send, first + p, of_peers ? p * shape.hosts : shard, shape.hosts); });
    others(shape.local, place,
           [&](int p) { rows.Add(round, receive, first + p, of_peers ? shard : p * shape.hosts, shape.hosts); });
  };
  auto peer = [&](int h) { return h * shape.local + place; };
  in_host(0, kSend, kRecvReduce, true);
  rows.Add(1, kSelect, rank, shard, shape.hosts);
  others(shape.hosts, host, [&](int h) { rows.Add(2, kSendSparse, peer(h), shard + h, 1); });
  others(shape.hosts, host, [&](int h) { rows.Add(2, kRecvSparse, peer(h), own, 1); });
  rows.Add(3, kClear, rank, own, 1);
  others(shape.hosts, -1, [&](int h) { rows.Add(3, kAdd, peer(h), own, 1); });
  rows.Add(3, kReselect, rank, own, 1);
  others(shape.hosts, host, [&](int h) { rows.Add(4, kSendSparse, peer(h), own, 1); });
  others(shape.hosts, host, [&](int h) { rows.Add(4, kRecvSparse, peer(h), shard + h, 1); });
  rows.Add(5, kClear, rank, shard, shape.hosts);
  others(shape.hosts, -1, [&](int h) { rows.Add(5, kAdd, peer(h), shard + h, 1); });
  in_host(6, kSend, kRecv, false);
  return rows;
}

// A reduce-scatter inside each host, the selection from a shard, an exchange of the shards among the ranks of equal
// place, and an all-gather inside each host, of whole shards or packed. With `dense` a FOLD replaces the selection, and
// whole shards are sent. With `sums` each host adds up a piece of a shard, and sends a selection of the sum.
inline Rows HiTopK(int rank, const Shape& shape, bool packed = false, bool dense = false, bool sums = false) {
  if (sums) return SumsOfPieces(rank, shape);
  Rows rows{shape.local, {}};
  const int host = rank / shape.local, place = rank % shape.local, first = host * shape.local;
  auto others = [&](auto&& use) {
    for (int p = 0; p < shape.local; ++p) {
      if (p != place) use(first + p, p);
    }
  };
  others([&](int peer, int p) { rows.Add(0, kSend, peer, p, 1); });
  others([&](int peer, int) { rows.Add(0, kRecvReduce, peer, place, 1); });
  rows.Add(1, dense ? kFold : kSelect, rank, place, 1);
  for (int h = 0; h < shape.hosts; ++h) {
    const int peer = h * shape.local + place;
    if (h == host) continue;
    rows.Add(2, dense ? kSend : kSendSparse, peer, place, 1);
    if (!dense) rows.Add(2, kRecvSparse, peer, place, 1);
    if (dense) rows.Add(2, kRecvReduce, peer, place, 1);
  }
  if (!dense) rows.Add(3, kClear, rank, place, 1);
  for (int h = 0; h < shape.hosts && !dense; ++h) rows.Add(3, kAdd, h * shape.local + place, place, 1);
  if (!packed) {
    others([&](int peer, int) { rows.Add(4, kSend, peer, place, 1); });
    others([&](int peer, int p) { rows.Add(4, kRecv, peer, p, 1); });
    return rows;
  }
  rows.Add(4, kPack, rank, place, 1);
  others([&](int peer, int) { rows.Add(5, kSendSparse, peer, place, 1); });
  others([&](int peer, int p) { rows.Add(5, kRecvSparse, peer, p, 1); });
  others([&](int, int p) { rows.Add(6, kClear, rank, p, 1); });
  others([&](int peer, int p) { rows.Add(6, kAdd, peer, p, 1); });
  return rows;
}

// The bucket's tensors, one after the other.
struct Bucket {
  std::vector<int64_t> tensors;
  SparseSpec sparse;

  int64_t elements() const {
    int64_t sum = 0;
    for (int64_t n : tensors) sum += n;
    return sum;
  }
};

inline ChannelSpec SpecOf(const Bucket& bucket, int64_t plan, int64_t dense_plan) {
  ChannelSpec spec = ChannelOf("SGD", bucket.tensors, {SumOf(plan, 0, {})});
  for (size_t i = 0; i < bucket.tensors.size(); ++i) spec.buckets[0].tensors.push_back(static_cast<int64_t>(i));
  spec.buckets[0].sparse = bucket.sparse;
  spec.buckets[0].sparse->dense_plan = dense_plan;
  return spec;
}

inline int64_t OpenHiTopK(Engine* engine, const Bucket& bucket, const Shape& shape, bool packed = false,
                          bool sums = false) {
  const int rank = engine->rank();
  return OpenChannel(engine, SpecOf(bucket, AddPlan(engine, HiTopK(rank, shape, packed, false, sums)),
                                    AddPlan(engine, HiTopK(rank, shape, false, true))));
}

// Submits and collects the tensors of the step under way.
inline Status Exchange(Engine* engine, int64_t channel, const Bucket& bucket, std::vector<float>* data) {
  int64_t ticket = 0, begin = 0;
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    HVD_EXT_RETURN_IF_ERROR(
        engine->Submit(channel, static_cast<int64_t>(i), data->data() + begin, bucket.tensors[i] * 4, &ticket));
    begin += bucket.tensors[i];
  }
  begin = 0;
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    Result result =
        Await(StartCollect(engine, channel, static_cast<int64_t>(i), ticket, bucket.tensors[i] * 4), "collect");
    HVD_EXT_RETURN_IF_ERROR(result.status);
    if (!result.data.empty()) std::memcpy(data->data() + begin, result.data.data(), result.data.size());
    begin += bucket.tensors[i];
  }
  return Status::Ok();
}

inline std::vector<float> Step(Engine* engine, int64_t channel, const Bucket& bucket, double density,
                               std::vector<float> data, bool commit = true) {
  CHECK_OK(engine->BeginTopKStep(channel, density));
  CHECK_OK(Exchange(engine, channel, bucket, &data));
  CHECK_OK(engine->EndStep(channel, commit));
  return data;
}

inline std::vector<float> KeptOf(Engine* engine, int64_t channel, FeedbackArray which = FeedbackArray::kResidual) {
  FeedbackShard shard;
  CHECK_OK(engine->GetFeedback(channel, 0, &shard));
  std::vector<float> kept(static_cast<size_t>(shard.elements));
  CHECK_OK(engine->ReadFeedback(channel, 0, which, kept.data()));
  return kept;
}

// Whole numbers of many magnitudes, different by rank and step, whose sums are exact in float32.
inline std::vector<float> Gradient(int rank, int64_t elements, int step) {
  std::vector<float> values(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) {
    uint32_t mixed = static_cast<uint32_t>(rank * 7919 + i * 104729 + step * 1299709) * 2654435761u;
    const int magnitude = static_cast<int>(mixed >> 20) % 1000 << (mixed >> 8) % 7;
    values[static_cast<size_t>(i)] = static_cast<float>((mixed & 64) != 0 ? magnitude : -magnitude);
  }
  return values;
}

// The sum of the gradients of the ranks [first, end).
inline std::vector<float> GradientSum(int first, int end, int64_t elements, int step) {
  std::vector<float> sum(static_cast<size_t>(elements));
  for (int rank = first; rank < end; ++rank) {
    const std::vector<float> gradient = Gradient(rank, elements, step);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
  }
  return sum;
}

// The same steps on one thread: the residual of each host, and the result that all ranks get.
class Model {
 public:
  Model(const Bucket& bucket, const Shape& shape)
      : bucket_(bucket),
        shape_(shape),
        residual_(static_cast<size_t>(shape.hosts), std::vector<float>(static_cast<size_t>(bucket.elements()))),
        velocity_(residual_) {}

  std::vector<float> Step(double density, int step, bool commit = true) {
    const int64_t elements = bucket_.elements();
    auto residual = residual_, velocity = velocity_;
    std::vector<float> result(static_cast<size_t>(elements));
    for (int host = 0; host < shape_.hosts; ++host) {
      std::vector<float>& kept = residual[static_cast<size_t>(host)];
      Accumulate(host, step, &kept, &velocity[static_cast<size_t>(host)]);
      for (int place = 0; place < shape_.local; ++place) {
        std::vector<int64_t> cuts = {UnitBegin(place, shape_.local, elements)};
        const int64_t end = UnitBegin(place + 1, shape_.local, elements);
        int64_t begin = 0;
        for (int64_t tensor : bucket_.tensors) {
          if (bucket_.sparse.per_tensor && begin > cuts.back() && begin < end) cuts.push_back(begin);
          begin += tensor;
        }
        cuts.push_back(end);
        for (size_t s = 0; s + 1 < cuts.size(); ++s) {
          SendLargest(density, cuts[s], cuts[s + 1], &kept, &velocity[static_cast<size_t>(host)], &result);
        }
      }
    }
    if (commit) std::swap(residual_, residual);
    if (commit) std::swap(velocity_, velocity);
    return result;
  }

  const std::vector<float>& residual(int host) const { return residual_[static_cast<size_t>(host)]; }
  const std::vector<float>& velocity(int host) const { return velocity_[static_cast<size_t>(host)]; }

 private:
  static int64_t K(double density, int64_t x) {
    return static_cast<int64_t>(std::floor(density * static_cast<double>(x) + 0.5));
  }

  void Accumulate(int host, int step, std::vector<float>* kept, std::vector<float>* velocity) {
    const int first = host * shape_.local;
    const std::vector<float> sum = GradientSum(first, first + shape_.local, bucket_.elements(), step);
    for (size_t i = 0; i < sum.size(); ++i) {
      float added = sum[i];
      if (bucket_.sparse.has_momentum) {
        const float momentum = bucket_.sparse.momentum;
        (*velocity)[i] = momentum * (*velocity)[i] + sum[i];
        added = bucket_.sparse.nesterov ? sum[i] + momentum * (*velocity)[i] : (*velocity)[i];
      }
      (*kept)[i] += added;
    }
  }

  void SendLargest(double density, int64_t begin, int64_t end, std::vector<float>* kept, std::vector<float>* velocity,
                   std::vector<float>* result) {
    std::vector<int64_t> order;
    for (int64_t i = begin; i < end; ++i) order.push_back(i);
    auto size = [&](int64_t i) { return std::fabs((*kept)[static_cast<size_t>(i)]); };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return size(a) > size(b); });
    const int64_t k = K(density, end) - K(density, begin);
    for (int64_t i = 0; i < k; ++i) {
      const size_t at = static_cast<size_t>(order[static_cast<size_t>(i)]);
      const float value = (*kept)[at], sent = RoundForWire(bucket_.sparse.value_wire.value_or(DType::kFloat32), value);
      (*result)[at] += sent;
      (*kept)[at] = value - sent;
      if (bucket_.sparse.has_momentum && bucket_.sparse.masks) (*velocity)[at] = 0;
    }
  }

  const Bucket bucket_;
  const Shape shape_;
  std::vector<std::vector<float>> residual_, velocity_;  // by host
};

}  // namespace hvd_ext::test

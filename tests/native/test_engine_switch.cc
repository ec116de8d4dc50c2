// Another layout between two steps of a channel, calls before a step, and the times of steps.
#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "engines.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kTensors = 9;

int64_t ElementsOf(int64_t tensor) { return (tensor * tensor * 37) % 211; }

// The tensors in a random order, in random buckets of float32, each with one of the plans; equal on all ranks.
ChannelSpec RandomSpec(const std::vector<int64_t>& plans, unsigned seed) {
  std::mt19937 random(seed);
  ChannelSpec spec;
  spec.name = "Adam";
  std::vector<int64_t> order;
  for (int64_t i = 0; i < kTensors; ++i) {
    spec.tensor_names.push_back("t" + std::to_string(i));
    spec.elements.push_back(ElementsOf(i));
    order.push_back(i);
  }
  for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
  for (int64_t tensor : order) {
    if (spec.buckets.empty() || random() % 2 == 0) {
      const int64_t segment_nbytes = 64 << random() % 4;
      spec.buckets.push_back({DType::kFloat32, ReduceOp::kSum, plans[random() % plans.size()], segment_nbytes, {}});
    }
    spec.buckets.back().tensors.push_back(tensor);
  }
  return spec;
}

std::vector<std::future<Result>> WholeStep(Engine* engine, int64_t channel, int rank, int step) {
  CHECK_OK(engine->BeginStep(channel));
  std::vector<std::future<Result>> results;
  int64_t ticket = 0;
  for (int64_t i = 0; i < kTensors; ++i) {
    const int64_t tensor = (i * 4 + step + rank) % kTensors;
    std::string input = Input(DType::kFloat32, ElementsOf(tensor), rank, step + static_cast<int>(tensor));
    CHECK_OK(engine->Submit(channel, tensor, input.data(), static_cast<int64_t>(input.size()), &ticket));
  }
  for (int64_t i = 0; i < kTensors; ++i) {
    results.push_back(StartCollect(engine, channel, i, ticket, ElementsOf(i) * 4));
  }
  return results;
}

void CheckStep(std::vector<std::future<Result>> results, int size, int step) {
  for (int64_t i = 0; i < kTensors; ++i) {
    Result result = Await(std::move(results[static_cast<size_t>(i)]), "tensor " + std::to_string(i));
    CHECK_OK(result.status);
    CHECK(result.data == Reduced(DType::kFloat32, ReduceOp::kSum, ElementsOf(i), size, step + static_cast<int>(i)));
  }
}

std::vector<int64_t> Plans(Engine* engine, int rank, int size) {
  return {AddPlan(engine, RingAllreduce(rank, size)), AddPlan(engine, StarAllreduce(rank, size))};
}

TEST("switch: steps are right in any layouts, also while the step before is under way, for 1 to 6 ranks") {
  for (int size = 1; size <= 6; ++size) {
    Engines engines(size);
    engines.Each([&](int rank, Engine* engine) {
      const std::vector<int64_t> plans = Plans(engine, rank, size);
      int64_t channel = -1;
      CHECK_OK(engine->OpenChannel(RandomSpec(plans, 0), &channel));
      std::vector<std::vector<std::future<Result>>> steps;
      for (int step = 0; step < 30; ++step) {
        if (step % 3 > 0) CHECK_OK(engine->SwitchLayout(channel, RandomSpec(plans, static_cast<unsigned>(step))));
        steps.push_back(WholeStep(engine, channel, rank, step));
        if (step % 4 == 0) {
          for (size_t i = 0; i < steps.size(); ++i) {
            CheckStep(std::move(steps[i]), size, step - static_cast<int>(steps.size()) + 1 + static_cast<int>(i));
          }
          steps.clear();
        }
      }
    });
    for (char alone : engines.StopAll()) CHECK(!alone);
  }
}

TEST("switch: a plan that only the layout before has used can be removed") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    const std::vector<int64_t> plans = Plans(engine, rank, 2);
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(RandomSpec({plans[0]}, 1), &channel));
    CheckStep(WholeStep(engine, channel, rank, 0), 2, 0);
    CHECK_OK(engine->SwitchLayout(channel, RandomSpec({plans[1]}, 2)));
    CheckStep(WholeStep(engine, channel, rank, 1), 2, 1);
    CheckStep(WholeStep(engine, channel, rank, 2), 2, 2);
    CHECK_OK(engine->RemovePlan(plans[0]));
    CHECK_FAILS(engine->RemovePlan(plans[1]), Code::kInvalid, "is used by channel 'Adam'");
  });
}

TEST("switch: a layout of other tensors is refused with words") {
  Engines engines(1);
  const std::vector<int64_t> plans = Plans(engines[0], 0, 1);
  int64_t channel = -1;
  CHECK_OK(engines[0]->OpenChannel(RandomSpec(plans, 1), &channel));
  ChannelSpec other = RandomSpec(plans, 1);
  other.tensor_names[2] = "x";
  CHECK_FAILS(engines[0]->SwitchLayout(channel, other), Code::kInvalid, "it must have the channel's tensors");
  other = RandomSpec(plans, 1);
  other.elements[2] += 1;
  CHECK_FAILS(engines[0]->SwitchLayout(channel, other), Code::kInvalid, "tensor 't2' has 592 bytes, not 596");
  other = RandomSpec(plans, 1);
  other.buckets[0].tensors.push_back(other.buckets.back().tensors[0]);
  CHECK_FAILS(engines[0]->SwitchLayout(channel, other), Code::kInvalid, "must be in exactly one bucket");
  other = RandomSpec({plans[0] + 100}, 1);
  CHECK_FAILS(engines[0]->SwitchLayout(channel, other), Code::kInvalid, "was never added");
  CHECK_FAILS(engines[0]->SwitchLayout(channel + 5, RandomSpec(plans, 1)), Code::kInvalid, "was never opened");
  CheckStep(WholeStep(engines[0], channel, 0, 3), 1, 3);
}

TEST("switch: residuals begin at zero, and what is written to them afterwards is sent") {
  const Shape shape{2, 2};
  const Bucket bucket{{30, 11}, {}};
  Engines engines(shape.size());
  engines.Each([&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, HiTopK(rank, shape)),
                  dense = AddPlan(engine, HiTopK(rank, shape, false, true));
    const ChannelSpec first = SpecOf(bucket, plan, dense);
    ChannelSpec second = first, none = first;
    std::swap(second.buckets[0].tensors[0], second.buckets[0].tensors[1]);
    none.buckets[0] = {DType::kFloat32, ReduceOp::kSum, AddPlan(engine, RingAllreduce(rank, 4)), 64, {0, 1}};
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(first, &channel));
    Step(engine, channel, bucket, 0.1, Gradient(rank, bucket.elements(), 0));
    std::vector<float> kept = KeptOf(engine, channel);
    CHECK(std::any_of(kept.begin(), kept.end(), [](float x) { return x != 0; }));
    CHECK_OK(engine->BeginTopKStep(channel, 0.1));
    CHECK_FAILS(engine->SwitchLayout(channel, second), Code::kInvalid, "a top-k step is under way");
    CHECK_OK(engine->EndStep(channel, false));
    CHECK_OK(engine->SwitchLayout(channel, second));
    kept = KeptOf(engine, channel);
    for (float x : kept) CHECK_EQ(x, 0.0f);
    kept[0] = 1000.0f * static_cast<float>(rank + 1);
    CHECK_OK(engine->WriteFeedback(channel, 0, FeedbackArray::kResidual, kept.data()));
    // The buffer begins with tensor 1. Ranks 0 and 2 keep its elements 0 .. 19, and ranks 1 and 3 the rest.
    const std::vector<float> sum = Step(engine, channel, bucket, 1.0, std::vector<float>(41, 0.0f));
    CHECK_EQ(sum[30], 1000.0f + 3000.0f);
    CHECK_EQ(sum[20 - 11], 2000.0f + 4000.0f);
  });
}

TEST("switch: sparse buckets go and come back while steps begin and end alike, and come to no other channel") {
  const Shape shape{2, 2};
  const Bucket bucket{{30, 11}, {}};
  Engines engines(shape.size());
  engines.Each([&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, HiTopK(rank, shape)),
                  dense = AddPlan(engine, HiTopK(rank, shape, false, true));
    const ChannelSpec sparse = SpecOf(bucket, plan, dense);
    ChannelSpec whole = sparse;
    whole.buckets[0] = {DType::kFloat32, ReduceOp::kSum, AddPlan(engine, RingAllreduce(rank, 4)), 64, {0, 1}};
    int64_t channel = -1, other = -1;
    CHECK_OK(engine->OpenChannel(sparse, &channel));
    CHECK_OK(engine->OpenChannel(whole, &other));
    CHECK_FAILS(engine->SwitchLayout(other, sparse), Code::kInvalid, "the steps of this channel have no density");
    CHECK_FAILS(engine->BeginTopKStep(other, 0.1), Code::kInvalid, "has no sparse bucket");
    const auto sums = [&](int step) {
      std::vector<float> sum(41, 0.0f);
      for (int peer = 0; peer < shape.size(); ++peer) {
        const std::vector<float> own = Gradient(peer, bucket.elements(), step);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += own[i];
      }
      return sum;
    };
    Step(engine, channel, bucket, 0.1, Gradient(rank, bucket.elements(), 0));
    CHECK_OK(engine->SwitchLayout(channel, whole));
    FeedbackShard shard;
    CHECK_FAILS(engine->GetFeedback(channel, 0, &shard), Code::kInvalid, "is not sparse");
    CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, "begin with begin_topk_step");
    for (int step = 1; step < 3; ++step) {
      CHECK(Step(engine, channel, bucket, 0.1, Gradient(rank, bucket.elements(), step)) == sums(step));
    }
    CHECK_OK(engine->SwitchLayout(channel, sparse));
    for (float x : KeptOf(engine, channel)) CHECK_EQ(x, 0.0f);
    CHECK(Step(engine, channel, bucket, 0.1, Gradient(rank, bucket.elements(), 3)) != sums(3));
  });
}

TEST("at step: the call comes once, before that step or the next one, and may wait for the other ranks and switch") {
  constexpr int kSize = 3;
  Engines engines(kSize);
  engines.Each([&](int rank, Engine* engine) {
    const std::vector<int64_t> plans = Plans(engine, rank, kSize);
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(RandomSpec(plans, 0), &channel));
    std::vector<int64_t> called;
    std::function<void(int64_t)> call = [&](int64_t step) {
      called.push_back(step);
      auto [status, payloads] = Exchange(engine, "times", std::to_string(step));
      CHECK_OK(status);
      for (const std::string& payload : payloads) CHECK_EQ(payload, std::to_string(step));
      CHECK_OK(engine->SwitchLayout(channel, RandomSpec(plans, static_cast<unsigned>(step))));
      if (step < 8) CHECK_OK(engine->AtStep(channel, step == 4 ? 2 : 8, call));
    };
    CHECK_OK(engine->AtStep(channel, 4, call));
    for (int step = 0; step < 12; ++step) CheckStep(WholeStep(engine, channel, rank, step), kSize, step);
    CHECK(called == (std::vector<int64_t>{4, 5, 8}));
    int64_t none = channel + 9;
    CHECK_FAILS(engine->AtStep(none, 1, call), Code::kInvalid, "was never opened");
  });
}

TEST("times: the newest complete steps are kept, with the arrival of each tensor") {
  Engines engines(1);
  Engine* engine = engines[0];
  const std::vector<int64_t> plans = Plans(engine, 0, 1);
  int64_t channel = -1;
  CHECK_OK(engine->OpenChannel(RandomSpec(plans, 0), &channel));
  std::vector<StepTimes> times;
  for (int step = 0; step < 130; ++step) {
    if (step == 120) CHECK_OK(engine->SwitchLayout(channel, RandomSpec(plans, 7)));
    CheckStep(WholeStep(engine, channel, 0, step), 1, step);
  }
  CHECK_OK(engine->GetTimes(channel, 1000, &times));
  CHECK_EQ(times.size(), 100u);
  CHECK_EQ(times.back().step, 130);
  for (size_t i = 0; i < times.size(); ++i) {
    CHECK_EQ(times[i].step, times[0].step + static_cast<int64_t>(i));
    CHECK(times[i].end_s >= times[i].begin_s);
    if (i > 0) CHECK(times[i].begin_s >= times[i - 1].end_s);
    for (int64_t j = 1; j < kTensors; ++j) {  // they were handed over in this order
      const int64_t step = times[i].step - 1;
      const auto at = [&](int64_t place) {
        return times[i].came_s[static_cast<size_t>((place * 4 + step) % kTensors)];
      };
      CHECK(at(j) >= at(j - 1));
      CHECK(at(j - 1) > 0);
    }
  }
  CHECK_OK(engine->GetTimes(channel, 3, &times));
  CHECK_EQ(times.size(), 3u);
  CHECK_EQ(times.back().step, 130);
  // A step that was left half-way is not among them.
  CHECK_OK(engine->BeginStep(channel));
  int64_t ticket = 0;
  std::string input = Input(DType::kFloat32, ElementsOf(1), 0);
  CHECK_OK(engine->Submit(channel, 1, input.data(), static_cast<int64_t>(input.size()), &ticket));
  engine->BeginStep(channel);
  CHECK_OK(engine->GetTimes(channel, 1, &times));
  CHECK_EQ(times.back().step, 130);
}

}  // namespace
}  // namespace hvd_ext::test

// Another layout between two steps of a channel, calls before a step, and the times of steps.
#include <random>

#include "engines.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kTensors = 9;

// The tensors in a random order, in random buckets of float32, each with one of the plans; equal on all ranks.
ChannelSpec RandomSpec(const std::vector<int64_t>& plans, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> elements, order;
  for (int64_t i = 0; i < kTensors; ++i) {
    elements.push_back((i * i * 37) % 211);
    order.push_back(i);
  }
  ChannelSpec spec = ChannelOf("Adam", elements, {});
  for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
  for (int64_t tensor : order) {
    if (spec.buckets.empty() || random() % 2 == 0) {
      const int64_t segment_nbytes = 64 << random() % 4;
      spec.buckets.push_back({DType::kFloat32, {}, ReduceOp::kSum, plans[random() % plans.size()], segment_nbytes, {}});
    }
    spec.buckets.back().tensors.push_back(tensor);
  }
  return spec;
}

std::vector<int64_t> Plans(Engine* engine, int rank, int size) {
  return {AddPlan(engine, RingAllreduce(rank, size)), AddPlan(engine, StarAllreduce(rank, size))};
}

std::vector<int64_t> OrderOf(int step, int rank) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < kTensors; ++i) order.push_back((i * 4 + step + rank) % kTensors);
  return order;
}

TEST("switch: steps are right in any layouts, also while the step before is under way") {
  for (int size : {1, 2, 3, 6}) {
    Engines engines(size);
    engines.Each([&](int rank, Engine* engine) {
      const std::vector<int64_t> plans = Plans(engine, rank, size);
      const ChannelSpec spec = RandomSpec(plans, 0);
      const int64_t channel = OpenChannel(engine, spec);
      std::vector<Collects> steps;
      for (int step = 0; step < 25; ++step) {
        if (step % 3 > 0) CHECK_OK(engine->SwitchLayout(channel, RandomSpec(plans, static_cast<unsigned>(step))));
        steps.push_back(StartStep(engine, channel, spec, step, OrderOf(step, rank)));
        if (step % 4 != 0) continue;
        const int first = step + 1 - static_cast<int>(steps.size());
        for (int i = first; i <= step; ++i) CheckStep(std::move(steps[static_cast<size_t>(i - first)]), spec, size, i);
        steps.clear();
      }
    });
    for (char alone : engines.StopAll()) CHECK(!alone);
  }
}

TEST("switch: a plan that only the layout before has used can be removed") {
  OnEngines(2, [](int rank, Engine* engine) {
    const std::vector<int64_t> plans = Plans(engine, rank, 2);
    const ChannelSpec spec = RandomSpec({plans[0]}, 1);
    const int64_t channel = OpenChannel(engine, spec);
    CheckStep(StartStep(engine, channel, spec, 0), spec, 2, 0);
    CHECK_OK(engine->SwitchLayout(channel, RandomSpec({plans[1]}, 2)));
    for (int step : {1, 2}) CheckStep(StartStep(engine, channel, spec, step), spec, 2, step);
    CHECK_OK(engine->RemovePlan(plans[0]));
    CHECK_FAILS(engine->RemovePlan(plans[1]), Code::kInvalid, "is used by channel 'Adam'");
  });
}

TEST("switch: a layout of other tensors is refused with words") {
  Engines engines(1);
  Engine* engine = engines[0];
  const std::vector<int64_t> plans = Plans(engine, 0, 1);
  const ChannelSpec spec = RandomSpec(plans, 1);
  const int64_t channel = OpenChannel(engine, spec);
  auto refuses = [&](const std::string& words, const std::function<void(ChannelSpec*)>& change) {
    ChannelSpec other = spec;
    change(&other);
    CHECK_FAILS(engine->SwitchLayout(channel, other), Code::kInvalid, words);
  };
  refuses("it must have the channel's tensors", [](ChannelSpec* s) { s->tensor_names[2] = "x"; });
  refuses("tensor 'c' has 592 bytes, not 596", [](ChannelSpec* s) { s->elements[2] += 1; });
  refuses("must be in exactly one bucket",
          [](ChannelSpec* s) { s->buckets[0].tensors.push_back(s->buckets.back().tensors[0]); });
  refuses("was never added", [](ChannelSpec* s) { s->buckets[0].plan += 100; });
  CHECK_FAILS(engine->SwitchLayout(channel + 5, spec), Code::kInvalid, "was never opened");
  CheckStep(StartStep(engine, channel, spec, 3), spec, 1, 3);
}

const Shape kHosts{2, 2};
const Bucket kSparseBucket{{30, 11}, {}};

ChannelSpec SparseSpecOn(Engine* engine) {
  const int rank = engine->rank();
  return SpecOf(kSparseBucket, AddPlan(engine, HiTopK(rank, kHosts)),
                AddPlan(engine, HiTopK(rank, kHosts, false, true)));
}

std::vector<float> Stepped(Engine* engine, int64_t channel, int step) {
  return Step(engine, channel, kSparseBucket, 0.1, Gradient(engine->rank(), 41, step));
}

TEST("switch: sparse buckets go and come back, begin without residuals, send what is written to them, and stay apart") {
  OnEngines(4, [](int rank, Engine* engine) {
    const ChannelSpec sparse = SparseSpecOn(engine);
    ChannelSpec whole = sparse, turned = sparse;
    whole.buckets[0] = {DType::kFloat32, {}, ReduceOp::kSum, AddPlan(engine, RingAllreduce(rank, 4)), 64, {0, 1}};
    std::swap(turned.buckets[0].tensors[0], turned.buckets[0].tensors[1]);
    const int64_t channel = OpenChannel(engine, sparse), other = OpenChannel(engine, whole);
    CHECK_FAILS(engine->SwitchLayout(other, sparse), Code::kInvalid, "the steps of this channel have no density");
    CHECK_FAILS(engine->BeginTopKStep(other, 0.1), Code::kInvalid, "has no sparse bucket");
    const auto sums = [&](int step) {
      std::vector<float> sum(41, 0.0f);
      for (int peer = 0; peer < 4; ++peer) {
        const std::vector<float> gradient = Gradient(peer, 41, step);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
      }
      return sum;
    };
    CHECK(Stepped(engine, channel, 0) != sums(0));
    CHECK_OK(engine->BeginTopKStep(channel, 0.1));
    CHECK_FAILS(engine->SwitchLayout(channel, whole), Code::kInvalid, "a top-k step is under way");
    CHECK_OK(engine->EndStep(channel, false));
    CHECK_OK(engine->SwitchLayout(channel, whole));
    FeedbackShard shard;
    CHECK_FAILS(engine->GetFeedback(channel, 0, &shard), Code::kInvalid, "is not sparse");
    CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, "begin with begin_topk_step");
    for (int step = 1; step < 3; ++step) CHECK(Stepped(engine, channel, step) == sums(step));
    CHECK_OK(engine->SwitchLayout(channel, sparse));
    Stepped(engine, channel, 3);
    std::vector<float> kept = KeptOf(engine, channel);
    CHECK(std::any_of(kept.begin(), kept.end(), [](float x) { return x != 0; }));
    CHECK_OK(engine->SwitchLayout(channel, turned));
    kept = KeptOf(engine, channel);
    for (float x : kept) CHECK_EQ(x, 0.0f);
    kept[0] = 1000.0f * static_cast<float>(rank + 1);
    CHECK_OK(engine->WriteFeedback(channel, 0, FeedbackArray::kResidual, kept.data()));
    // The buffer begins with tensor 1. Ranks 0 and 2 keep its elements 0 .. 19, and ranks 1 and 3 the rest.
    const std::vector<float> sum = Step(engine, channel, kSparseBucket, 1.0, std::vector<float>(41, 0.0f));
    CHECK_EQ(sum[30], 1000.0f + 3000.0f);
    CHECK_EQ(sum[20 - 11], 2000.0f + 4000.0f);
  });
}

TEST("at step: the call comes once, before that step or the next one, and may wait for the other ranks and switch") {
  OnEngines(3, [](int rank, Engine* engine) {
    const std::vector<int64_t> plans = Plans(engine, rank, 3);
    const ChannelSpec spec = RandomSpec(plans, 0);
    const int64_t channel = OpenChannel(engine, spec);
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
    for (int step = 0; step < 12; ++step) CheckStep(StartStep(engine, channel, spec, step), spec, 3, step);
    CHECK(called == (std::vector<int64_t>{4, 5, 8}));
    CHECK_FAILS(engine->AtStep(channel + 9, 1, call), Code::kInvalid, "was never opened");
  });
}

TEST("times: the newest complete steps are kept, with the arrival of each tensor") {
  Engines engines(1);
  Engine* engine = engines[0];
  const std::vector<int64_t> plans = Plans(engine, 0, 1);
  const ChannelSpec spec = RandomSpec(plans, 0);
  const int64_t channel = OpenChannel(engine, spec);
  std::vector<StepTimes> times;
  for (int step = 0; step < 130; ++step) {
    if (step == 120) CHECK_OK(engine->SwitchLayout(channel, RandomSpec(plans, 7)));
    CheckStep(StartStep(engine, channel, spec, step, OrderOf(step, 0)), spec, 1, step);
  }
  CHECK_OK(engine->GetTimes(channel, 1000, &times));
  CHECK_EQ(times.size(), 100u);
  for (size_t i = 0; i < times.size(); ++i) {
    CHECK_EQ(times[i].step, 31 + static_cast<int64_t>(i));
    CHECK(times[i].end_s >= times[i].begin_s);
    if (i > 0) CHECK(times[i].begin_s >= times[i - 1].end_s);
    std::vector<double> came;
    for (int64_t tensor : OrderOf(static_cast<int>(times[i].step) - 1, 0))
      came.push_back(times[i].arrival_offset_s[tensor]);
    CHECK(came[0] > 0 && std::is_sorted(came.begin(), came.end()));
  }
  CHECK_OK(engine->GetTimes(channel, 3, &times));
  CHECK_EQ(times.size(), 3u);
  CHECK_EQ(times.back().step, 130);
  // A step that was left half-way is not among them.
  CHECK_OK(engine->BeginStep(channel));
  int64_t ticket = 0;
  CHECK_OK(SubmitInput(engine, channel, spec, 1, 0, &ticket));
  engine->BeginStep(channel);
  CHECK_OK(engine->GetTimes(channel, 1, &times));
  CHECK_EQ(times.back().step, 130);
}

}  // namespace
}  // namespace hvd_ext::test

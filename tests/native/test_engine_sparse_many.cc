// Channels of many buckets, sparse and dense, with windows that hold only a few of them.
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

constexpr int kBuckets = 9;

// Two sparse buckets, then a dense one, and so on; the fifth is empty.
ChannelSpec ManyBuckets(Engine* engine, const Shape& shape) {
  const int rank = engine->rank();
  const int64_t sparse = AddPlan(engine, HiTopK(rank, shape));
  const int64_t fold = AddPlan(engine, HiTopK(rank, shape, false, true));
  const int64_t dense = AddPlan(engine, RingAllreduce(rank, shape.size()));
  ChannelSpec spec;
  spec.name = "many";
  for (int i = 0; i < kBuckets; ++i) {
    spec.elements.push_back(i == 4 ? 0 : 100 + i);
    spec.tensor_names.push_back("t" + std::to_string(i));
    const bool selects = i % 3 != 2;
    spec.buckets.push_back({DType::kFloat32, ReduceOp::kSum, selects ? sparse : dense, 64, {i}});
    if (!selects) continue;
    spec.buckets.back().sparse = SparseSpec{};
    spec.buckets.back().sparse->dense_plan = fold;
    spec.buckets.back().sparse->dense_above = 0.5;
  }
  return spec;
}

TEST("top-k step: more sparse buckets than the window holds, between dense ones, in whatever order they are full") {
  for (int64_t window : {1, 2, 4}) {
    for (const Shape& shape : {Shape{1, 1}, Shape{2, 1}, Shape{2, 2}}) {
      Config config = QuickConfig();
      config.window = window;
      Engines engines(shape.size(), config);
      engines.Each([&](int rank, Engine* engine) {
        const ChannelSpec spec = ManyBuckets(engine, shape);
        int64_t channel = -1;
        CHECK_OK(engine->OpenChannel(spec, &channel));
        std::vector<double> given(kBuckets), sent(kBuckets);  // sums over the elements, of the committed steps
        constexpr int kSteps = 12;
        for (int step = 0; step < kSteps; ++step) {
          const bool commits = step % 5 != 2, last = step + 1 == kSteps;
          CHECK_OK(engine->BeginTopKStep(channel, step % 4 == 3 || last ? 1.0 : 0.05));
          int64_t ticket = 0;
          for (int i = kBuckets - 1; i >= 0; --i) {
            const int64_t elements = spec.elements[static_cast<size_t>(i)];
            const std::vector<float> mine = Gradient(rank, elements, step * 10 + i);
            CHECK_OK(engine->Submit(channel, i, mine.data(), 4 * elements, &ticket));
            for (int other = 0; other < shape.size() && commits; ++other) {
              for (float value : Gradient(other, elements, step * 10 + i)) given[static_cast<size_t>(i)] += value;
            }
          }
          std::vector<std::future<Result>> results;
          for (int i = 0; i < kBuckets; ++i) {
            results.push_back(StartCollect(engine, channel, i, ticket, 4 * spec.elements[static_cast<size_t>(i)]));
          }
          if (!commits) CHECK_OK(engine->EndStep(channel, false));  // before the result has come
          for (size_t i = 0; i < results.size(); ++i) {
            const Result result = Await(std::move(results[i]), "step");
            CHECK_OK(result.status);
            for (size_t at = 0; at + 4 <= result.data.size() && commits; at += 4) {
              float value;
              std::memcpy(&value, result.data.data() + at, 4);
              sent[i] += value;
            }
          }
          if (commits) CHECK_OK(engine->EndStep(channel, true));
        }
        for (size_t i = 0; i < kBuckets; ++i) CHECK_EQ(sent[i], given[i]);  // the last step was dense
      });
    }
  }
}

TEST("top-k step: a value that float16 cannot take a part of is an overflow, not a place taken for ever") {
  const Shape shape{2, 1};
  Bucket bucket{{50}, {}};
  bucket.sparse.value_wire = DType::kFloat16;
  Engines engines(shape.size());
  engines.Each([&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, shape);
    std::vector<float> data(50, 1.0f);
    if (rank == 1) data[7] = 1e12f;
    const std::vector<float> seen = Step(engine, channel, bucket, 0.02, data, /*commit=*/false);
    CHECK(std::any_of(seen.begin(), seen.end(), [](float x) { return !std::isfinite(x); }));
    for (float left : KeptOf(engine, channel)) CHECK_EQ(left, 0.0f);
  });
}

}  // namespace
}  // namespace hvd_ext::test

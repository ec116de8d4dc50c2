// Sparse buckets: steps against a model on one thread, with every option; and what a caller can do wrong.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <thread>
#include <vector>

#include "engine/error_feedback.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

const Shape kShapes[] = {{1, 1}, {2, 1}, {5, 1}, {8, 1}, {1, 3}, {2, 2}, {3, 2}, {2, 3}, {2, 4}, {4, 2}};

void CheckSteps(const Bucket& bucket, const Shape& shape, const std::vector<double>& densities, bool packed = false) {
  Engines engines(shape.size());
  Model model(bucket, shape);
  std::vector<std::vector<float>> expected;
  for (size_t step = 0; step < densities.size(); ++step) {
    expected.push_back(model.Step(densities[step], static_cast<int>(step)));
  }
  engines.Each([&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, shape, packed);
    for (size_t step = 0; step < densities.size(); ++step) {
      const int number = static_cast<int>(step);
      std::vector<float> seen =
          Step(engine, channel, bucket, densities[step], Gradient(rank, bucket.elements(), number));
      for (size_t i = 0; i < seen.size(); ++i) CHECK_EQ(seen[i], expected[step][i]);
    }
    FeedbackShard shard;
    CHECK_OK(engine->GetFeedback(channel, 0, &shard));
    CHECK_EQ(shard.begin, UnitBegin(rank % shape.local, shape.local, bucket.elements()));
    const std::vector<float> kept = KeptOf(engine, channel);
    for (size_t i = 0; i < kept.size(); ++i) {
      CHECK_EQ(kept[i], model.residual(rank / shape.local)[static_cast<size_t>(shard.begin) + i]);
    }
    if (!bucket.sparse.correction) return;
    const std::vector<float> velocity = KeptOf(engine, channel, FeedbackArray::kVelocity);
    for (size_t i = 0; i < velocity.size(); ++i) {
      CHECK_EQ(velocity[i], model.velocity(rank / shape.local)[static_cast<size_t>(shard.begin) + i]);
    }
  });
}

TEST("top-k step: the sums and the residuals of several steps are the model's, for 1 to 8 ranks") {
  for (const Shape& shape : kShapes) {
    for (bool packed : {false, true}) {
      CheckSteps({{300, 0, 41, 7}, {}}, shape, {0.1, 0.01, 0.0, 0.3, 1.0, 0.05}, packed);
    }
    CheckSteps({{1}, {}}, shape, {0.4, 0.6, 1.0});
    CheckSteps({{0}, {}}, shape, {0.1, 1.0});
    CheckSteps({{5, 2}, {}}, shape, {0.1, 0.3, 0.2});
  }
}

TEST("top-k step: every form of positions and every dtype on the way give the model's sums") {
  for (SparseIndices indices : {SparseIndices::kRaw, SparseIndices::kDelta, SparseIndices::kBitmap}) {
    for (DType wire : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      Bucket bucket{{100, 33}, {}};
      bucket.sparse.indices = indices;
      bucket.sparse.value_wire = wire;
      CheckSteps(bucket, {2, 2}, {0.1, 0.02, 0.5, 0.1}, /*packed=*/wire == DType::kFloat16);
    }
  }
}

TEST("top-k step: each tensor's part of a shard gets its share") {
  Bucket bucket{{50, 1, 200, 3, 90}, {}};
  bucket.sparse.per_tensor = true;
  for (const Shape& shape : kShapes) CheckSteps(bucket, shape, {0.1, 0.02, 0.37});
}

TEST("top-k step: momentum correction, plain and Nesterov, with masks and without") {
  for (bool nesterov : {false, true}) {
    for (bool masks : {false, true}) {
      Bucket bucket{{64, 32}, {}};
      bucket.sparse.correction = {0.5f, nesterov, masks};  // 0.5 is exact
      CheckSteps(bucket, {2, 2}, {0.1, 0.1, 0.2, 0.05});
    }
  }
}

TEST("top-k step: messages longer than a piece arrive whole") {
  Bucket bucket{{1 << 20}, {}};
  bucket.sparse.indices = SparseIndices::kRaw;
  CheckSteps(bucket, {2, 1}, {0.6});
}

// The values are whole numbers, so what all ranks received plus what they keep must equal exactly what they gave.
TEST("top-k step: with halves on the way nothing is lost: sent and kept make what was accumulated") {
  for (DType wire : {DType::kFloat16, DType::kBFloat16}) {
    const Shape shape{2, 2};
    Bucket bucket{{256}, {}};
    bucket.sparse.value_wire = wire;
    Engines engines(shape.size());
    std::vector<std::vector<float>> kept(4);
    std::vector<double> got(256), given(256);
    for (int step = 0; step < 6; ++step) {
      for (int rank = 0; rank < 4; ++rank) {
        const std::vector<float> gradient = Gradient(rank, 256, step);
        for (size_t i = 0; i < 256; ++i) given[i] += gradient[i];
      }
    }
    engines.Each([&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, shape);
      for (int step = 0; step < 6; ++step) {
        const std::vector<float> seen = Step(engine, channel, bucket, 0.1, Gradient(rank, 256, step));
        for (size_t i = 0; i < 256 && rank == 0; ++i) got[i] += seen[i];
      }
      kept[static_cast<size_t>(rank)] = KeptOf(engine, channel);
    });
    for (size_t i = 0; i < 256; ++i) CHECK_EQ(got[i] + kept[i / 128][i % 128] + kept[2 + i / 128][i % 128], given[i]);
  }
}

TEST("top-k step: a dense step sends all that was kept, from the density on that asks for one") {
  const Shape shape{2, 2};
  Bucket bucket{{40, 25}, {}};
  bucket.sparse.dense_above = 0.5;
  Engines engines(shape.size());
  engines.Each([&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, shape);
    std::vector<double> open(65);
    for (int step = 0; step < 4; ++step) {
      for (int r = 0; r < 4; ++r) {
        const std::vector<float> gradient = Gradient(r, 65, step);
        for (size_t i = 0; i < 65; ++i) open[i] += gradient[i];
      }
      const std::vector<float> seen =
          Step(engine, channel, bucket, step % 2 == 0 ? 0.1 : 0.5, Gradient(rank, 65, step));
      for (size_t i = 0; i < 65; ++i) open[i] -= seen[i];
      if (step % 2 == 0) continue;
      for (double left : open) CHECK_EQ(left, 0.0);
      for (float left : KeptOf(engine, channel)) CHECK_EQ(left, 0.0f);
    }
  });
}

TEST("top-k step: what is not committed has not happened") {
  const Shape shape{2, 1};
  const Bucket bucket{{90}, {}};
  Engines engines(2);
  Model model(bucket, shape);
  const std::vector<float> first = model.Step(0.1, 0), dropped = model.Step(0.1, 1, false), next = model.Step(0.1, 2);
  engines.Each([&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, shape);
    CHECK(Step(engine, channel, bucket, 0.1, Gradient(rank, 90, 0)) == first);
    CHECK(Step(engine, channel, bucket, 0.1, Gradient(rank, 90, 1), /*commit=*/false) == dropped);
    // A step that nobody ends is dropped as well.
    std::vector<float> data = Gradient(rank, 90, 1);
    CHECK_OK(engine->BeginTopKStep(channel, 0.1));
    CHECK_OK(Exchange(engine, channel, bucket, &data));
    CHECK(data == dropped);
    CHECK(Step(engine, channel, bucket, 0.1, Gradient(rank, 90, 2)) == next);
    CHECK(KeptOf(engine, channel) == model.residual(rank));
    TopKStatistics statistics;
    CHECK_OK(engine->GetTopKStatistics(channel, &statistics));
    CHECK_EQ(statistics.committed, 2);
    CHECK_EQ(statistics.dropped, 2);
    CHECK_EQ(statistics.entries, 4 * 9);
    CHECK_EQ(statistics.value_nbytes, 4 * 9 * 4);
    CHECK_EQ(statistics.head_nbytes, 4 * 32);
    CHECK(statistics.index_nbytes >= 4 * 9 && statistics.index_nbytes <= 4 * 12);
  });
}

// Runs of one bucket wait for each other, whichever rank collects first.
TEST("top-k step: steps that begin before the last has come are as those that wait") {
  const Shape shape{3, 1};
  const Bucket bucket{{200}, {}};
  Engines engines(3);
  Model model(bucket, shape);
  const std::vector<float> same = model.Step(0.1, 0, false);
  engines.Each([&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, shape);
    std::vector<std::future<Result>> results;
    const std::vector<float> data = Gradient(rank, 200, 0);
    for (int step = 0; step < 6; ++step) {
      int64_t ticket = 0;
      CHECK_OK(engine->BeginTopKStep(channel, 0.1));
      CHECK_OK(engine->Submit(channel, 0, data.data(), 800, &ticket));
      results.push_back(StartCollect(engine, channel, 0, ticket, 800));
    }
    for (auto& future : results) {
      Result result = Await(std::move(future), "step");
      CHECK_OK(result.status);
      CHECK(std::memcmp(result.data.data(), same.data(), 800) == 0);  // no step was committed, so all results are equal
    }
  });
}

TEST("top-k step: what is not finite is seen by all ranks, whatever is selected") {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Shape& shape : {Shape{2, 1}, Shape{2, 2}, Shape{3, 2}}) {
    for (bool packed : {false, true}) {
      for (double density : {0.0, 0.02, 1.0}) {
        for (float poison : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
          const Bucket bucket{{120}, {}};
          Engines engines(shape.size());
          engines.Each([&](int rank, Engine* engine) {
            const int64_t channel = OpenHiTopK(engine, bucket, shape, packed);
            std::vector<float> data = Gradient(rank, 120, 0);
            if (rank == shape.size() - 1) data[77] = poison;
            const std::vector<float> seen = Step(engine, channel, bucket, density, data, /*commit=*/false);
            CHECK(std::any_of(seen.begin(), seen.end(), [](float x) { return !std::isfinite(x); }));
            for (float left : KeptOf(engine, channel)) CHECK_EQ(left, 0.0f);
          });
        }
      }
    }
  }
}

TEST("top-k step: what is kept can be read and set between steps, and only then") {
  const Shape shape{2, 2};
  Bucket bucket{{30}, {}};
  bucket.sparse.correction = MomentumCorrection{0.5f};
  Engines engines(shape.size());
  engines.Each([&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, shape);
    std::vector<float> kept = KeptOf(engine, channel);
    CHECK_EQ(kept.size(), 15u);
    for (size_t i = 0; i < 15; ++i) kept[i] = static_cast<float>(rank * 100 + static_cast<int>(i));
    CHECK_OK(engine->WriteFeedback(channel, 0, FeedbackArray::kResidual, kept.data()));
    CHECK(KeptOf(engine, channel) == kept);
    for (float x : KeptOf(engine, channel, FeedbackArray::kVelocity)) CHECK_EQ(x, 0.0f);
    // Hosts 0 and 1 give 14 and 214 at element 14 of place 0, and place 1 gives 100 and 300 more.
    const std::vector<float> seen = Step(engine, channel, bucket, 0.07, std::vector<float>(30, 0.0f));
    CHECK_EQ(seen[14], 14.0f + 214.0f);
    CHECK_EQ(seen[29], 114.0f + 314.0f);
    const std::vector<float> left = KeptOf(engine, channel);
    CHECK_EQ(left[14], 0.0f);
    CHECK_OK(engine->BeginTopKStep(channel, 0.1));
    CHECK_FAILS(engine->ReadFeedback(channel, 0, FeedbackArray::kResidual, kept.data()), Code::kInvalid,
                "a step is under way");
    CHECK_FAILS(engine->WriteFeedback(channel, 0, FeedbackArray::kResidual, kept.data()), Code::kInvalid,
                "a step is under way");
    CHECK_OK(engine->EndStep(channel, false));
    CHECK_OK(engine->ReadFeedback(channel, 0, FeedbackArray::kVelocity, kept.data()));
    CHECK_FAILS(engine->ReadFeedback(channel, 0, static_cast<FeedbackArray>(2), kept.data()), Code::kInvalid,
                "which (2)");
    FeedbackShard shard;
    CHECK_FAILS(engine->GetFeedback(channel, 1, &shard), Code::kInvalid, "bucket (1) of 'SGD' must be in [0, 1)");
  });
}

TEST("top-k step: the state that other threads read and write meanwhile is that of one step") {
  constexpr int64_t kElements = 50000;
  Engines engines(1);
  Engine* engine = engines[0];
  Bucket bucket{{kElements}, {}};
  const int64_t channel = OpenHiTopK(engine, bucket, {1, 1});
  std::atomic<bool> ended{false};
  std::atomic<int> seen{0};
  auto constant = [](const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [&](float each) { return each == x[0]; });
  };
  auto read = [&] {
    std::vector<float> state(kElements, -1.0f);
    Status status = engine->ReadFeedback(channel, 0, FeedbackArray::kResidual, state.data());
    if (status.ok() && ++seen > 0) CHECK(constant(state));
    if (!status.ok()) CHECK_FAILS(status, Code::kInvalid, "a step is under way");
  };
  std::exception_ptr error;
  std::thread other([&] {
    try {
      for (int i = 0; !ended || seen == 0; ++i) {
        read();
        const std::vector<float> state(kElements, static_cast<float>(i % 7));
        Status status = engine->WriteFeedback(channel, 0, FeedbackArray::kResidual, state.data());
        if (!status.ok()) CHECK_FAILS(status, Code::kInvalid, "a step is under way");
      }
    } catch (...) {
      error = std::current_exception();
    }
  });
  // Nothing is selected, so each step adds 1 to every element of the residual.
  for (int step = 0; step < 50; ++step) {
    CHECK_OK(engine->BeginTopKStep(channel, 1e-9));
    int64_t ticket = 0;
    const std::vector<float> ones(kElements, 1.0f);
    CHECK_OK(engine->Submit(channel, 0, ones.data(), kElements * 4, &ticket));
    CHECK_OK(Await(StartCollect(engine, channel, 0, ticket, kElements * 4), "a step").status);
    CHECK_OK(engine->EndStep(channel, step % 3 != 0));
    read();
  }
  ended = true;
  other.join();
  if (error) std::rethrow_exception(error);
}

TEST("top-k step: steps that begin and end wrongly are refused with words") {
  Engines engines(1);
  Engine* engine = engines[0];
  const Bucket bucket{{8}, {}};
  const int64_t channel = OpenHiTopK(engine, bucket, {1, 1});
  CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, "its steps begin with begin_topk_step");
  CHECK_FAILS(engine->BeginTopKStep(channel, 1.5), Code::kInvalid, "density (1.500000) must be in [0, 1]");
  CHECK_FAILS(engine->BeginTopKStep(channel, std::nan("")), Code::kInvalid, "must be in [0, 1]");
  CHECK_FAILS(engine->BeginTopKStep(channel, 0.5, 1.0f), Code::kInvalid, "momentum (1.000000) must be in [0, 1)");
  CHECK_FAILS(engine->EndStep(channel, false), Code::kInvalid, "no top-k step is under way");
  CHECK_OK(engine->BeginTopKStep(channel, 0.5));
  CHECK_FAILS(engine->EndStep(channel, true), Code::kInvalid, "0 of 1 have; collect its tensors first");
  CHECK_OK(engine->EndStep(channel, false));
  CHECK_FAILS(engine->EndStep(channel, true), Code::kInvalid, "no top-k step is under way");
  std::vector<float> kept(8);
  CHECK_FAILS(engine->ReadFeedback(channel, 0, FeedbackArray::kVelocity, kept.data()), Code::kInvalid,
              "it has no velocity");

  ChannelSpec plain = SpecOf(bucket, AddPlan(engine, Rows{}), 0);
  plain.buckets[0].sparse.reset();
  int64_t ordinary = -1;
  CHECK_OK(engine->OpenChannel(plain, &ordinary));
  FeedbackShard shard;
  CHECK_FAILS(engine->BeginTopKStep(ordinary, 0.5), Code::kInvalid, "has no sparse bucket");
  CHECK_FAILS(engine->GetFeedback(ordinary, 0, &shard), Code::kInvalid, "is not sparse: it has no residual");
}

TEST("top-k step: buckets that are not sound are refused with words") {
  Engines engines(1);
  Engine* engine = engines[0];
  const int64_t plan = AddPlan(engine, HiTopK(0, {1, 1})), fold = AddPlan(engine, HiTopK(0, {1, 1}, false, true));
  auto refused = [&](const std::string& words, const std::function<void(ChannelSpec*)>& spoil) {
    ChannelSpec spec = SpecOf({{8}, {}}, plan, fold);
    spoil(&spec);
    int64_t channel = -1;
    CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, words);
  };
  auto sparse = [](ChannelSpec* spec) { return &*spec->buckets[0].sparse; };
  refused("must be of float32, it is of float64", [&](auto* s) { s->buckets[0].dtype = DType::kFloat64; });
  refused("must have less than 2^31 elements, it has 2147483648", [&](auto* s) { s->elements[0] = int64_t{1} << 31; });
  refused("selector (5)", [&](auto* s) { sparse(s)->selection.selector = static_cast<Selector>(5); });
  refused("samplings (0)", [&](auto* s) { sparse(s)->selection.samplings = 0; });
  refused("threshold (-1", [&](auto* s) { sparse(s)->selection.threshold = -1; });
  refused("dense_above (-1", [&](auto* s) { sparse(s)->dense_above = -1; });
  refused("momentum (1.0", [&](auto* s) { sparse(s)->correction = MomentumCorrection{1.0f}; });
  refused("dtype on the way (1)", [&](auto* s) { sparse(s)->value_wire = DType::kFloat64; });
  refused("indices (4)", [&](auto* s) { sparse(s)->indices = static_cast<SparseIndices>(4); });
  refused("is sparse, so the bucket must be sparse too", [&](auto* s) { s->buckets[0].sparse.reset(); });
  refused("its dense plan must fold the same elements; it folds [0, 0)",
          [&](auto* s) { sparse(s)->dense_plan = AddPlan(engine, Rows{}); });
  refused("was never added", [&](auto* s) { sparse(s)->dense_plan = fold + 1000; });
  Result result = Call(engine, AllreduceSpec("x", plan, 8), std::string(32, '\0'));
  CHECK_FAILS(result.status, Code::kInvalid, "which only a bucket of a channel may have");
}

TEST("top-k step: parts of any partition have k that add up") {
  for (double density : {0.001, 0.01, 0.3, 0.9999999999, 1.0, 0.0}) {
    int64_t sum = 0;
    for (int64_t begin = 0; begin < 1000; begin += 37) {
      const int64_t elements = std::min<int64_t>(37, 1000 - begin);
      const int64_t k = Feedback({}, {begin, elements, false}, {}).EntriesAt(density);
      CHECK(k >= 0 && k <= elements);
      sum += k;
    }
    CHECK_EQ(sum, EntriesOf(density, 1000));
  }
}

}  // namespace
}  // namespace hvd_ext::test

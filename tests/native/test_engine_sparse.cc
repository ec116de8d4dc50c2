// Sparse buckets: steps against a model on one thread, with every option; and what a caller can do wrong.
#include <limits>

#include "engine/error_feedback.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

void CheckSteps(const Bucket& bucket, const Shape& shape, const std::vector<double>& densities, bool packed = false) {
  Model model(bucket, shape);
  std::vector<std::vector<float>> expected;
  for (size_t step = 0; step < densities.size(); ++step) {
    expected.push_back(model.Step(densities[step], static_cast<int>(step)));
  }
  OnEngines(shape.size(), [&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, shape, packed);
    for (size_t step = 0; step < densities.size(); ++step) {
      const std::vector<float> gradient = Gradient(rank, bucket.elements(), static_cast<int>(step));
      CHECK(Step(engine, channel, bucket, densities[step], gradient) == expected[step]);
    }
    FeedbackShard shard;
    CHECK_OK(engine->GetFeedback(channel, 0, &shard));
    CHECK_EQ(shard.begin, UnitBegin(rank % shape.local, shape.local, bucket.elements()));
    const int host = rank / shape.local;
    auto of_shard = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + shard.begin, all.begin() + shard.begin + shard.elements);
    };
    CHECK(KeptOf(engine, channel) == of_shard(model.residual(host)));
    if (!bucket.sparse.has_momentum) return;
    CHECK(KeptOf(engine, channel, FeedbackArray::kVelocity) == of_shard(model.velocity(host)));
  });
}

std::vector<Shape> Shapes() {
  if (IsSanitized()) return {{1, 1}, {3, 1}, {1, 3}, {2, 2}};
  return {{1, 1}, {2, 1}, {5, 1}, {1, 3}, {2, 2}, {3, 2}, {2, 4}};
}

TEST("top-k step: the sums and the residuals of several steps are the model's, for 1 to 8 ranks") {
  for (const Shape& shape : Shapes()) {
    for (bool packed : {false, true}) {
      CheckSteps({{300, 0, 41, 7}, {}}, shape, {0.1, 0.01, 0.0, 0.3, 1.0, 0.05}, packed);
    }
    CheckSteps({{1}, {}}, shape, {0.4, 0.6, 1.0});
    CheckSteps({{0}, {}}, shape, {0.1, 1.0});
    Bucket by_tensor{{50, 1, 200, 3, 90}, {}};
    by_tensor.sparse.per_tensor = true;
    CheckSteps(by_tensor, shape, {0.1, 0.02, 0.37});
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

TEST("top-k step: momentum correction, plain and Nesterov, with masks and without") {
  for (bool nesterov : {false, true}) {
    for (bool masks : {false, true}) {
      Bucket bucket{{64, 32}, {}};
      bucket.sparse.has_momentum = true;
      bucket.sparse.momentum = 0.5f;  // exact
      bucket.sparse.nesterov = nesterov;
      bucket.sparse.masks = masks;
      CheckSteps(bucket, {2, 2}, {0.1, 0.1, 0.2, 0.05});
    }
  }
}

TEST("top-k step: messages longer than a piece arrive whole") {
  Bucket bucket{{600000}, {}};  // with positions as they are, 8 bytes for each that is sent: here for all
  bucket.sparse.indices = SparseIndices::kRaw;
  OnEngines(2, [&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, {2, 1});
    std::vector<float> sum = Gradient(0, 600000, 0), other = Gradient(1, 600000, 0);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    CHECK(Step(engine, channel, bucket, 1.0, Gradient(rank, 600000, 0)) == sum);
  });
}

// The values are whole numbers, so what all ranks received plus what they keep must equal exactly what they gave.
TEST("top-k step: nothing is lost, with halves on the way too, and a dense step sends all that was kept") {
  const Shape shape{2, 2};
  for (DType wire : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    Bucket bucket{{140, 65}, {}};
    bucket.sparse.value_wire = wire;
    bucket.sparse.dense_above = 0.5;
    std::vector<std::vector<float>> kept(4);
    std::atomic<int> there{0};
    OnEngines(4, [&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, shape);
      std::vector<double> open(205);
      for (int step = 0; step < 6; ++step) {
        for (int other = 0; other < 4; ++other) {
          const std::vector<float> gradient = Gradient(other, 205, step);
          for (size_t i = 0; i < 205; ++i) open[i] += gradient[i];
        }
        const double density = step == 2 ? 0.5 : 0.1;
        const std::vector<float> seen = Step(engine, channel, bucket, density, Gradient(rank, 205, step));
        for (size_t i = 0; i < 205; ++i) open[i] -= seen[i];
        kept[static_cast<size_t>(rank)] = KeptOf(engine, channel);
        if (density < 0.5) continue;
        for (double left : open) CHECK_EQ(left, 0.0);
        for (float left : kept[static_cast<size_t>(rank)]) CHECK_EQ(left, 0.0f);
      }
      ++there;
      Until("all ranks", [&] { return there == 4; });
      std::vector<float> left = kept[0], right = kept[1];  // the shards of the first host
      for (size_t i = 0; i < left.size(); ++i) left[i] += kept[2][i];
      for (size_t i = 0; i < right.size(); ++i) right[i] += kept[3][i];
      left.insert(left.end(), right.begin(), right.end());
      for (size_t i = 0; i < 205; ++i) CHECK_EQ(open[i], left[i]);
    });
  }
}

TEST("top-k step: what is not committed has not happened") {
  const Shape shape{2, 1};
  const Bucket bucket{{90}, {}};
  Model model(bucket, shape);
  const std::vector<float> first = model.Step(0.1, 0), dropped = model.Step(0.1, 1, false), next = model.Step(0.1, 2);
  OnEngines(2, [&](int rank, Engine* engine) {
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

TEST("top-k step: what is not finite, or too large for a half, is seen by all ranks, whatever is selected") {
  const float infinity = std::numeric_limits<float>::infinity();
  auto check = [](const Bucket& bucket, const Shape& shape, bool packed, double density, float poison) {
    OnEngines(shape.size(), [&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, shape, packed);
      std::vector<float> data = Gradient(rank, 120, 0);
      if (rank == shape.size() - 1) data[77] = poison;
      const std::vector<float> seen = Step(engine, channel, bucket, density, data, /*commit=*/false);
      CHECK(std::any_of(seen.begin(), seen.end(), [](float x) { return !std::isfinite(x); }));
      for (float left : KeptOf(engine, channel)) CHECK_EQ(left, 0.0f);
    });
  };
  Bucket bucket{{120}, {}};
  for (const Shape& shape : {Shape{2, 1}, Shape{3, 2}}) {
    for (double density : {0.0, 0.02, 1.0}) {
      for (float poison : {std::numeric_limits<float>::quiet_NaN(), -infinity}) {
        for (bool packed : {false, true}) check(bucket, shape, packed, density, poison);
      }
    }
  }
  bucket.sparse.value_wire = DType::kFloat16;  // of 1e12 not even a part is sent, and it would stay the largest
  check(bucket, {2, 1}, false, 0.02, 1e12f);
}

TEST("top-k step: what is kept can be read and set between steps, and only then") {
  Bucket bucket{{30}, {}};
  bucket.sparse.has_momentum = true;
  bucket.sparse.momentum = 0.5f;
  OnEngines(4, [&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, {2, 2});
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
    CHECK(KeptOf(engine, channel)[14] == 0.0f);
    CHECK_OK(engine->BeginTopKStep(channel, 0.1));
    const char* words = "a step is under way";
    CHECK_FAILS(engine->ReadFeedback(channel, 0, FeedbackArray::kResidual, kept.data()), Code::kInvalid, words);
    CHECK_FAILS(engine->WriteFeedback(channel, 0, FeedbackArray::kResidual, kept.data()), Code::kInvalid, words);
    CHECK_OK(engine->EndStep(channel, false));
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
  const Bucket bucket{{kElements}, {}};
  const int64_t channel = OpenHiTopK(engine, bucket, {1, 1});
  std::atomic<int> seen{0};
  auto succeeds = [](const Status& status) {
    if (!status.ok()) CHECK_FAILS(status, Code::kInvalid, "a step is under way");
    return status.ok();
  };
  auto read = [&] {
    std::vector<float> state(kElements, -1.0f);
    if (!succeeds(engine->ReadFeedback(channel, 0, FeedbackArray::kResidual, state.data()))) return;
    CHECK(std::all_of(state.begin(), state.end(), [&](float each) { return each == state[0]; }));
    ++seen;
  };
  // Nothing is selected, so each step adds 1 to every element of the residual.
  std::future<void> steps = std::async(std::launch::async, [&] {
    for (int step = 0; step < 30; ++step) {
      CHECK_OK(engine->BeginTopKStep(channel, 1e-9));
      std::vector<float> ones(kElements, 1.0f);
      CHECK_OK(Exchange(engine, channel, bucket, &ones));
      CHECK_OK(engine->EndStep(channel, step % 3 != 0));
      read();
    }
  });
  for (int i = 0; steps.wait_for(std::chrono::seconds(0)) != std::future_status::ready || seen == 0; ++i) {
    read();
    const std::vector<float> state(kElements, static_cast<float>(i % 7));
    succeeds(engine->WriteFeedback(channel, 0, FeedbackArray::kResidual, state.data()));
  }
  steps.get();
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
  const int64_t ordinary = OpenChannel(engine, plain);
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
  refused("selector (5)", [&](auto* s) { sparse(s)->selector = static_cast<Selector>(5); });
  refused("samplings (0)", [&](auto* s) { sparse(s)->samplings = 0; });
  refused("threshold (-1", [&](auto* s) { sparse(s)->threshold = -1; });
  refused("dense_above (-1", [&](auto* s) { sparse(s)->dense_above = -1; });
  refused("momentum (1.0", [&](auto* s) { sparse(s)->has_momentum = sparse(s)->momentum = 1; });
  refused("dtype on the way (1)", [&](auto* s) { sparse(s)->value_wire = DType::kFloat64; });
  refused("indices (4)", [&](auto* s) { sparse(s)->indices = static_cast<SparseIndices>(4); });
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

constexpr int kBuckets = 9;

// Two sparse buckets, then a dense one, and so on; the fifth is empty.
ChannelSpec ManyBuckets(Engine* engine, const Shape& shape) {
  const int rank = engine->rank();
  const int64_t sparse = AddPlan(engine, HiTopK(rank, shape));
  const int64_t fold = AddPlan(engine, HiTopK(rank, shape, false, true));
  const int64_t dense = AddPlan(engine, RingAllreduce(rank, shape.size()));
  ChannelSpec spec = ChannelOf("many", {100, 101, 102, 103, 0, 105, 106, 107, 108}, {});
  for (int i = 0; i < kBuckets; ++i) {
    const bool selects = i % 3 != 2;
    spec.buckets.push_back({DType::kFloat32, {}, ReduceOp::kSum, selects ? sparse : dense, 64, {i}});
    if (!selects) continue;
    spec.buckets.back().sparse = SparseSpec{};
    spec.buckets.back().sparse->dense_plan = fold;
    spec.buckets.back().sparse->dense_above = 0.5;
  }
  return spec;
}

TEST("top-k step: more sparse buckets than the window holds, between dense ones, in whatever order they are full") {
  for (int64_t window : {1, 3}) {
    for (const Shape& shape : {Shape{1, 1}, Shape{2, 2}}) {
      Config config = QuickConfig();
      config.window = window;
      OnEngines(shape.size(), config, [&](int rank, Engine* engine) {
        const ChannelSpec spec = ManyBuckets(engine, shape);
        const int64_t channel = OpenChannel(engine, spec);
        std::vector<double> given(kBuckets), sent(kBuckets);  // sums over the elements, of the committed steps
        constexpr int kSteps = 9;
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
          Collects results = CollectAll(engine, channel, spec, ticket);
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

}  // namespace
}  // namespace hvd_ext::test

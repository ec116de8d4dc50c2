// Signs with error feedback: steps against a model on one thread, and messages.
#include <limits>

#include "engine/codec.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

Bucket Signs(std::vector<int64_t> tensors) {
  Bucket bucket{std::move(tensors), {}};
  bucket.sparse.codec = "sign";
  bucket.sparse.dense_above = 0.5;
  return bucket;
}

// The residual of each host after a step, and the result. The sums of magnitudes are exact in float64.
std::vector<float> ModelStep(const Shape& shape, int64_t elements, int step, std::vector<std::vector<float>>* kept) {
  std::vector<float> result(static_cast<size_t>(elements));
  for (int host = 0; host < shape.hosts; ++host) {
    std::vector<float>& a = (*kept)[static_cast<size_t>(host)];
    const std::vector<float> sum = GradientSum(host * shape.local, (host + 1) * shape.local, elements, step);
    for (size_t i = 0; i < a.size(); ++i) a[i] += sum[i];
    for (int place = 0; place < shape.local; ++place) {
      const int64_t begin = UnitBegin(place, shape.local, elements), end = UnitBegin(place + 1, shape.local, elements);
      double magnitudes = 0;
      for (int64_t i = begin; i < end; ++i) magnitudes += std::fabs(static_cast<double>(a[static_cast<size_t>(i)]));
      const float scale = end == begin ? 0 : static_cast<float>(magnitudes / static_cast<double>(end - begin));
      for (int64_t i = begin; i < end; ++i) {
        const float sent = std::copysign(scale, a[static_cast<size_t>(i)]);
        result[static_cast<size_t>(i)] += sent;
        a[static_cast<size_t>(i)] -= sent;
      }
    }
  }
  return result;
}

TEST("sign step: the results and the residuals are the model's, and a dense step sends all that was kept") {
  for (const Shape& shape : {Shape{1, 1}, Shape{2, 1}, Shape{3, 2}, Shape{2, 3}}) {
    for (const std::vector<int64_t>& tensors : {std::vector<int64_t>{300, 0, 41, 7}, std::vector<int64_t>{1},
                                                std::vector<int64_t>{0}, std::vector<int64_t>{70001}}) {
      const Bucket bucket = Signs(tensors);
      std::vector<std::vector<float>> kept(static_cast<size_t>(shape.hosts),
                                           std::vector<float>(static_cast<size_t>(bucket.elements())));
      std::vector<std::vector<float>> expected, residuals;
      for (int step = 0; step < 3; ++step) {
        expected.push_back(ModelStep(shape, bucket.elements(), step, &kept));
      }
      OnEngines(shape.size(), [&](int rank, Engine* engine) {
        const int64_t channel = OpenHiTopK(engine, bucket, shape);
        const int64_t n = bucket.elements();
        for (int step = 0; step < 3; ++step) {
          CHECK(Step(engine, channel, bucket, 0.1, Gradient(rank, n, step)) == expected[static_cast<size_t>(step)]);
        }
        const int64_t begin = UnitBegin(rank % shape.local, shape.local, n);
        const std::vector<float>& host = kept[static_cast<size_t>(rank / shape.local)];
        const std::vector<float> own = KeptOf(engine, channel);
        CHECK(std::equal(own.begin(), own.end(), host.begin() + begin));
        Step(engine, channel, bucket, 1.0, Gradient(rank, n, 3));
        for (float left : KeptOf(engine, channel)) CHECK_EQ(left, 0.0f);
      });
    }
  }
}

TEST("sign step: a value that is not finite reaches all ranks, and a step that is dropped changes nothing") {
  const Bucket bucket = Signs({40});
  for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    OnEngines(4, [&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, {2, 2});
      Step(engine, channel, bucket, 0.1, Gradient(rank, 40, 0));
      const std::vector<float> before = KeptOf(engine, channel);
      std::vector<float> gradient = Gradient(rank, 40, 1);
      if (rank == 3) gradient[33] = bad;
      const std::vector<float> seen = Step(engine, channel, bucket, 0.1, gradient, /*commit=*/false);
      CHECK(std::any_of(seen.begin(), seen.end(), [](float x) { return std::isnan(x); }));
      CHECK(KeptOf(engine, channel) == before);
    });
  }
}

TEST("sign step: a plan that packs is refused") {
  const Bucket bucket = Signs({40});
  OnEngines(4, [&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, {2, 2}, /*packed=*/true);
    std::vector<float> data = Gradient(rank, 40, 0);
    CHECK_OK(engine->BeginTopKStep(channel, 0.1));
    const Status status = Exchange(engine, channel, bucket, &data);
    CHECK(status.message.find("the plan has the opcode PACK, which the bucket's codec does not have") !=
          std::string::npos);
  });
}

TEST("sign message: any part comes back, and a damaged head or scale is refused") {
  BufferPool pool;
  TopKScratch scratch;
  const int64_t first = 13, elements = 100;
  SparseSpec spec;
  spec.codec = "sign";
  auto feedback = std::make_shared<Feedback>(spec, FeedbackShard{first, elements, false}, std::vector<int64_t>{});
  auto codec = MakeVectorCodec(feedback);
  const std::vector<float> gradient = Gradient(1, elements, 2);
  codec->Select({{0.1, {}}, 0, &scratch, &pool}, gradient.data());
  for (int64_t begin = 0; begin <= elements; begin += 7) {
    for (int64_t count = 0; begin + count <= elements; count += 9) {
      const VectorMessage message = codec->Write(first + begin, count, &pool);
      CHECK_OK(codec->CheckHead(message.head, count));
      std::vector<float> sum(static_cast<size_t>(count)), own(sum);
      if (count > 0) CHECK_OK(codec->Add(message, sum.data(), count));
      codec->Add(first + begin, count, own.data());
      CHECK(sum == own);
      for (int64_t i = 0; i < count; ++i) {
        CHECK_EQ(std::signbit(sum[static_cast<size_t>(i)]), std::signbit(gradient[static_cast<size_t>(begin + i)]));
      }
    }
  }
  VectorMessage message = codec->Write(first, elements, &pool);
  auto refused = [&](auto&& damage, const std::string& words) {
    VectorHead head = message.head;
    damage(&head);
    CHECK_FAILS(codec->CheckHead(head, elements), Code::kCommunication, words);
  };
  refused([](VectorHead* head) { head->magic = 1; }, "does not begin with a header");
  refused([](VectorHead* head) { head->count = 99; }, "must have the signs of 100 elements in 17 bytes; it has 99");
  refused([](VectorHead* head) { head->body_nbytes = 1 << 30; }, "in 1073741824");
  refused([](VectorHead* head) { head->form = 2; }, "form 2");
  std::vector<float> sum(static_cast<size_t>(elements));
  for (float scale : {-1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    std::memcpy(message.body.data(), &scale, sizeof(scale));
    CHECK_FAILS(codec->Add(message, sum.data(), elements), Code::kCommunication, "must be finite and at least 0");
  }
}

}  // namespace
}  // namespace hvd_ext::test

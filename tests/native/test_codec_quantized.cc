// Numbers of few bits with error feedback: steps against a model on one thread, and messages.
#include <limits>

#include "engine/codec.h"
#include "kernels/quantize.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

Bucket Quantized(const Quantization& how, std::vector<int64_t> tensors) {
  Bucket bucket{std::move(tensors), {}};
  bucket.sparse.codec = "quantized";
  bucket.sparse.bits = how.bits;
  bucket.sparse.block = how.block;
  bucket.sparse.dense_above = 0.5;
  return bucket;
}

// Quantises x[i] + y[i], and returns what is sent; `left` gets the rest.
std::vector<float> Sent(const Quantization& how, const float* x, const float* y, int64_t elements, float* left) {
  std::vector<uint16_t> scales(static_cast<size_t>(how.Blocks(elements)));
  std::vector<unsigned char> packed(scales.size() * static_cast<size_t>(how.BlockNbytes()));
  std::vector<float> sent(static_cast<size_t>(elements));
  CHECK(Quantize(how, elements, x, y, scales.data(), packed.data(), left));
  AddQuantized(how, scales.data(), packed.data(), 0, elements, sent.data());
  return sent;
}

// The residual of each host after a step, and the result.
std::vector<float> ModelStep(const Quantization& how, const Shape& shape, int64_t elements, int step, bool sums,
                             std::vector<std::vector<float>>* kept) {
  std::vector<float> result(static_cast<size_t>(elements));
  for (int host = 0; host < shape.hosts; ++host) {
    std::vector<float> sum(static_cast<size_t>(elements));
    for (int place = 0; place < shape.local; ++place) {
      const std::vector<float> gradient = Gradient(host * shape.local + place, elements, step);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
    }
    for (int place = 0; place < shape.local; ++place) {
      const int64_t begin = UnitBegin(place, shape.local, elements), end = UnitBegin(place + 1, shape.local, elements);
      float* residual = (*kept)[static_cast<size_t>(host)].data() + begin;
      const std::vector<float> sent = Sent(how, residual, sum.data() + begin, end - begin, residual);
      for (int64_t i = begin; i < end; ++i) result[static_cast<size_t>(i)] += sent[static_cast<size_t>(i - begin)];
    }
  }
  const int pieces = shape.local * shape.hosts;
  for (int piece = 0; sums && piece < pieces; ++piece) {
    const int64_t begin = UnitBegin(piece, pieces, elements), end = UnitBegin(piece + 1, pieces, elements);
    std::vector<float> left(static_cast<size_t>(end - begin));
    const std::vector<float> sent = Sent(how, result.data() + begin, nullptr, end - begin, left.data());
    std::copy(sent.begin(), sent.end(), result.begin() + begin);
    std::vector<float>& residual = (*kept)[static_cast<size_t>(piece % shape.hosts)];
    for (int64_t i = begin; i < end; ++i) residual[static_cast<size_t>(i)] += left[static_cast<size_t>(i - begin)];
  }
  return result;
}

TEST("quantized step: the results and the residuals are the model's, and a dense step sends all that was kept") {
  for (const Quantization& how : {Quantization{8, 256}, Quantization{4, 64}, Quantization{1, 64}}) {
    for (const Shape& shape : {Shape{1, 1}, Shape{2, 1}, Shape{3, 2}, Shape{2, 3}}) {
      for (const std::vector<int64_t>& tensors : {std::vector<int64_t>{300, 0, 41, 7}, std::vector<int64_t>{1},
                                                  std::vector<int64_t>{0}, std::vector<int64_t>{70001}}) {
        for (bool sums : {false, true}) {
          if (sums && shape.hosts == 1) continue;
          const Bucket bucket = Quantized(how, tensors);
          const int64_t n = bucket.elements();
          std::vector<std::vector<float>> kept(static_cast<size_t>(shape.hosts),
                                               std::vector<float>(static_cast<size_t>(n)));
          std::vector<std::vector<float>> expected;
          for (int step = 0; step < 3; ++step) expected.push_back(ModelStep(how, shape, n, step, sums, &kept));
          OnEngines(shape.size(), [&](int rank, Engine* engine) {
            const int64_t channel = OpenHiTopK(engine, bucket, shape, /*packed=*/false, sums);
            for (int step = 0; step < 3; ++step) {
              CHECK(Step(engine, channel, bucket, 0.3, Gradient(rank, n, step)) == expected[static_cast<size_t>(step)]);
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
  }
}

TEST("quantized step: nothing is lost: what was applied and the residuals add up to the gradients") {
  for (bool sums : {false, true}) {
    const Bucket bucket = Quantized({4, 64}, {1000});
    const Shape shape{3, 2};
    std::vector<float> applied(1000), kept(1000);
    std::mutex mutex;
    OnEngines(shape.size(), [&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, shape, /*packed=*/false, sums);
      for (int step = 0; step < 5; ++step) {
        const std::vector<float> result = Step(engine, channel, bucket, 0.3, Gradient(rank, 1000, step));
        for (size_t i = 0; rank == 0 && i < 1000; ++i) applied[i] += result[i];
      }
      const std::vector<float> own = KeptOf(engine, channel);
      const std::lock_guard<std::mutex> lock(mutex);
      const auto begin = static_cast<size_t>(UnitBegin(rank % shape.local, shape.local, 1000));
      for (size_t i = 0; i < own.size(); ++i) kept[begin + i] += own[i];
    });
    for (size_t i = 0; i < 1000; ++i) {
      double given = 0;
      for (int rank = 0; rank < shape.size(); ++rank) {
        for (int step = 0; step < 5; ++step) given += static_cast<double>(Gradient(rank, 1000, step)[i]);
      }
      CHECK(std::fabs(given - static_cast<double>(applied[i] + kept[i])) <= 1e-6 * 5e5);
    }
  }
}

TEST("quantized step: a value that is not finite reaches all ranks, and a step that is dropped changes nothing") {
  for (bool sums : {false, true}) {
    const Bucket bucket = Quantized({8, 64}, {400});
    for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      OnEngines(6, [&](int rank, Engine* engine) {
        const int64_t channel = OpenHiTopK(engine, bucket, {3, 2}, /*packed=*/false, sums);
        Step(engine, channel, bucket, 0.1, Gradient(rank, 400, 0));
        const std::vector<float> before = KeptOf(engine, channel);
        std::vector<float> gradient = Gradient(rank, 400, 1);
        if (rank == 3) gradient[333] = bad;
        const std::vector<float> seen = Step(engine, channel, bucket, 0.1, gradient, /*commit=*/false);
        CHECK(std::any_of(seen.begin(), seen.end(), [](float x) { return std::isnan(x); }));
        CHECK(KeptOf(engine, channel) == before);
      });
    }
  }
}

TEST("quantized step: a plan that packs, bits and blocks that there are not, and sums of other codecs are refused") {
  const auto refused = [](const Bucket& bucket, bool packed, bool sums, const std::string& opcode) {
    OnEngines(4, [&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, {2, 2}, packed, sums);
      std::vector<float> data = Gradient(rank, 40, 0);
      CHECK_OK(engine->BeginTopKStep(channel, 0.1));
      const Status status = Exchange(engine, channel, bucket, &data);
      CHECK(status.message.find("the plan has the opcode " + opcode) != std::string::npos);
    });
  };
  refused(Quantized({8, 64}, {40}), /*packed=*/true, /*sums=*/false, "PACK");
  Bucket signs = Quantized({8, 64}, {40});
  signs.sparse.codec = "sign";
  refused(signs, /*packed=*/false, /*sums=*/true, "RESELECT");
  OnEngines(1, [&](int, Engine* engine) {
    for (const Quantization& wrong : {Quantization{3, 64}, Quantization{8, 65}, Quantization{8, 8192}}) {
      const Bucket bucket = Quantized(wrong, {40});
      const ChannelSpec spec =
          SpecOf(bucket, AddPlan(engine, HiTopK(0, {1, 1})), AddPlan(engine, HiTopK(0, {1, 1}, false, true)));
      int64_t channel = 0;
      CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, ") must be ");
    }
  });
}

TEST("quantized message: any part comes back, and a damaged head or scale is refused") {
  BufferPool pool;
  TopKScratch scratch;
  const int64_t first = 13, elements = 300;
  SparseSpec spec = Quantized({4, 64}, {}).sparse;
  auto feedback = std::make_shared<Feedback>(spec, FeedbackShard{first, elements, false}, std::vector<int64_t>{});
  auto codec = MakeVectorCodec(feedback);
  const std::vector<float> gradient = Gradient(1, elements, 2);
  codec->Select({{0.1, {}}, 0, &scratch, &pool}, gradient.data());
  for (int64_t begin = 0; begin <= elements; begin += 7) {
    for (int64_t count = 0; begin + count <= elements; count += 19) {
      const VectorMessage message = codec->Write(first + begin, count, &pool);
      CHECK_OK(codec->CheckHead(message.head, count));
      std::vector<float> sum(static_cast<size_t>(count)), own(sum);
      if (count > 0) CHECK_OK(codec->Add(message, sum.data(), count));
      codec->Add(first + begin, count, own.data());
      CHECK(sum == own);
    }
  }
  VectorMessage message = codec->Write(first + 70, 100, &pool);
  auto refused = [&](auto&& damage, const std::string& words) {
    VectorHead head = message.head;
    damage(&head);
    CHECK_FAILS(codec->CheckHead(head, 100), Code::kCommunication, words);
  };
  refused([](VectorHead* head) { head->magic = 1; }, "does not begin with a header");
  refused([](VectorHead* head) { head->count = 99; }, "must have 100 numbers of 4 bits; it has 99");
  refused([](VectorHead* head) { head->body_nbytes = 1 << 30; }, "in 1073741824");
  refused([](VectorHead* head) { head->form = 2; }, "form 2");
  refused([](VectorHead* head) { head->form |= 64; }, "it has 100");
  std::vector<float> sum(100);
  for (uint16_t scale : {0x7c00, 0x7e00, 0x8001}) {
    std::memcpy(message.body.data() + 2, &scale, sizeof(scale));
    CHECK_FAILS(codec->Add(message, sum.data(), 100), Code::kCommunication, "must be finite and at least 0");
  }
}

}  // namespace
}  // namespace hvd_ext::test

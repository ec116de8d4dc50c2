// Numbers of few bits with error feedback: steps against a model on one thread, and messages.
#include "codec_checks.h"
#include "kernels/quantize.h"

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
std::vector<float> StepOfModel(const Quantization& how, const Shape& shape, int64_t elements, int step, bool sums,
                               std::vector<std::vector<float>>* kept) {
  std::vector<float> result(static_cast<size_t>(elements));
  for (int host = 0; host < shape.hosts; ++host) {
    const std::vector<float> sum = GradientSum(host * shape.local, (host + 1) * shape.local, elements, step);
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
    for (bool sums : {false, true}) {
      CheckSteps([&how](std::vector<int64_t> tensors) { return Quantized(how, std::move(tensors)); }, 0.3, sums,
                 [&how, sums](const Shape& shape, int64_t elements, int step, std::vector<std::vector<float>>* kept) {
                   return StepOfModel(how, shape, elements, step, sums, kept);
                 });
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
    std::vector<double> given(1000);
    for (int step = 0; step < 5; ++step) {
      const std::vector<float> sum = GradientSum(0, shape.size(), 1000, step);
      for (size_t i = 0; i < 1000; ++i) given[i] += static_cast<double>(sum[i]);
    }
    for (size_t i = 0; i < 1000; ++i) {
      CHECK(std::fabs(given[i] - static_cast<double>(applied[i] + kept[i])) <= 1e-6 * 5e5);
    }
  }
}

TEST("quantized step: a value that is not finite reaches all ranks, and a step that is dropped changes nothing") {
  for (bool sums : {false, true}) CheckNotFinite(Quantized({8, 64}, {400}), {3, 2}, sums);
}

TEST("quantized step: a plan that packs, and bits and blocks that there are not, are refused") {
  CheckLacks(Quantized({8, 64}, {40}), /*packed=*/true, /*sums=*/false, "PACK");
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
  Selected vector(Quantized({4, 64}, {}).sparse, 300);
  vector.CheckParts([](int64_t, const std::vector<float>&) {});
  VectorMessage message = vector.codec->Write(Selected::kFirst + 70, 100, &vector.pool);
  const auto refused = [&](void (*damage)(VectorHead*), const std::string& words) {
    vector.CheckRefused(message.head, 100, damage, words);
  };
  refused([](VectorHead* head) { head->magic = 1; }, "does not begin with a header");
  refused([](VectorHead* head) { head->count = 99; }, "must have 100 numbers of 4 bits; it has 99");
  refused([](VectorHead* head) { head->body_nbytes = 1 << 30; }, "in 1073741824");
  refused([](VectorHead* head) { head->form = 2; }, "form 2");
  refused([](VectorHead* head) { head->form |= 64; }, "it has 100");
  std::vector<float> sum(100);
  for (uint16_t scale : {0x7c00, 0x7e00, 0x8001}) {
    std::memcpy(message.body.data() + 2, &scale, sizeof(scale));
    CHECK_FAILS(vector.codec->Add(vector.work, message, sum.data(), 100), Code::kCommunication,
                "must be finite and at least 0");
  }
}

}  // namespace
}  // namespace hvd_ext::test

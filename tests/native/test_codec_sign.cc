// Signs with error feedback: steps against a model on one thread, and messages.
#include "codec_checks.h"

namespace hvd_ext::test {
namespace {

Bucket Signs(std::vector<int64_t> tensors) {
  Bucket bucket{std::move(tensors), {}};
  bucket.sparse.codec = "sign";
  bucket.sparse.dense_above = 0.5;
  return bucket;
}

// The residual of each host after a step, and the result. The sums of magnitudes are exact in float64.
std::vector<float> StepOfModel(const Shape& shape, int64_t elements, int step, std::vector<std::vector<float>>* kept) {
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
  CheckSteps(Signs, 0.1, /*sums=*/false, StepOfModel);
}

TEST("sign step: a value that is not finite reaches all ranks, and a step that is dropped changes nothing") {
  CheckNotFinite(Signs({40}), {2, 2});
}

TEST("sign step: a plan that packs, or selects from sums, is refused") {
  CheckLacks(Signs({40}), /*packed=*/true, /*sums=*/false, "PACK");
  CheckLacks(Signs({40}), /*packed=*/false, /*sums=*/true, "RESELECT");
}

TEST("sign message: any part comes back, and a damaged head or scale is refused") {
  const int64_t elements = 100;
  Selected vector(Signs({}).sparse, elements);
  vector.CheckParts([&vector](int64_t begin, const std::vector<float>& part) {
    for (size_t i = 0; i < part.size(); ++i) {
      CHECK_EQ(std::signbit(part[i]), std::signbit(vector.gradient[static_cast<size_t>(begin) + i]));
    }
  });
  VectorMessage message = vector.codec->Write(Selected::kFirst, elements, &vector.pool);
  const auto refused = [&](void (*damage)(VectorHead*), const std::string& words) {
    vector.CheckRefused(message.head, elements, damage, words);
  };
  refused([](VectorHead* head) { head->magic = 1; }, "does not begin with a header");
  refused([](VectorHead* head) { head->count = 99; }, "must have the signs of 100 elements in 17 bytes; it has 99");
  refused([](VectorHead* head) { head->body_nbytes = 1 << 30; }, "in 1073741824");
  refused([](VectorHead* head) { head->form = 2; }, "form 2");
  std::vector<float> sum(static_cast<size_t>(elements));
  for (float scale : {-1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    std::memcpy(message.body.data(), &scale, sizeof(scale));
    CHECK_FAILS(vector.codec->Add(vector.work, message, sum.data(), elements), Code::kCommunication,
                "must be finite and at least 0");
  }
}

}  // namespace
}  // namespace hvd_ext::test

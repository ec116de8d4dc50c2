// What holds for every codec whose vectors have all elements: steps beside a model on one thread, messages of any part.
#pragma once

#include <limits>

#include "engine/codec.h"
#include "sparse_engines.h"

namespace hvd_ext::test {

// A step of all ranks on one thread: gives the result, and changes the residual of each host.
using ModelStep = std::function<std::vector<float>(const Shape& shape, int64_t elements, int step,
                                                   std::vector<std::vector<float>>* residuals)>;

// Three steps give the model's results and residuals, and a dense step sends all that was kept. `sums` as for HiTopK.
inline void CheckSteps(const std::function<Bucket(std::vector<int64_t>)>& bucket_of, double density, bool sums,
                       const ModelStep& model) {
  for (const Shape& shape : {Shape{1, 1}, Shape{2, 1}, Shape{3, 2}, Shape{2, 3}}) {
    if (sums && shape.hosts == 1) continue;
    for (const std::vector<int64_t>& tensors : {std::vector<int64_t>{300, 0, 41, 7}, std::vector<int64_t>{1},
                                                std::vector<int64_t>{0}, std::vector<int64_t>{70001}}) {
      const Bucket bucket = bucket_of(tensors);
      const int64_t n = bucket.elements();
      std::vector<std::vector<float>> residuals(static_cast<size_t>(shape.hosts),
                                                std::vector<float>(static_cast<size_t>(n)));
      std::vector<std::vector<float>> expected;
      for (int step = 0; step < 3; ++step) expected.push_back(model(shape, n, step, &residuals));
      OnEngines(shape.size(), [&](int rank, Engine* engine) {
        const int64_t channel = OpenHiTopK(engine, bucket, shape, /*packed=*/false, sums);
        for (int step = 0; step < 3; ++step) {
          CHECK(Step(engine, channel, bucket, density, Gradient(rank, n, step)) == expected[static_cast<size_t>(step)]);
        }
        const int64_t begin = UnitBegin(rank % shape.local, shape.local, n);
        const std::vector<float>& host = residuals[static_cast<size_t>(rank / shape.local)];
        const std::vector<float> own = KeptOf(engine, channel);
        CHECK(std::equal(own.begin(), own.end(), host.begin() + begin));
        Step(engine, channel, bucket, 1.0, Gradient(rank, n, 3));
        for (float left : KeptOf(engine, channel)) CHECK_EQ(left, 0.0f);
      });
    }
  }
}

// A value that is not finite reaches all ranks, and a step that is dropped changes nothing.
inline void CheckNotFinite(const Bucket& bucket, const Shape& shape, bool sums = false) {
  const int64_t n = bucket.elements();
  for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    OnEngines(shape.size(), [&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, shape, /*packed=*/false, sums);
      Step(engine, channel, bucket, 0.1, Gradient(rank, n, 0));
      const std::vector<float> before = KeptOf(engine, channel);
      std::vector<float> gradient = Gradient(rank, n, 1);
      if (rank == 3) gradient[static_cast<size_t>(n * 5 / 6)] = bad;
      const std::vector<float> seen = Step(engine, channel, bucket, 0.1, gradient, /*commit=*/false);
      CHECK(std::any_of(seen.begin(), seen.end(), [](float x) { return std::isnan(x); }));
      CHECK(KeptOf(engine, channel) == before);
    });
  }
}

// A plan with an opcode that the bucket's codec does not have is refused.
inline void CheckLacks(const Bucket& bucket, bool packed, bool sums, const std::string& opcode) {
  OnEngines(4, [&](int rank, Engine* engine) {
    const int64_t channel = OpenHiTopK(engine, bucket, {2, 2}, packed, sums);
    std::vector<float> data = Gradient(rank, bucket.elements(), 0);
    CHECK_OK(engine->BeginTopKStep(channel, 0.1));
    const Status status = Exchange(engine, channel, bucket, &data);
    CHECK(status.message.find("the plan has the opcode " + opcode + ", which the bucket's codec does not have") !=
          std::string::npos);
  });
}

// The vector of the gradient of rank 1 in step 2, of elements from kFirst on.
class Selected {
 public:
  static constexpr int64_t kFirst = 13;

  Selected(const SparseSpec& spec, int64_t elements) : gradient(Gradient(1, elements, 2)), elements_(elements) {
    auto feedback = std::make_shared<Feedback>(spec, FeedbackShard{kFirst, elements, false}, std::vector<int64_t>{});
    codec = MakeVectorCodec(feedback);
    codec->Select(work, gradient.data());
    codec->Selected(work);
  }

  // Any part of it comes back from a message; `visit` gets the part's begin, and its elements.
  void CheckParts(const std::function<void(int64_t, const std::vector<float>&)>& visit) {
    for (int64_t begin = 0; begin <= elements_; begin += 7) {
      for (int64_t count = 0; begin + count <= elements_; count += 9) {
        const VectorMessage message = codec->Write(kFirst + begin, count, &pool);
        CHECK_OK(codec->CheckHead(message.head, count));
        std::vector<float> sum(static_cast<size_t>(count)), own(sum);
        if (count > 0) CHECK_OK(codec->Add(work, message, sum.data(), count));
        codec->Add(work, kFirst + begin, count, own.data());
        CHECK(sum == own);
        visit(begin, sum);
      }
    }
  }

  // A head of a message about so many elements is refused, once it is damaged.
  void CheckRefused(VectorHead head, int64_t elements, void (*damage)(VectorHead*), const std::string& words) const {
    damage(&head);
    CHECK_FAILS(codec->CheckHead(head, elements), Code::kCommunication, words);
  }

  const std::vector<float> gradient;
  std::unique_ptr<VectorCodec> codec;
  BufferPool pool;
  TopKScratch scratch;
  const VectorWork work{{0.1, {}}, 0, &scratch, &pool, HostDevice().get(), &pool, HostDevice()->inputs()};

 private:
  const int64_t elements_;
};

}  // namespace hvd_ext::test

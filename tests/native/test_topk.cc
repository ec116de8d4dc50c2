// The exact selection against its definition: inputs, sizes, dtypes, processors, threads, segments.
#include "topk_inputs.h"

namespace hvd_ext::test {
namespace {

std::vector<int64_t> Ks(int64_t d) {
  std::vector<int64_t> ks = {0, 1, 7, d / 100, d / 6, d / 2, d - 1, d};
  ks.erase(std::remove_if(ks.begin(), ks.end(), [d](int64_t k) { return k < 0 || k > d; }), ks.end());
  std::sort(ks.begin(), ks.end());
  ks.erase(std::unique(ks.begin(), ks.end()), ks.end());
  return ks;
}

template <typename Bits>
void IsTheAnswer(const std::vector<Bits>& x, const std::vector<int64_t>& order, int64_t k, const Picked<Bits>& picked,
                 Bits infinity) {
  std::vector<int64_t> expected(order.begin(), order.begin() + k);
  std::sort(expected.begin(), expected.end());
  CHECK(picked.indices == expected);
  bool non_finite = false;
  for (int64_t i = 0; i < k; ++i) CHECK(picked.values[i] == x[expected[i]]);
  for (int64_t i = 0; i < (k > 0 ? k : static_cast<int64_t>(order.size())); ++i) {
    non_finite |= topk::KeyOf(x[order[i]]) >= infinity;
  }
  CHECK_EQ(picked.non_finite, non_finite);
  CHECK_EQ(picked.counts[0], k);
}

template <typename Bits>
void AllInputs(const Format<Bits>& format, int64_t elements, topk::Misled misled = topk::Misled::kNot) {
  TopKScratch scratch;  // one for all: nothing of an earlier call may show
  int call = 0;
  for (const SelectionInput& input : SelectionInputs()) {
    const std::string name = input.name;
    const std::vector<Bits> x = Input(format, name, elements);
    const std::vector<int64_t> order = Order(x, 0, elements);
    for (int64_t k : Ks(elements)) {
      for (topk::Path path : Paths()) {
        const With with(path, misled);
        const bool wide = ++call % 2 == 0;
        const Picked<Bits> picked = Run({}, format, x.data(), {{0, elements, k}}, nullptr, wide, &scratch);
        try {
          IsTheAnswer(x, order, k, picked, format.infinity);
        } catch (const Failure& failure) {
          std::ostringstream text;
          text << name << " " << NameOf(format.dtype) << " d=" << elements << " k=" << k
               << " path=" << static_cast<int>(path) << ": " << failure.what();
          Fail(__FILE__, __LINE__, text.str());
        }
      }
    }
  }
}

TEST("top-k: the answer is that of the definition, for small sizes around the width of registers") {
  for (int64_t elements : {0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1000}) AllInputs(kFloat32, elements);
}

TEST("top-k: the answer is that of the definition where segments are sampled") {
  for (int64_t elements : {1025, 4097, 9011}) AllInputs(kFloat32, elements);
}

TEST("top-k: every dtype has the same rules") {
  for (int64_t elements : {65, 5001}) {
    AllInputs(kFloat64, elements);
    AllInputs(kFloat16, elements);
    AllInputs(kBFloat16, elements);
  }
}

TEST("top-k: a sample that misleads costs time, not the answer") {
  AllInputs(kFloat32, 5011, topk::Misled::kHigh);
  AllInputs(kFloat32, 5011, topk::Misled::kLow);
  AllInputs(kBFloat16, 5011, topk::Misled::kHigh);
  AllInputs(kFloat64, 5011, topk::Misled::kHigh);
}

TEST("top-k: segments have their own k and keep apart, with gaps between them") {
  std::vector<TopKSegment> segments;
  int64_t begin = 3;
  const int64_t lengths[] = {64, 1, 0, 30000, 7, 5000, 64, 27000, 4097, 2};
  const int64_t ks[] = {1, 0, 0, 30, 7, 2500, 0, 270, 41, 1};
  for (int s = 0; s < 10; ++s) {
    segments.push_back({begin, lengths[s], ks[s]});
    begin += lengths[s] + (s % 3 == 0 ? 5 : 0);
  }
  std::vector<uint32_t> x = Input(kFloat32, "layers", begin + 9);
  std::vector<int64_t> expected;
  for (const TopKSegment& segment : segments) {
    const std::vector<int64_t> best = Best(x, segment);
    expected.insert(expected.end(), best.begin(), best.end());
  }
  for (topk::Path path : Paths()) {
    TopKScratch scratch;
    const With with(path);
    const auto picked = Run({}, kFloat32, x.data(), segments, nullptr, true, &scratch);
    CHECK(picked.indices == expected);
    CHECK(!picked.non_finite);
    for (size_t s = 0; s < segments.size(); ++s) CHECK_EQ(picked.counts[s], segments[s].k);
  }
  x[static_cast<size_t>(segments[6].begin + 60)] = kFloat32.infinity;  // its k is 0
  TopKScratch scratch;
  CHECK(Run({}, kFloat32, x.data(), segments, nullptr, true, &scratch).non_finite);
}

TEST("top-k: memory is kept, and bounded when everything is equal") {
  const int64_t elements = 300000, k = 300;
  const std::vector<uint32_t> x = Input(kFloat32, "constant", elements);
  TopKScratch scratch;
  Run({}, kFloat32, x.data(), {{0, elements, k}}, nullptr, false, &scratch);
  const int64_t bytes = scratch.bytes();
  CHECK(bytes > 0 && bytes < 1 << 20);
  Run({}, kFloat32, x.data(), {{0, elements, k}}, nullptr, false, &scratch);
  CHECK_EQ(scratch.bytes(), bytes);
}

TEST("top-k: values may be left out") {
  TopKScratch scratch;
  const std::vector<uint32_t> x = Input(kFloat32, "gauss", 5000);
  const TopKSegment segment{0, 5000, 500};
  std::vector<int32_t> indices(500);
  int64_t count = 0;
  bool non_finite = false;
  for (topk::Path path : Paths()) {
    const With with(path);
    TopK({}, DType::kFloat32, x.data(), &segment, 1, &scratch, nullptr, &count, indices.data(), false, nullptr,
         &non_finite);
    const auto picked = Run({}, kFloat32, x.data(), {segment}, nullptr, false, &scratch);
    CHECK(std::equal(indices.begin(), indices.end(), picked.indices.begin(), picked.indices.end()));
  }
}

}  // namespace
}  // namespace hvd_ext::test

// The selectors other than kExact: what each promises, on every input.
#include <set>

#include "topk_inputs.h"

namespace hvd_ext::test {
namespace {

// Checks that the indices are distinct, ascending and in range, and that the values are those of x.
template <typename Bits>
void IsASelection(const std::vector<Bits>& x, const Picked<Bits>& picked) {
  const int64_t count = picked.counts[0];
  for (int64_t i = 0; i < count; ++i) {
    CHECK(picked.indices[i] >= 0 && picked.indices[i] < static_cast<int64_t>(x.size()));
    if (i > 0) CHECK(picked.indices[i] > picked.indices[i - 1]);
    CHECK(picked.values[i] == x[picked.indices[i]]);
  }
}

template <typename Bits>
void OnAllInputs(const Format<Bits>& format, Selector selector) {
  TopKScratch scratch;
  TopKOptions options;
  options.selector = selector;
  options.seed = 5;
  options.threshold = 1.5;
  for (const SelectionInput& input : SelectionInputs()) {
    const std::string name = input.name;
    for (int64_t elements : {1, 100, 5003}) {
      const std::vector<Bits> x = Input(format, name, elements);
      const std::vector<int64_t> order = Order(x, 0, elements);
      for (int64_t k : {int64_t{0}, int64_t{1}, elements / 100, elements * 2 / 3, elements}) {
        const auto picked = Run(options, format, x.data(), {{0, elements, k}}, nullptr, k % 2 == 0, &scratch);
        IsASelection(x, picked);
        const bool fills = selector == Selector::kMSTopK || selector == Selector::kRandom;
        CHECK(fills ? picked.counts[0] == k : picked.counts[0] <= k);
        if (selector != Selector::kThreshold) continue;
        int64_t above = 0;
        while (above < k && topk::KeyOf(x[order[above]]) >= Drawing{format.dtype, 0, {}}.of(1.5)) ++above;
        CHECK_EQ(picked.counts[0], above);
        for (int64_t i = 0; i < above; ++i) {
          CHECK(std::binary_search(picked.indices.begin(), picked.indices.begin() + above, order[i]));
        }
      }
    }
  }
}

TEST("selectors: exactly or at most k distinct elements of every input and dtype") {
  for (Selector selector : {Selector::kMSTopK, Selector::kDgc, Selector::kThreshold, Selector::kRandom}) {
    OnAllInputs(kFloat32, selector);
    OnAllInputs(kFloat64, selector);
    OnAllInputs(kFloat16, selector);
    OnAllInputs(kBFloat16, selector);
  }
}

TEST("selectors: MSTopK finds the exact answer on smooth data, and its seed moves the run only") {
  const int64_t elements = 50000, k = 500;
  const std::vector<uint32_t> x = Input(kFloat32, "gauss", elements);
  TopKScratch scratch;
  TopKOptions options;
  const auto exact = Run(options, kFloat32, x.data(), {{0, elements, k}}, nullptr, false, &scratch);
  options.selector = Selector::kMSTopK;
  CHECK(Run(options, kFloat32, x.data(), {{0, elements, k}}, nullptr, false, &scratch).indices == exact.indices);
  options.samplings = 4;  // a wide window, from which a random run is taken
  std::set<std::vector<int64_t>> answers;
  for (uint64_t seed : {1, 1, 2, 3}) {
    options.seed = seed;
    answers.insert(Run(options, kFloat32, x.data(), {{0, elements, k}}, nullptr, false, &scratch).indices);
  }
  CHECK_EQ(answers.size(), size_t{3});
  options.samplings = 0;  // no threshold at all, so that the run may have any elements
  const auto any = Run(options, kFloat32, x.data(), {{0, elements, k}}, nullptr, false, &scratch);
  CHECK_EQ(any.counts[0], k);
}

TEST("selectors: a sampled threshold gives about k, and no more") {
  const int64_t elements = 200000, k = 2000;
  TopKScratch scratch;
  TopKOptions options;
  options.selector = Selector::kDgc;
  for (const char* name : {"gauss", "laplace", "cauchy", "layers"}) {
    const std::vector<uint32_t> x = Input(kFloat32, name, elements);
    const auto picked = Run(options, kFloat32, x.data(), {{0, elements, k}}, nullptr, false, &scratch);
    CHECK(picked.counts[0] >= k * 7 / 10 && picked.counts[0] <= k);
  }
}

TEST("selectors: random elements are drawn from everywhere, anew for each seed and segment") {
  const int64_t elements = 1000;
  const std::vector<uint32_t> x = Input(kFloat32, "gauss", 2 * elements);
  TopKScratch scratch;
  TopKOptions options;
  options.selector = Selector::kRandom;
  std::vector<int64_t> drawn(static_cast<size_t>(elements), 0);
  for (uint64_t seed = 0; seed < 400; ++seed) {
    options.seed = seed;
    const auto picked =
        Run(options, kFloat32, x.data(), {{0, elements, 50}, {elements, elements, 600}}, nullptr, false, &scratch);
    bool same = true;
    for (int64_t i = 0; i < 50; ++i) {
      ++drawn[static_cast<size_t>(picked.indices[i])];
      same &= picked.indices[i] + elements == picked.indices[50 + i];
    }
    CHECK(!same);
  }
  // each is drawn 20 times on average; a uniform draw leaves [2, 50] about once in 10^6 elements
  for (int64_t count : drawn) CHECK(count >= 2 && count <= 50);
}

}  // namespace
}  // namespace hvd_ext::test

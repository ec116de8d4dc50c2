// Norms and sketches against their definitions, bit for bit, for all instruction sets and numbers of threads.
#include <cmath>
#include <cstring>

#include "harness.h"
#include "kernels/denormals.h"
#include "kernels/half.h"
#include "kernels/norms.h"
#include "kernels/sketch.h"
#include "parallel.h"
#include "topk_inputs.h"

namespace hvd_ext::test {
namespace {

std::vector<float> Floats(int64_t elements, uint64_t seed) {
  std::vector<float> x(static_cast<size_t>(elements));
  uint64_t state = seed * 2654435761u + 1;
  for (float& one : x) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    one = static_cast<float>(static_cast<int64_t>(state >> 20) - (int64_t{1} << 43)) * 1e-14f;
  }
  return x;
}

// The definition, written down once more: 32 lanes, folded in halves.
template <typename T>
double Expected(const T* x, int64_t elements) {
  std::vector<double> lanes(32, 0.0);
  for (int64_t i = 0; i < elements; ++i) {
    const double value = Wide(x[i]);
    lanes[static_cast<size_t>(i % 32)] += value * value;
  }
  while (lanes.size() > 1) {
    const size_t half = lanes.size() / 2;
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    lanes.resize(half);
  }
  return lanes[0];
}

double SquaresOf(DType dtype, const void* data, int64_t elements) {
  const NormBlock block{data, elements};
  double sum = -1;
  NormSquares(dtype, &block, 1, nullptr, &sum);
  return sum;
}

}  // namespace

TEST("norms: the sum of a block has the bits of its definition, on every path and length") {
  for (topk::Path path : Paths()) {
    const With with(path);
    for (int64_t elements : {0, 1, 31, 32, 33, 63, 64, 1000, 4096, 65535, 65536}) {
      const std::vector<float> x = Floats(elements, static_cast<uint64_t>(elements) + 3);
      CHECK_EQ(SquaresOf(DType::kFloat32, x.data(), elements), Expected(x.data(), elements));
    }
  }
}

TEST("norms: blocks on threads, in any order, have the same bits") {
  const std::vector<float> x = Floats(5 * kNormBlock + 17, 5);
  std::vector<NormBlock> blocks;
  double expected = 0;
  for (int64_t begin = 0; begin < static_cast<int64_t>(x.size()); begin += kNormBlock) {
    const int64_t elements = std::min(kNormBlock, static_cast<int64_t>(x.size()) - begin);
    blocks.push_back({x.data() + begin, elements});
    expected += Expected(x.data() + begin, elements);
  }
  const int64_t n = static_cast<int64_t>(blocks.size());
  CHECK_EQ(n, NormBlocks(static_cast<int64_t>(x.size())));
  for (const ParallelFor& parallel_for : {ParallelFor(), Threads(4)}) {
    std::vector<double> sums(blocks.size());
    NormSquares(DType::kFloat32, blocks.data(), n, parallel_for, sums.data());
    CHECK_EQ(NormSum(sums.data(), n), expected);
  }
}

TEST("norms: every dtype of floating point; denormals count though the thread flushes them") {
  const std::vector<float> x = Floats(777, 9);
  std::vector<double> doubles(x.begin(), x.end());
  std::vector<Float16> halves;
  std::vector<BFloat16> brains;
  for (float one : x) {
    halves.push_back(ToFloat16(one));
    brains.push_back(ToBFloat16(one));
  }
  CHECK_EQ(SquaresOf(DType::kFloat64, doubles.data(), 777), Expected(doubles.data(), 777));
  CHECK_EQ(SquaresOf(DType::kFloat16, halves.data(), 777), Expected(halves.data(), 777));
  CHECK_EQ(SquaresOf(DType::kBFloat16, brains.data(), 777), Expected(brains.data(), 777));
  const std::vector<float> tiny(100, 1e-42f);
  const WithoutDenormals flushed;
  CHECK(SquaresOf(DType::kFloat32, tiny.data(), 100) > 0);
}

TEST("sketches: the bits of their definition, on every path, on threads in any order") {
  const int64_t lengths[] = {0, 1, 256, 257, 1000, kNormBlock - 1, kNormBlock, 6 * kNormBlock + 333};
  std::vector<uint32_t> signs(static_cast<size_t>(NormSignWords(kNormBlock / kSketch))), block_signs(signs);
  for (size_t i = 0; i < signs.size(); ++i) {
    signs[i] = BitsOf(static_cast<float>(i) * 1.7f) * 2654435761u;
    block_signs[i] = ~signs[i] * 2246822519u;
  }
  // The sign of the element at `at` of rows.
  const auto sign = [](const std::vector<uint32_t>& words, int64_t at) {
    return words[static_cast<size_t>(at / 1024 * 32 + at % 32)] >> (at % 1024 / 32) & 1 ? -1.0f : 1.0f;
  };
  std::vector<std::vector<float>> memory;
  std::vector<SketchTensor> tensors;
  std::vector<float> expected;
  for (int64_t length : lengths) {
    const std::vector<float>& x = memory.emplace_back(Floats(length, static_cast<uint64_t>(length)));
    std::vector<float> found(kSketch, 0.0f);
    for (int64_t begin = 0; begin < length; begin += kNormBlock) {
      std::vector<float> sums(kSketch, 0.0f);
      const int64_t block = begin / kNormBlock, elements = std::min(kNormBlock, length - begin);
      for (int64_t i = 0; i < elements; ++i) {
        sums[static_cast<size_t>(i % kSketch)] += (length > kSketch ? sign(signs, i) : 1.0f) * x[begin + i];
      }
      for (int64_t c = 0; c < kSketch; ++c) {
        found[c] += (elements == kNormBlock ? sign(block_signs, block * kSketch + c) : 1.0f) * sums[c];
      }
    }
    expected.insert(expected.end(), found.begin(), found.end());
  }
  for (const std::vector<float>& x : memory) tensors.push_back({x.data(), static_cast<int64_t>(x.size())});
  for (topk::Path path : Paths()) {
    const With with(path);
    for (const ParallelFor& parallel_for : {ParallelFor(), Threads(4)}) {
      std::vector<float> seen(expected.size(), 7.0f);
      const int64_t n = static_cast<int64_t>(tensors.size());
      NormSketches(tensors.data(), n, signs.data(), block_signs.data(), parallel_for, seen.data());
      CHECK(seen == expected);
    }
  }
}

}  // namespace hvd_ext::test

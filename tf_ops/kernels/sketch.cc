#include "kernels/sketch.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/denormals.h"
#include "kernels/half.h"
#include "kernels/norms.h"
#include "kernels/topk_scan.h"

namespace hvd_ext {
namespace {

constexpr int64_t kAhead = 512;  // how far the prefetch runs ahead of the loads, as for norms, in elements

HVD_EXT_ALWAYS float Signed(float x, uint32_t word, int64_t bit) { return FloatOf(BitsOf(x) ^ (word >> bit << 31)); }

// Adds the elements of x to their columns, with their signs.
HVD_EXT_ALWAYS void AddRows(const float* x, int64_t elements, const uint32_t* signs, float* columns) {
  alignas(64) float sums[kSketch];
  std::memcpy(sums, columns, sizeof sums);
  int64_t at = 0;
  // The compiler vectorises the inner loop for each of the instruction sets.
  for (; at + kSignWords <= elements; at += kSignWords) {
    const uint32_t* words = signs + at / kSignGroup * kSignWords;
    const int64_t bit = at % kSignGroup / kSignWords;
    float* to = sums + at % kSketch;
    const float* from = x + at;
    __builtin_prefetch(from + kAhead);
    __builtin_prefetch(from + kAhead + 16);
#pragma GCC unroll 2
    for (int64_t lane = 0; lane < kSignWords; ++lane) to[lane] += Signed(from[lane], words[lane], bit);
  }
  for (; at < elements; ++at) {
    const uint32_t word = signs[at / kSignGroup * kSignWords + at % kSignWords];
    sums[at % kSketch] += Signed(x[at], word, at % kSignGroup / kSignWords);
  }
  std::memcpy(columns, sums, sizeof sums);
}

}  // namespace

void NormSketches(const SketchTensor* tensors, int64_t n, const uint32_t* signs, const uint32_t* block_signs,
                  const ParallelFor& parallel_for, float* sketches) {
  std::vector<SketchTensor> blocks;  // of the tensors that are longer than a sketch
  int64_t elements = 0;
  for (int64_t i = 0; i < n; ++i) {
    const SketchTensor& one = tensors[i];
    for (int64_t begin = 0; one.elements > kSketch && begin < one.elements; begin += kNormBlock) {
      blocks.push_back({one.data + begin, std::min(kNormBlock, one.elements - begin)});
      elements += blocks.back().elements;
    }
  }
  const int64_t n_blocks = static_cast<int64_t>(blocks.size());
  std::vector<float> sums(static_cast<size_t>(n_blocks * kSketch));
  const topk::Path path = topk::CurrentPath();
  const auto run = [&](int64_t begin, int64_t end) {
    const WithDenormals denormals;
    for (int64_t i = begin; i < end; ++i) {
      topk::OnPath<AddRows>(path, blocks[i].data, blocks[i].elements, signs, &sums[i * kSketch]);
    }
  };
  if (parallel_for == nullptr || n_blocks < 2) {
    run(0, n_blocks);
  } else {
    parallel_for(n_blocks, elements / n_blocks / 4, run);  // about 4 elements in a nanosecond
  }

  const WithDenormals denormals;
  const float* next = sums.data();
  std::fill(sketches, sketches + n * kSketch, 0.0f);
  for (int64_t i = 0; i < n; ++i, sketches += kSketch) {
    const SketchTensor& one = tensors[i];
    if (one.elements <= kSketch) {
      std::copy(one.data, one.data + one.elements, sketches);
      continue;
    }
    const int64_t whole = one.elements / kNormBlock * kSketch;
    topk::OnPath<AddRows>(path, next, whole, block_signs, sketches);
    next += whole;
    if (one.elements % kNormBlock == 0) continue;
    for (int64_t c = 0; c < kSketch; ++c) sketches[c] += next[c];
    next += kSketch;
  }
}

}  // namespace hvd_ext

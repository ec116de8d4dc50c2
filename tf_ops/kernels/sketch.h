// Sketches of tensors (a count sketch: Charikar et al., 2002): short vectors of signed sums, which are linear in the
// tensor and whose expected square norm is the tensor's. What they are for is told in hvd_ext/tensorflow/norms.py.
#pragma once

#include <cstdint>

#include "kernels/topk.h"

namespace hvd_ext {

// The length of a sketch.
constexpr int64_t kSketch = 256;
// Signs lie in words: bit j of word l of a group belongs to element 32 j + l of kSignGroup elements, and is 1 for -1.
constexpr int64_t kSignWords = 32, kSignGroup = 32 * kSignWords;

struct SketchTensor {
  const float* data;
  int64_t elements;
};

// The words of signs for `rows` rows of kSketch elements.
constexpr int64_t NormSignWords(int64_t rows) { return (rows * kSketch + kSignGroup - 1) / kSignGroup * kSignWords; }

// Sets sketches[kSketch * i .. kSketch * (i + 1)) to the sketch of tensors[i], which is read once: the tensor itself
// and zeros, if it has at most kSketch elements; else its elements are read as rows of kSketch, and rows as blocks of
// kNormBlock elements. Column c of a block's sum adds the elements c of its rows in their order, in float32, with the
// signs of `signs`, which has words for the rows of a block. The sketch adds the sums of the whole blocks in their
// order, with the signs of `block_signs`, which has words for as many rows as the longest tensor has whole blocks; then
// that of the last block, if it is shorter. So the bits depend neither on threads nor on instructions.
void NormSketches(const SketchTensor* tensors, int64_t n, const uint32_t* signs, const uint32_t* block_signs,
                  const ParallelFor& parallel_for, float* sketches);

}  // namespace hvd_ext

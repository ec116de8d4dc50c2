// The one definition of a sum of squares, for the norms of LARS and LAMB.
//
// A tensor is read as blocks of kNormBlock elements, the last of which may be shorter. Within a block, lane l of 32
// adds the squares of the elements l, l + 32, l + 64 ... in their order, in float64; then lane l adds lane l + 16, l +
// 8, and so on. A tensor's sum is that of its blocks, in their order. So the bits depend neither on threads nor on
// instructions, nor on which ranks have summed which blocks.
#pragma once

#include <cstdint>

#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace hvd_ext {

constexpr int64_t kNormBlock = 65536;

// A block of a tensor: at most kNormBlock elements.
struct NormBlock {
  const void* data;
  int64_t elements;
};

constexpr int64_t NormBlocks(int64_t elements) { return (elements + kNormBlock - 1) / kNormBlock; }

// Sets sums[i] to the sum of the squares of blocks[i], each read once. dtype is one of floating point; others are a
// bug.
void NormSquares(DType dtype, const NormBlock* blocks, int64_t n_blocks, const ParallelFor& parallel_for, double* sums);

// Returns the sum of the blocks of one tensor.
double NormSum(const double* sums, int64_t n_blocks);

}  // namespace hvd_ext

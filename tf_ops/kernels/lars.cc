#include "kernels/lars.h"

#include <algorithm>
#include <vector>

#include "kernels/denormals.h"
#include "kernels/norms.h"
#include "kernels/topk_scan.h"

namespace hvd_ext {
namespace {

// The compiler vectorises this loop for each of the instruction sets.
template <bool kNesterov, bool kDecays>
HVD_EXT_ALWAYS void Update(const LarsVariable& v, int64_t begin, int64_t end, const LarsStep& step) {
  const float momentum = step.momentum, rate = step.rate, scale = v.scale, decay = v.decay;
  const float *weights = v.weights, *velocity = v.velocity, *gradient = v.gradient;
  float *next_weights = v.next_weights, *next_velocity = v.next_velocity;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    const float weight = weights[i];
    const float update = scale * (kDecays ? gradient[i] + decay * weight : gradient[i]);
    const float moved = momentum * velocity[i] + update;
    next_velocity[i] = moved;
    next_weights[i] = weight - rate * (kNesterov ? momentum * moved + update : moved);
  }
}

HVD_EXT_ALWAYS void Choose(LarsVariable v, int64_t begin, int64_t end, LarsStep step) {
  if (step.nesterov) {
    if (v.decay != 0) {
      Update<true, true>(v, begin, end, step);
    } else {
      Update<true, false>(v, begin, end, step);
    }
  } else if (v.decay != 0) {
    Update<false, true>(v, begin, end, step);
  } else {
    Update<false, false>(v, begin, end, step);
  }
}

}  // namespace

void LarsUpdate(const LarsVariable* variables, int64_t n, const LarsStep& step, const ParallelFor& parallel_for) {
  struct Piece {
    int64_t variable, begin, end;
  };
  std::vector<Piece> pieces;
  int64_t elements = 0;
  for (int64_t one = 0; one < n; ++one) {
    elements += variables[one].elements;
    for (int64_t begin = 0; begin < variables[one].elements; begin += kNormBlock) {
      pieces.push_back({one, begin, std::min(begin + kNormBlock, variables[one].elements)});
    }
  }
  const topk::Path path = topk::CurrentPath();
  auto run = [&](int64_t begin, int64_t end) {
    const WithoutDenormals flushed;
    for (int64_t i = begin; i < end; ++i) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      topk::OnPath<Choose>(path, variables[piece.variable], piece.begin, piece.end, step);
    }
  };
  const int64_t n_pieces = static_cast<int64_t>(pieces.size());
  if (parallel_for == nullptr || n_pieces < 2) return run(0, n_pieces);
  parallel_for(n_pieces, elements / n_pieces, run);  // about an element in a nanosecond
}

}  // namespace hvd_ext

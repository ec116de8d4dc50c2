// One step of LARS, in one pass over weights, velocities and gradients.
#pragma once

#include <cstdint>

#include "kernels/topk.h"

namespace hvd_ext {

// One variable. What is written may be what is read.
struct LarsVariable {
  const float* weights;
  const float* velocity;
  const float* gradient;
  float* next_weights;
  float* next_velocity;
  int64_t elements;
  float scale;  // the trust ratio, times the learning rate where that is inside of the momentum
  float decay;
};

struct LarsStep {
  float momentum;
  float rate;  // the learning rate where that is outside of the momentum, else 1
  bool nesterov;
};

// For each element: u = scale (gradient + decay weight), next velocity = momentum velocity + u, and next weight =
// weight - rate (nesterov ? momentum next velocity + u : next velocity), each operation rounded to float32. Denormal
// floats count as 0: velocities of gradients that stay 0 pass through them, and would slow each step down.
void LarsUpdate(const LarsVariable* variables, int64_t n, const LarsStep& step, const ParallelFor& parallel_for);

}  // namespace hvd_ext

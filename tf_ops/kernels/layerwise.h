// The updates of LARS and LAMB: each function takes all variables of a step, and reads and writes each of their
// elements once. layerwise_each.h says what happens to an element. Denormal floats count as 0: averages of gradients
// that stay 0 pass through them, and would slow each step down.
#pragma once

#include <cstdint>

#include "kernels/topk.h"

namespace hvd_ext {

// One variable of LARS. What is written may be what is read; so it is in all of these.
struct LarsVariable {
  const float* weights;
  const float* velocity;
  const float* gradient;
  float* next_weights;
  float* next_velocity;
  int64_t elements;
  float decay;
};

struct LarsStep {
  const float* scales;  // of each variable the trust ratio, times the learning rate where that is inside the momentum
  const float* momentum;
  const float* rate;  // the learning rate where that is outside the momentum, else 1
  bool nesterov;
};

// For each element: u = scale (gradient + decay weight), next velocity = momentum velocity + u, and next weight =
// weight - rate (nesterov ? momentum next velocity + u : next velocity), each operation rounded to float32.
void LarsUpdate(const LarsVariable* variables, int64_t n, const LarsStep& step, const ParallelFor& parallel_for);

// One variable of LAMB before its trust ratio is known.
struct LambVariable {
  const float* weights;  // read where there is a decay
  const float* gradient;
  const float* momentum;
  const float* velocity;
  float* next_momentum;
  float* next_velocity;
  float* update;
  int64_t elements;
  float decay;
};

struct LambStep {
  float first, second;  // 1 - beta_1, 1 - beta_2
  float epsilon;
  const float* unbias;  // of both averages: 1 / (1 - beta^t)
};

// For each element: next momentum = momentum + first (gradient - momentum), next velocity = velocity + second
// (gradient^2 - velocity), and update = unbias[0] next momentum / (sqrt(unbias[1] next velocity) + epsilon) + decay
// weight, each operation rounded to float32.
void LambUpdates(const LambVariable* variables, int64_t n, const LambStep& step, const ParallelFor& parallel_for);

struct MovedVariable {
  const float* weights;
  const float* update;
  float* next_weights;
  int64_t elements;
};

// next weight = weight - rate update; a rate for each variable.
void ApplyUpdates(const MovedVariable* variables, int64_t n, const float* rates, const ParallelFor& parallel_for);

}  // namespace hvd_ext

// What the updates of kernels/layerwise.h do to element i, on a processor (layerwise.cc) and on a GPU
// (layerwise_gpu.cu.cc).
//
// `Normal::Of` makes a denormal float 0, also where an operation gives one. A processor has modes for that.
#pragma once

#include <cmath>

#include "kernels/each.h"
#include "kernels/layerwise.h"

namespace hvd_ext {

template <typename Normal, bool kNesterov, bool kDecays>
struct LarsEach {
  LarsVariable v;
  float scale, momentum, rate;

  HVD_EXT_EACH void operator()(int64_t i) const {
    const float weight = Normal::Of(v.weights[i]), gradient = Normal::Of(v.gradient[i]);
    const float inner = kDecays ? Normal::Of(gradient + Normal::Of(v.decay * weight)) : gradient;
    const float update = Normal::Of(scale * inner);
    const float moved = Normal::Of(Normal::Of(momentum * Normal::Of(v.velocity[i])) + update);
    const float taken = kNesterov ? Normal::Of(Normal::Of(momentum * moved) + update) : moved;
    v.next_velocity[i] = moved;
    v.next_weights[i] = Normal::Of(weight - Normal::Of(rate * taken));
  }
};

template <typename Normal, bool kDecays>
struct LambEach {
  LambVariable v;
  float first, second, epsilon, unbias_momentum, unbias_velocity;

  HVD_EXT_EACH void operator()(int64_t i) const {
    const float gradient = Normal::Of(v.gradient[i]), square = Normal::Of(gradient * gradient);
    float momentum = Normal::Of(v.momentum[i]), velocity = Normal::Of(v.velocity[i]);
    momentum = Normal::Of(momentum + Normal::Of(Normal::Of(gradient - momentum) * first));
    velocity = Normal::Of(velocity + Normal::Of(Normal::Of(square - velocity) * second));
    const float root = Normal::Of(std::sqrt(Normal::Of(velocity * unbias_velocity)) + epsilon);
    float update = Normal::Of(Normal::Of(momentum * unbias_momentum) / root);
    if (kDecays) update = Normal::Of(update + Normal::Of(v.decay * Normal::Of(v.weights[i])));
    v.next_momentum[i] = momentum;
    v.next_velocity[i] = velocity;
    v.update[i] = update;
  }
};

template <typename Normal>
struct MoveEach {
  MovedVariable v;
  float rate;

  HVD_EXT_EACH void operator()(int64_t i) const {
    v.next_weights[i] = Normal::Of(Normal::Of(v.weights[i]) - Normal::Of(rate * Normal::Of(v.update[i])));
  }
};

// Calls loop(each) with what happens to the elements of variable `number`.
template <typename Normal, typename Loop>
HVD_EXT_EACH void OfVariable(const LarsVariable& v, int64_t number, const LarsStep& step, const Loop& loop) {
  const float scale = Normal::Of(step.scales[number]), momentum = Normal::Of(*step.momentum);
  const float rate = Normal::Of(*step.rate);
  if (step.nesterov) {
    if (v.decay != 0) {
      loop(LarsEach<Normal, true, true>{v, scale, momentum, rate});
    } else {
      loop(LarsEach<Normal, true, false>{v, scale, momentum, rate});
    }
  } else if (v.decay != 0) {
    loop(LarsEach<Normal, false, true>{v, scale, momentum, rate});
  } else {
    loop(LarsEach<Normal, false, false>{v, scale, momentum, rate});
  }
}

template <typename Normal, typename Loop>
HVD_EXT_EACH void OfVariable(const LambVariable& v, int64_t /*number*/, const LambStep& step, const Loop& loop) {
  if (v.decay != 0) {
    loop(LambEach<Normal, true>{v, step.first, step.second, step.epsilon, Normal::Of(step.unbias[0]),
                                Normal::Of(step.unbias[1])});
  } else {
    loop(LambEach<Normal, false>{v, step.first, step.second, step.epsilon, Normal::Of(step.unbias[0]),
                                 Normal::Of(step.unbias[1])});
  }
}

template <typename Normal, typename Loop>
HVD_EXT_EACH void OfVariable(const MovedVariable& v, int64_t number, const float* rates, const Loop& loop) {
  loop(MoveEach<Normal>{v, Normal::Of(rates[number])});
}

}  // namespace hvd_ext

// The updates of LARS and LAMB (kernels/layerwise.h) by their definitions, operation by operation, for the processor's
// kernels, the emulated ones, and those on a GPU.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/layerwise.h"

namespace hvd_ext::test {

struct LayerwiseProblem {
  std::vector<int64_t> lengths;
  // Of all variables, one behind the other.
  std::vector<float> weights, momentum, velocity, gradient;
  // Of each variable.
  std::vector<float> scales, decays;
  bool nesterov = false;

  static constexpr float kMomentum = 0.9f, kRate = 0.25f, kEpsilon = 1e-7f;
  static constexpr float kFirst = 0.1f, kSecond = 0.001f, kUnbias[2] = {1.75f, 300.5f};
};

// `wild`: with zeros, denormals, infinities and NaN among the numbers.
inline LayerwiseProblem MakeLayerwise(const std::vector<int64_t>& lengths, uint64_t seed, bool wild) {
  LayerwiseProblem problem;
  problem.lengths = lengths;
  problem.nesterov = seed % 2 == 1;
  uint64_t state = seed * 2654435761u + 1;
  const auto next = [&](float scale) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto kind = state >> 60;
    if (wild && kind == 0) return std::copysign(0.0f, static_cast<float>(static_cast<int64_t>(state)));
    if (wild && kind == 1) return (state >> 40 & 1 ? -1e-40f : 1e-40f) * static_cast<float>(state >> 32 & 0xff);
    if (wild && kind == 2) return scale * 1e-20f;  // whose square is no normal number
    if (wild && kind == 3 && (state >> 50 & 63) == 0) return std::numeric_limits<float>::infinity();
    if (wild && kind == 4 && (state >> 50 & 63) == 0) return std::numeric_limits<float>::quiet_NaN();
    return scale * static_cast<float>(static_cast<int64_t>(state >> 20 & 0xffffff) - (1 << 23)) * 0x1p-23f;
  };
  for (size_t t = 0; t < lengths.size(); ++t) {
    for (int64_t i = 0; i < lengths[t]; ++i) {
      problem.weights.push_back(next(0.1f));
      problem.momentum.push_back(next(0.01f));
      problem.velocity.push_back(std::fabs(next(0.001f)));
      problem.gradient.push_back(next(0.01f));
    }
    problem.scales.push_back(0.01f * static_cast<float>(t % 7 + 1));
    problem.decays.push_back(t % 2 == 1 ? 0.001f : 0.0f);
  }
  return problem;
}

// What the three updates give, of all variables.
struct LayerwiseAnswer {
  std::vector<float> lars_weights, lars_velocity, lamb_momentum, lamb_velocity, lamb_update, moved_weights;
};

inline float Normal(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

inline LayerwiseAnswer ExpectedLayerwise(const LayerwiseProblem& p) {
  LayerwiseAnswer answer;
  size_t at = 0;
  for (size_t t = 0; t < p.lengths.size(); ++t) {
    const float scale = p.scales[t], decay = p.decays[t];
    for (int64_t i = 0; i < p.lengths[t]; ++i, ++at) {
      const float weight = Normal(p.weights[at]), gradient = Normal(p.gradient[at]);
      const float decayed = Normal(decay * weight);
      {
        const float inner = decay != 0 ? Normal(gradient + decayed) : gradient;
        const float update = Normal(scale * inner);
        const float kept = Normal(p.kMomentum * Normal(p.momentum[at]));
        const float moved = Normal(kept + update);
        const float ahead = Normal(p.kMomentum * moved);
        const float taken = p.nesterov ? Normal(ahead + update) : moved;
        const float part = Normal(p.kRate * taken);
        answer.lars_velocity.push_back(moved);
        answer.lars_weights.push_back(Normal(weight - part));
      }
      const float momentum = Normal(p.momentum[at]), velocity = Normal(p.velocity[at]);
      const float nearer = Normal(Normal(gradient - momentum) * p.kFirst);
      const float square = Normal(gradient * gradient);
      const float wider = Normal(Normal(square - velocity) * p.kSecond);
      const float next_momentum = Normal(momentum + nearer), next_velocity = Normal(velocity + wider);
      const float root = std::sqrt(Normal(next_velocity * p.kUnbias[1]));
      const float below = Normal(root + p.kEpsilon);
      const float above = Normal(next_momentum * p.kUnbias[0]);
      float update = Normal(above / below);
      if (decay != 0) update = Normal(update + decayed);
      answer.lamb_momentum.push_back(next_momentum);
      answer.lamb_velocity.push_back(next_velocity);
      answer.lamb_update.push_back(update);
      const float part = Normal(scale * update);
      answer.moved_weights.push_back(Normal(weight - part));
    }
  }
  return answer;
}

// Runs the three updates. Memory: Put(floats) gives a place for them, Get(place, count) reads them back; Space(nbytes)
// gives a workspace. lars(variables, n, step), lamb(variables, n, step) and move(variables, n, rates) update.
template <typename Memory, typename Lars, typename Lamb, typename Move>
LayerwiseAnswer RunLayerwise(const LayerwiseProblem& p, bool in_place, Memory* memory, const Lars& lars,
                             const Lamb& lamb, const Move& move) {
  const int64_t n = static_cast<int64_t>(p.lengths.size());
  const size_t all = p.weights.size();
  const std::vector<float> nothing(all, 7.0f);
  const auto beside = [&](float* read) { return in_place ? read : memory->Put(nothing); };
  const float* scales = memory->Put(p.scales);
  const float* momentum_of_step = memory->Put({p.kMomentum});
  const float* rate = memory->Put({p.kRate});
  const float* unbias = memory->Put({p.kUnbias[0], p.kUnbias[1]});
  const float* gradient = memory->Put(p.gradient);
  LayerwiseAnswer answer;
  {
    float *weights = memory->Put(p.weights), *velocity = memory->Put(p.momentum);
    float *next_weights = beside(weights), *next_velocity = beside(velocity);
    std::vector<LarsVariable> variables;
    int64_t at = 0;
    for (size_t t = 0; t < p.lengths.size(); at += p.lengths[t++]) {
      variables.push_back({weights + at, velocity + at, gradient + at, next_weights + at, next_velocity + at,
                           p.lengths[t], p.decays[t]});
    }
    lars(variables.data(), n, LarsStep{scales, momentum_of_step, rate, p.nesterov});
    answer.lars_weights = memory->Get(next_weights, all);
    answer.lars_velocity = memory->Get(next_velocity, all);
  }
  float *weights = memory->Put(p.weights), *momentum = memory->Put(p.momentum), *velocity = memory->Put(p.velocity);
  float *next_momentum = beside(momentum), *next_velocity = beside(velocity), *update = memory->Put(nothing);
  float* next_weights = beside(weights);
  std::vector<LambVariable> variables;
  std::vector<MovedVariable> moved;
  int64_t at = 0;
  for (size_t t = 0; t < p.lengths.size(); at += p.lengths[t++]) {
    variables.push_back({weights + at, gradient + at, momentum + at, velocity + at, next_momentum + at,
                         next_velocity + at, update + at, p.lengths[t], p.decays[t]});
    moved.push_back({weights + at, update + at, next_weights + at, p.lengths[t]});
  }
  lamb(variables.data(), n, LambStep{p.kFirst, p.kSecond, p.kEpsilon, unbias});
  answer.lamb_momentum = memory->Get(next_momentum, all);
  answer.lamb_velocity = memory->Get(next_velocity, all);
  answer.lamb_update = memory->Get(update, all);
  move(moved.data(), n, scales);
  answer.moved_weights = memory->Get(next_weights, all);
  return answer;
}

// Throws where a number does not have the expected bits. Every NaN is as good as another.
inline void MustBe(const LayerwiseAnswer& seen, const LayerwiseAnswer& expected) {
  const auto same = [](const char* what, const std::vector<float>& one, const std::vector<float>& other) {
    for (size_t i = 0; i < other.size(); ++i) {
      if (std::memcmp(&one[i], &other[i], sizeof(float)) == 0 || (std::isnan(one[i]) && std::isnan(other[i]))) continue;
      std::ostringstream text;
      text.precision(9);
      text << what << " " << i << " of " << other.size() << ": " << one[i] << ", must be " << other[i];
      throw std::runtime_error(text.str());
    }
  };
  same("LARS, weight", seen.lars_weights, expected.lars_weights);
  same("LARS, velocity", seen.lars_velocity, expected.lars_velocity);
  same("LAMB, momentum", seen.lamb_momentum, expected.lamb_momentum);
  same("LAMB, velocity", seen.lamb_velocity, expected.lamb_velocity);
  same("LAMB, update", seen.lamb_update, expected.lamb_update);
  same("LAMB, weight", seen.moved_weights, expected.moved_weights);
}

}  // namespace hvd_ext::test

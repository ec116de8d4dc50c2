#include "kernels/layerwise.h"

#include <algorithm>
#include <vector>

#include "kernels/denormals.h"
#include "kernels/layerwise_each.h"
#include "kernels/norms.h"
#include "kernels/topk_scan.h"

namespace hvd_ext {
namespace {

struct AsTheModesSay {
  HVD_EXT_EACH static float Of(float x) { return x; }
};

// The compiler vectorises this loop for each of the instruction sets.
struct FromTo {
  int64_t begin, end;
  template <typename Each>
  HVD_EXT_ALWAYS void operator()(Each each) const {
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) each(i);
  }
};

template <typename Variable, typename Step>
HVD_EXT_ALWAYS void Piece(const Variable& variable, int64_t number, const Step& step, int64_t begin, int64_t end) {
  OfVariable<AsTheModesSay>(variable, number, step, FromTo{begin, end});
}

template <typename Variable, typename Step>
void ForAll(const Variable* variables, int64_t n, const Step& step, const ParallelFor& parallel_for) {
  struct Part {
    int64_t variable, begin, end;
  };
  std::vector<Part> parts;
  int64_t elements = 0;
  for (int64_t one = 0; one < n; ++one) {
    elements += variables[one].elements;
    for (int64_t begin = 0; begin < variables[one].elements; begin += kNormBlock) {
      parts.push_back({one, begin, std::min(begin + kNormBlock, variables[one].elements)});
    }
  }
  const topk::Path path = topk::CurrentPath();
  auto run = [&](int64_t begin, int64_t end) {
    const WithoutDenormals flushed;
    for (int64_t i = begin; i < end; ++i) {
      const Part& part = parts[static_cast<size_t>(i)];
      topk::OnPath<Piece<Variable, Step>>(path, variables[part.variable], part.variable, step, part.begin, part.end);
    }
  };
  const int64_t n_parts = static_cast<int64_t>(parts.size());
  if (parallel_for == nullptr || n_parts < 2) return run(0, n_parts);
  parallel_for(n_parts, elements / n_parts, run);  // about an element in a nanosecond
}

}  // namespace

void LarsUpdate(const LarsVariable* variables, int64_t n, const LarsStep& step, const ParallelFor& parallel_for) {
  ForAll(variables, n, step, parallel_for);
}

void LambUpdates(const LambVariable* variables, int64_t n, const LambStep& step, const ParallelFor& parallel_for) {
  ForAll(variables, n, step, parallel_for);
}

void ApplyUpdates(const MovedVariable* variables, int64_t n, const float* rates, const ParallelFor& parallel_for) {
  ForAll(variables, n, rates, parallel_for);
}

}  // namespace hvd_ext

// The sums of squares of the segments of a problem (their k is not used), by the definition of kernels/norms.h. They
// serve the emulated kernels and those on a GPU.
#pragma once

#include <cmath>
#include <vector>

#include "gpu/cases.h"
#include "kernels/half.h"
#include "kernels/norms.h"
#include "kernels/norms_gpu.h"

namespace hvd_ext::gpu_test {

inline double ValueOf(uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::kFloat64: {
      double value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    }
    case DType::kFloat32:
      return FloatOf(static_cast<uint32_t>(bits));
    case DType::kFloat16:
      return ToFloat(Float16{static_cast<uint16_t>(bits)});
    default:
      return ToFloat(BFloat16{static_cast<uint16_t>(bits)});
  }
}

inline std::vector<double> ExpectedSquares(const Problem& problem) {
  std::vector<double> all;
  for (const HvdExtTopKSegment& segment : problem.segments) {
    double sum = 0;
    for (int64_t begin = 0; begin < segment.elements; begin += kNormBlock) {
      double lanes[32] = {};
      for (int64_t i = begin; i < std::min(begin + kNormBlock, segment.elements); ++i) {
        const double value = ValueOf(problem.bits[segment.begin + i], problem.dtype), square = value * value;
        lanes[i % 32] += square;
      }
      for (int width = 16; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
      }
      sum += lanes[0];
    }
    all.push_back(sum);
  }
  return all;
}

// Tensors of the lengths at which something changes, between others so that there are many, over one of the inputs.
inline Problem NormsProblem(const std::string& name, DType dtype, uint64_t seed) {
  std::vector<int64_t> lengths = {0, 1, 31, 32, 33, 1023, 1024, 1025, 3000, 65535, 65536, 65537, 0, 140001};
  for (int64_t t = 0; t < 320; ++t) lengths.push_back(t * 7 % 90);  // more than two groups of Setup
  Problem problem = ManySegments(name, dtype, lengths, seed);
  problem.shift = static_cast<int64_t>(seed % 37);
  return problem;
}

// x is where the elements of the problem lie, on a device or not.
inline std::vector<HvdExtNormsTensor> TensorsOf(const Problem& problem, const char* x) {
  const int64_t width = static_cast<int64_t>(Width(problem.dtype));
  std::vector<HvdExtNormsTensor> tensors;
  for (const HvdExtTopKSegment& segment : problem.segments) {
    tensors.push_back({x + segment.begin * width, segment.elements});
  }
  return tensors;
}

// Throws where the sums do not have the expected bits. Every NaN is as good as another.
inline void MustBe(const Problem& problem, const std::vector<double>& seen, const std::vector<double>& expected) {
  for (size_t t = 0; t < expected.size(); ++t) {
    if (seen[t] == expected[t] || (std::isnan(seen[t]) && std::isnan(expected[t]))) continue;
    std::ostringstream text;
    text.precision(17);
    text << "norms, " << problem.name << " (dtype " << static_cast<int>(problem.dtype) << "): tensor " << t << " of "
         << expected.size() << ", " << problem.segments[t].elements << " elements: " << seen[t] << ", must be "
         << expected[t];
    throw std::runtime_error(text.str());
  }
}

}  // namespace hvd_ext::gpu_test

// Inputs on which a selection can go wrong, and the right answers, by a stable sort by key. They serve the emulated
// kernels and those on a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/reduce.h"
#include "kernels/topk_gpu.h"

namespace hvd_ext::gpu_test {

inline size_t Width(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }
inline uint64_t KeyMask(DType dtype) { return ~uint64_t{0} >> (65 - 8 * Width(dtype)); }
inline uint64_t Infinity(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return uint64_t{0x7ff} << 52;
    case DType::kFloat32:
      return 0x7f800000;
    case DType::kFloat16:
      return 0x7c00;
    default:
      return 0x7f80;
  }
}

struct Problem {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<uint64_t> bits;  // of x, one number for each element
  int64_t shift = 0;           // x begins so many elements behind an aligned address
  std::vector<HvdExtTopKSegment> segments;
  bool wide = false;

  int64_t picks() const {
    int64_t sum = 0;
    for (const HvdExtTopKSegment& segment : segments) sum += segment.k;
    return sum;
  }
};

struct Answer {
  std::vector<int64_t> indices;
  std::vector<uint64_t> values;  // bits
  bool non_finite = false;
};

// x as memory of the problem's dtype.
inline std::vector<char> Packed(const Problem& problem) {
  const size_t width = Width(problem.dtype);
  std::vector<char> memory(problem.bits.size() * width);
  for (size_t i = 0; i < problem.bits.size(); ++i) std::memcpy(&memory[i * width], &problem.bits[i], width);
  return memory;
}

// The contract of kernels/topk.h.
inline Answer Expected(const Problem& problem) {
  Answer answer;
  const uint64_t mask = KeyMask(problem.dtype);
  for (const HvdExtTopKSegment& segment : problem.segments) {
    std::vector<int64_t> order(segment.elements);
    std::iota(order.begin(), order.end(), segment.begin);
    for (int64_t i : order) answer.non_finite |= (problem.bits[i] & mask) >= Infinity(problem.dtype);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return (problem.bits[a] & mask) > (problem.bits[b] & mask); });
    order.resize(segment.k);
    std::sort(order.begin(), order.end());
    answer.indices.insert(answer.indices.end(), order.begin(), order.end());
    for (int64_t i : order) answer.values.push_back(problem.bits[i]);
  }
  return answer;
}

// Throws where the answer is not the expected one.
inline void MustBe(const Problem& problem, const Answer& seen, const Answer& expected) {
  std::ostringstream text;
  text << problem.name << " (dtype " << static_cast<int>(problem.dtype) << ", " << problem.bits.size()
       << " elements, shift " << problem.shift << ", " << problem.segments.size() << " segments): ";
  for (size_t p = 0; p < expected.indices.size(); ++p) {
    if (seen.indices[p] != expected.indices[p] || seen.values[p] != expected.values[p]) {
      text << "pick " << p << " of " << expected.indices.size() << " is x[" << seen.indices[p] << "] = " << std::hex
           << seen.values[p] << std::dec << ", must be x[" << expected.indices[p] << "] = " << std::hex
           << expected.values[p];
      throw std::runtime_error(text.str());
    }
  }
  if (seen.non_finite != expected.non_finite) {
    text << "non_finite is " << seen.non_finite << ", must be " << expected.non_finite;
    throw std::runtime_error(text.str());
  }
}

inline uint64_t BitsOf(double value, DType dtype) {
  if (dtype == DType::kFloat64) {
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    return bits;
  }
  const float narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  // float16 gets the pattern of bfloat16: only the key counts, so any bit pattern is as good as another.
  return dtype == DType::kFloat32 ? bits : bits >> 16;
}

constexpr int kKinds = 19;

// One of the inputs; `kind` is a number below kKinds.
inline Problem MakeProblem(int kind, DType dtype, int64_t elements, int64_t k, uint64_t seed) {
  Problem problem;
  problem.dtype = dtype;
  problem.segments = {{0, elements, k}};
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const double d = static_cast<double>(std::max<int64_t>(elements, 1));
  const uint64_t sign = KeyMask(dtype) + 1, infinity = Infinity(dtype);
  const auto fill = [&](const char* name, const std::function<double(int64_t)>& value) {
    problem.name = name;
    for (int64_t i = 0; i < elements; ++i) problem.bits.push_back(BitsOf(value(i), dtype));
  };
  const auto fill_bits = [&](const char* name, const std::function<uint64_t(int64_t)>& bits) {
    problem.name = name;
    for (int64_t i = 0; i < elements; ++i) problem.bits.push_back(bits(i));
  };
  switch (kind) {
    case 0:
      fill("gauss", [&](int64_t) { return normal(random); });
      break;
    case 1:
      fill("laplace", [&](int64_t) { return std::log(uniform(random) + 1e-30) * (random() % 2 == 0 ? 1 : -1); });
      break;
    case 2:
      fill("cauchy", [&](int64_t) { return std::tan(3.14159 * (uniform(random) - 0.5)); });
      break;
    case 3:
      fill("log-normal", [&](int64_t) { return std::exp(4 * normal(random)); });
      break;
    case 4:
      fill("layers", [&](int64_t i) { return normal(random) * std::exp(std::sin(static_cast<double>(i / 1000))); });
      break;
    case 5:
      fill_bits("zeros of both signs", [&](int64_t) { return random() % 2 * sign; });
      break;
    case 6:
      fill("constant", [](int64_t) { return -0.5; });
      break;
    case 7:
      fill("ties", [&](int64_t) { return static_cast<double>(random() % 5) - 2; });
      break;
    case 8:
      fill("ascending", [](int64_t i) { return static_cast<double>(i); });
      break;
    case 9:
      fill("descending", [&](int64_t i) { return static_cast<double>(elements - i); });
      break;
    case 10:
      fill_bits("denormals", [&](int64_t) { return random() % 128 + random() % 2 * sign; });
      break;
    case 11:
      fill_bits("NaN and infinity", [&](int64_t i) {
        const uint64_t roll = random() % 20;
        return roll == 0 ? infinity + random() % 3 : roll == 1 ? (infinity | sign) : BitsOf(normal(random) + i, dtype);
      });
      break;
    case 12:
      fill_bits("all NaN", [&](int64_t) { return infinity + 1 + random() % 2 * sign; });
      break;
    case 13:
      fill_bits("all -infinity", [&](int64_t) { return infinity | sign; });
      break;
    case 14:
      fill_bits("random bits", [&](int64_t) { return random() & (KeyMask(dtype) | sign); });
      break;
    case 15:
      fill("few are not zero", [&](int64_t) { return random() % 5000 == 0 ? normal(random) : 0.0; });
      break;
    case 16:
      fill("the tail only", [&](int64_t i) { return i >= elements - 37 ? normal(random) : 0.0; });
      break;
    case 17:
      fill("one hot run", [&](int64_t i) { return (i > d * 0.4 && i < d * 0.45 ? 100 : 1) * normal(random); });
      break;
    default:
      fill("a hot element in each line", [&](int64_t i) { return (i % 16 == 3 ? 8 : 1) * normal(random); });
      break;
  }
  return problem;
}

// Segments of many lengths side by side, with gaps, over the elements of one problem.
inline Problem ManySegments(int kind, DType dtype, const std::vector<int64_t>& lengths, uint64_t seed) {
  std::mt19937_64 random(seed);
  int64_t end = 3;
  std::vector<HvdExtTopKSegment> segments;
  for (int64_t length : lengths) {
    const int64_t parts[] = {0, 1, length / 100, length / 5, length};
    segments.push_back({end, length, std::min(length, parts[random() % 5])});
    end += length + static_cast<int64_t>(random() % 3);
  }
  Problem problem = MakeProblem(kind, dtype, end + 2, 0, seed);
  problem.name += ", many segments";
  problem.segments = segments;
  return problem;
}

}  // namespace hvd_ext::gpu_test

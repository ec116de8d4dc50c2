// What to select from, and the right answers, by a stable sort by key. They serve the emulated kernels and those on a
// GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/reduce.h"
#include "kernels/topk_gpu.h"
#include "selection_inputs.h"

namespace hvd_ext::gpu_test {

using test::Width;

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

inline test::Drawing FormatOf(DType dtype) { return {dtype, 0, {}}; }

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

// What a call has written to memory, on a device or not.
inline Answer AnswerIn(const Problem& problem, const char* indices, const char* values, const char* non_finite) {
  const size_t width = Width(problem.dtype), index_width = problem.wide ? 8 : 4;
  Answer answer;
  for (int64_t p = 0; p < problem.picks(); ++p) {
    int64_t index = 0;
    uint64_t bits = 0;
    std::memcpy(&index, indices + p * index_width, index_width);
    std::memcpy(&bits, values + p * width, width);
    answer.indices.push_back(index);
    answer.values.push_back(bits);
  }
  int32_t flag = 0;
  std::memcpy(&flag, non_finite, sizeof flag);
  answer.non_finite = flag != 0;
  return answer;
}

// The contract of kernels/topk.h.
inline Answer Expected(const Problem& problem) {
  Answer answer;
  const test::Drawing format = FormatOf(problem.dtype);
  const uint64_t mask = format.mask(), infinity = format.infinity();
  for (const HvdExtTopKSegment& segment : problem.segments) {
    std::vector<int64_t> order(segment.elements);
    std::iota(order.begin(), order.end(), segment.begin);
    for (int64_t i : order) answer.non_finite |= (problem.bits[i] & mask) >= infinity;
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

// The input of this name.
inline Problem MakeProblem(const std::string& name, DType dtype, int64_t elements, int64_t k, uint64_t seed) {
  Problem problem;
  problem.name = name;
  problem.dtype = dtype;
  problem.segments = {{0, elements, k}};
  for (const test::SelectionInput& input : test::SelectionInputs()) {
    if (name == input.name) problem.bits = test::ElementsOf<uint64_t>(input, dtype, elements, seed);
  }
  return problem;
}

// Segments of many lengths side by side, with gaps, over the elements of one problem.
inline Problem ManySegments(const std::string& name, DType dtype, const std::vector<int64_t>& lengths, uint64_t seed) {
  std::mt19937_64 random(seed);
  int64_t end = 3;
  std::vector<HvdExtTopKSegment> segments;
  for (int64_t length : lengths) {
    const int64_t parts[] = {0, 1, length / 100, length / 5, length};
    segments.push_back({end, length, std::min(length, parts[random() % 5])});
    end += length + static_cast<int64_t>(random() % 3);
  }
  Problem problem = MakeProblem(name, dtype, end + 2, 0, seed);
  problem.name += ", many segments";
  problem.segments = segments;
  return problem;
}

}  // namespace hvd_ext::gpu_test

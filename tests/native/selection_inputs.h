// Inputs on which a selection can go wrong, as bits of any dtype of floating point. They serve the kernels for
// processors and those for GPUs, emulated and real.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext::test {

// Of an element, in bytes. SizeOf of kernels/reduce.h is not linked into programs for GPUs.
inline size_t Width(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// What the elements of an input are made of. The distributions are our own, so that the numbers are the same with every
// standard library.
struct Drawing {
  DType dtype;
  int64_t elements;
  std::mt19937_64 random;

  double uniform() { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; }
  double gauss() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
  uint64_t sign() { return (random() & 1) << (8 * Width(dtype) - 1); }
  int exponent_bit() const {  // the lowest bit of the exponent
    return dtype == DType::kFloat64 ? 52 : dtype == DType::kFloat32 ? 23 : dtype == DType::kFloat16 ? 10 : 7;
  }
  uint64_t mask() const { return ~uint64_t{0} >> (65 - 8 * Width(dtype)); }  // of a magnitude
  uint64_t infinity() const { return mask() >> exponent_bit() << exponent_bit(); }

  uint64_t of(double value) const {
    const float narrow = static_cast<float>(value);
    if (dtype == DType::kFloat16) return ToFloat16(narrow).bits;
    if (dtype == DType::kBFloat16) return ToBFloat16(narrow).bits;
    if (dtype == DType::kFloat32) return BitsOf(narrow);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
};

struct SelectionInput {
  const char* name;
  uint64_t (*element)(Drawing& draw, int64_t i);
};

inline const std::vector<SelectionInput>& SelectionInputs() {
  using D = Drawing;
  static const std::vector<SelectionInput> inputs = {
      {"gauss", [](D& d, int64_t) { return d.of(d.gauss()); }},
      {"laplace", [](D& d, int64_t) { return d.of((d.random() & 1 ? 1 : -1) * std::log(d.uniform())); }},
      {"cauchy", [](D& d, int64_t) { return d.of(std::tan(3.14159 * (d.uniform() - 0.5))); }},
      {"log-normal", [](D& d, int64_t) { return d.of(std::exp(4 * d.gauss())); }},
      {"layers", [](D& d, int64_t i) { return d.of(d.gauss() * std::pow(10, -double(i * 7 / (d.elements + 1)))); }},
      {"zeros", [](D&, int64_t) { return uint64_t{0}; }},
      {"zeros of both signs", [](D& d, int64_t) { return d.sign(); }},
      {"constant", [](D& d, int64_t) { return d.of(0.75) | d.sign(); }},
      {"ties", [](D& d, int64_t) { return d.of(static_cast<double>(d.random() % 4)) | d.sign(); }},
      {"ascending", [](D& d, int64_t i) { return d.of(static_cast<double>(i) / 7); }},
      {"descending", [](D& d, int64_t i) { return d.of(static_cast<double>(d.elements - i) / 7); }},
      {"denormals", [](D& d, int64_t) { return d.random() % (uint64_t{1} << (d.exponent_bit() - 1)) | d.sign(); }},
      {"NaN and infinity",
       [](D& d, int64_t) {
         const uint64_t kind = d.random() % 8;
         return kind < 3 ? (d.infinity() + kind) | d.sign() : d.of(d.gauss());
       }},
      {"all NaN", [](D& d, int64_t) { return (d.infinity() + 1 + d.random() % 3) | d.sign(); }},
      {"all -infinity", [](D& d, int64_t) { return d.infinity() | (d.mask() + 1); }},
      {"random bits", [](D& d, int64_t) { return (d.random() & d.mask()) | d.sign(); }},
      {"few are not zero", [](D& d, int64_t) { return d.random() % 1000 == 0 ? d.of(d.gauss()) : uint64_t{0}; }},
      {"the tail", [](D& d, int64_t i) { return d.of((i * 20 > d.elements * 19 ? 1 : 1e-3) * d.gauss()); }},
      {"a hot run",
       [](D& d, int64_t i) {
         return d.of(i * 2 > d.elements && i * 50 < d.elements * 26 ? 100 + d.gauss() : d.gauss());
       }},
      {"an outlier", [](D& d, int64_t i) { return d.of(i * 2 == d.elements || d.elements == 1 ? 6e4 : d.gauss()); }},
      {"a hot element in each line", [](D& d, int64_t i) { return d.of((i % 16 == 3 ? 8 : 1) * d.gauss()); }}};
  return inputs;
}

template <typename Bits>
std::vector<Bits> ElementsOf(const SelectionInput& input, DType dtype, int64_t elements, uint64_t seed) {
  Drawing draw{dtype, elements, std::mt19937_64(seed)};
  std::vector<Bits> bits;
  for (int64_t i = 0; i < elements; ++i) bits.push_back(static_cast<Bits>(input.element(draw, i)));
  return bits;
}

}  // namespace hvd_ext::test

// Conversions between float32 and the bits of float16 (IEEE binary16) and bfloat16. They have no branches, so that
// loops over them vectorise. They are also right in threads that flush denormal floats to zero, such as TensorFlow's.
#pragma once

#include <cstdint>
#include <cstring>

// Of functions that kernels for GPUs call too.
#ifdef __CUDACC__
#define HVD_EXT_ANYWHERE __host__ __device__
#else
#define HVD_EXT_ANYWHERE
#endif

namespace hvd_ext {

HVD_EXT_ANYWHERE inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HVD_EXT_ANYWHERE inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// condition ? a : b, in a form that the compiler does not turn into a branch, which would keep a loop from vectorising.
HVD_EXT_ANYWHERE inline uint32_t Select(bool condition, uint32_t a, uint32_t b) {
  uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

HVD_EXT_ANYWHERE inline float ToFloat(BFloat16 x) { return FloatOf(uint32_t{x.bits} << 16); }

HVD_EXT_ANYWHERE inline float ToFloat(Float16 x) {
  const uint32_t rebias = (127u - 15u) << 23;
  uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  uint32_t exponent = magnitude & (0x1fu << 23);
  uint32_t normal = magnitude + rebias;
  uint32_t special = normal + ((255u - 31u - 112u) << 23);  // infinity and NaN keep the greatest exponent
  // A denormal half m * 2^-24 is (2^-14 + m * 2^-24) - 2^-14, which float32 holds exactly.
  uint32_t denormal = BitsOf(FloatOf(magnitude + rebias + (1u << 23)) - FloatOf(rebias + (1u << 23)));
  uint32_t bits = Select(exponent == 0, denormal, normal);
  bits = Select(exponent == (0x1fu << 23), special, bits);
  return FloatOf(bits | (x.bits & 0x8000u) << 16);
}

// Both conversions round to nearest, ties to even. A value that is too large becomes infinity, and a NaN becomes a
// quiet NaN of the same sign.
HVD_EXT_ANYWHERE inline BFloat16 ToBFloat16(float value) {
  uint32_t bits = BitsOf(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
  return {static_cast<uint16_t>(Select((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded))};
}

HVD_EXT_ANYWHERE inline Float16 ToFloat16(float value) {
  uint32_t sign = BitsOf(value) & 0x80000000u;
  uint32_t magnitude = BitsOf(value) ^ sign;
  // The addition does the rounding: the last bit of a float32 near 0.5 is 2^-24, which is the unit of denormal halves.
  const float half = 0.5f;
  uint32_t denormal = BitsOf(FloatOf(magnitude) + half) - BitsOf(half);
  uint32_t odd = (magnitude >> 13) & 1u;
  uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  uint32_t special = Select(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);
  uint32_t bits = Select(magnitude < ((127u - 14u) << 23), denormal, normal);
  bits = Select(magnitude >= ((127u + 16u) << 23), special, bits);
  return {static_cast<uint16_t>(bits | sign >> 16)};
}

// The value of an element of any dtype of floating point, which float64 holds exactly.
HVD_EXT_ANYWHERE inline double Wide(float x) { return x; }
HVD_EXT_ANYWHERE inline double Wide(double x) { return x; }
HVD_EXT_ANYWHERE inline double Wide(Float16 x) { return ToFloat(x); }
HVD_EXT_ANYWHERE inline double Wide(BFloat16 x) { return ToFloat(x); }

HVD_EXT_ANYWHERE inline void FromFloat(float value, Float16* x) { *x = ToFloat16(value); }
HVD_EXT_ANYWHERE inline void FromFloat(float value, BFloat16* x) { *x = ToBFloat16(value); }

}  // namespace hvd_ext

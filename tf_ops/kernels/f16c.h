// Loads and stores of eight float16 at once, for processors that have instructions for the conversion (F16C). They
// round as half.h does: to nearest, ties to even. They keep denormals even in threads that flush denormal floats to
// zero.
#pragma once

#include <cstdint>

#include "kernels/half.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define HVD_EXT_F16C __attribute__((target("avx2,f16c")))

namespace hvd_ext {

// Asks cpuid, because older compilers do not know "f16c" in __builtin_cpu_supports. The check of avx2 also says that
// the operating system saves the wide registers.
inline bool HasF16C() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

inline const bool kF16C = HasF16C();

HVD_EXT_F16C inline __m256 Load8(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

HVD_EXT_F16C inline void Store8(Float16* to, __m256 values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace hvd_ext
#endif

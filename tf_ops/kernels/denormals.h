// TensorFlow's threads flush denormal floats to zero. All ranks must add up the same bits, whatever thread does so, and
// a residual must not lose small values.
#pragma once

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hvd_ext {

// Keeps denormal floats on this thread while it lives, and then restores what the thread did before. Has no effect on
// processors other than x86.
class WithDenormals {
 public:
#if defined(__SSE__) || defined(__x86_64__)
  WithDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }  // results, and operands
  ~WithDenormals() { _mm_setcsr(before_); }
#else
  WithDenormals() {}
#endif
  WithDenormals(const WithDenormals&) = delete;
  WithDenormals& operator=(const WithDenormals&) = delete;

#if defined(__SSE__) || defined(__x86_64__)
 private:
  const unsigned before_;
#endif
};

}  // namespace hvd_ext

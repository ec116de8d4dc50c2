// Threads of TensorFlow flush denormal floats to zero. All ranks must add up the same, and some sums lose nothing.
#pragma once

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hvd_ext {

// Denormal floats count on this thread while it lives; then the thread does as before. Other processors than x86 do as
// they do.
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

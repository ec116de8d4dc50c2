// TensorFlow's threads flush denormal floats to zero. But a sum must have the same bits on all ranks, whichever thread
// computes it, and a residual must not lose small values.
#pragma once

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hvd_ext {

// While an object of this class lives, its thread computes with denormal floats. The destructor restores the mode that
// the thread had before. The class has no effect on processors other than x86.
class WithDenormals {
 public:
#if defined(__SSE__) || defined(__x86_64__)
  WithDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }  // FTZ (results) and DAZ (operands)
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

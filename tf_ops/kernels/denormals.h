// TensorFlow's threads flush denormal floats to zero. But a sum must have the same bits on all ranks, whichever thread
// computes it, and a residual must not lose small values.
#pragma once

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hvd_ext {

// While an object of this class lives, its thread computes with denormal floats, or flushes them to zero. The
// destructor restores the mode that the thread had before. The class has no effect on processors other than x86.
template <bool kFlushed>
class DenormalsOf {
 public:
#if defined(__SSE__) || defined(__x86_64__)
  DenormalsOf() : before_(_mm_getcsr()) { _mm_setcsr(kFlushed ? before_ | kFlags : before_ & ~kFlags); }
  ~DenormalsOf() { _mm_setcsr(before_); }
#else
  DenormalsOf() {}
#endif
  DenormalsOf(const DenormalsOf&) = delete;
  DenormalsOf& operator=(const DenormalsOf&) = delete;

#if defined(__SSE__) || defined(__x86_64__)
 private:
  static constexpr unsigned kFlags = 0x8040;  // FTZ (results) and DAZ (operands)
  const unsigned before_;
#endif
};

using WithDenormals = DenormalsOf<false>;
using WithoutDenormals = DenormalsOf<true>;

}  // namespace hvd_ext

// Loops that the compiler vectorises, compiled for several instruction sets, since the build targets any x86-64. The
// version is chosen by hand, because the compiler's function multiversioning (ifunc) is resolved too early for the
// sanitizers.
#pragma once

#include <cstdint>

#define HVD_EXT_ALWAYS __attribute__((always_inline)) inline

#if defined(__x86_64__)
#define HVD_EXT_AVX2 __attribute__((target("avx2")))
#define HVD_EXT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#else
#define HVD_EXT_AVX2
#define HVD_EXT_AVX512
#endif

namespace hvd_ext {

// kLoop, which must be inlined always, for each of the instruction sets.
template <auto kLoop, typename... Arguments>
HVD_EXT_AVX2 auto ForAvx2(Arguments... arguments) {
  return kLoop(arguments...);
}
template <auto kLoop, typename... Arguments>
HVD_EXT_AVX512 auto ForAvx512(Arguments... arguments) {
  return kLoop(arguments...);
}

#if defined(__x86_64__)
inline const bool kWide = __builtin_cpu_supports("avx2");
#else
inline const bool kWide = false;
#endif

// Calls kLoop, for AVX2 where the processor has it.
template <auto kLoop, typename... Arguments>
auto Widely(Arguments... arguments) {
  return kWide ? ForAvx2<kLoop>(arguments...) : kLoop(arguments...);
}

// Prefetches the cache line `nbytes` behind p, which may lie beyond the end of an array: a prefetch of memory that is
// not mapped does nothing.
template <typename T>
HVD_EXT_ALWAYS void Ask(const T* p, int64_t nbytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(nbytes)));
}

}  // namespace hvd_ext

// Operations on a register, for the AVX-512 loops of the selection.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "kernels/topk_scan.h"

// The target applies to the rest of this file. The ignored warnings are the compiler's own about its headers, which use
// undefined registers on purpose.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace hvd_ext::topk {
namespace {

template <typename T>
inline void Ask(const T* p, int64_t ahead = kAhead) {
  _mm_prefetch(reinterpret_cast<const char*>(p) + ahead, _MM_HINT_T0);
}

// Compares the 32 elements at p: bit i of the result says whether the key of p[i] is >= bound.
template <typename Bits>
struct Comparer;

template <>
struct Comparer<uint32_t> {
  __m512i magnitude, bound;
  explicit Comparer(uint32_t b)
      : magnitude(_mm512_set1_epi32(0x7fffffff)), bound(_mm512_set1_epi32(static_cast<int>(b))) {}
  __mmask16 Hits(__m512i bits) const { return _mm512_cmpge_epu32_mask(_mm512_and_si512(bits, magnitude), bound); }
  __mmask32 operator()(const uint32_t* p) const {
    Ask(p);
    Ask(p + 16);
    return _mm512_kunpackw(Hits(_mm512_loadu_si512(p + 16)), Hits(_mm512_loadu_si512(p)));
  }
};

template <>
struct Comparer<uint16_t> {
  __m512i magnitude, bound;
  explicit Comparer(uint16_t b)
      : magnitude(_mm512_set1_epi16(0x7fff)), bound(_mm512_set1_epi16(static_cast<int16_t>(b))) {}
  __mmask32 operator()(const uint16_t* p) const {
    Ask(p);
    return _mm512_cmpge_epu16_mask(_mm512_and_si512(_mm512_loadu_si512(p), magnitude), bound);
  }
};

template <>
struct Comparer<uint64_t> {
  __m512i magnitude, bound;
  explicit Comparer(uint64_t b)
      : magnitude(_mm512_set1_epi64(0x7fffffffffffffff)), bound(_mm512_set1_epi64(static_cast<int64_t>(b))) {}
  uint32_t Hits(const uint64_t* p) const {
    Ask(p);
    return _mm512_cmpge_epu64_mask(_mm512_and_si512(_mm512_loadu_si512(p), magnitude), bound);
  }
  __mmask32 operator()(const uint64_t* p) const {
    return Hits(p) | Hits(p + 8) << 8 | Hits(p + 16) << 16 | Hits(p + 24) << 24;
  }
};

inline __m512i FirstIds() {
  alignas(64) static const uint16_t ids[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                               16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  return _mm512_load_si512(ids);
}

// Appends those of the 32 ids that are marked in `hits`. The whole register is stored, because a compressing store is
// slow on some processors.
inline int64_t PutIds(uint16_t* ids, int64_t count, __m512i thirty_two, __mmask32 hits) {
  _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi16(hits, thirty_two));
  return count + __builtin_popcount(hits);
}

// Keeps only the first *ties of the marked ties, and reduces *ties by their number.
inline uint32_t FirstTies(uint32_t marked, int64_t* ties) {
  const int64_t all = __builtin_popcount(marked);
  if (all <= *ties) {
    *ties -= all;
    return marked;
  }
  const uint32_t first = _pdep_u32((uint32_t{1} << *ties) - 1, marked);
  *ties = 0;
  return first;
}

inline __mmask16 UpTo(int64_t lanes) { return static_cast<__mmask16>((uint32_t{1} << lanes) - 1); }

// Stores the first `count` of 16 (8) elements, and never writes more than `room` elements.
inline void StoreInts(int32_t* to, __m512i x, int64_t count, int64_t room) {
  if (room >= 16) return _mm512_storeu_si512(to, x);
  _mm512_mask_storeu_epi32(to, UpTo(count), x);
}

inline void StoreLongs(int64_t* to, __m512i x, int64_t count, int64_t room) {
  if (room >= 8) return _mm512_storeu_si512(to, x);
  _mm512_mask_storeu_epi64(to, static_cast<__mmask8>(UpTo(count)), x);
}

inline void StoreShorts(uint16_t* to, __m256i x, int64_t count, int64_t room) {
  if (room >= 16) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  _mm256_mask_storeu_epi16(to, UpTo(count), x);
}

}  // namespace
}  // namespace hvd_ext::topk

#pragma GCC pop_options
#endif

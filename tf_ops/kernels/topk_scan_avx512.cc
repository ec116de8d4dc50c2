// The loops of the selection for processors with AVX-512 and VBMI2 (Ice Lake, Zen 4 and later). No branch depends on
// the data: a comparison of 32 elements gives a mask, and the mask compresses a register of 16-bit ids.
#include <algorithm>

#include "kernels/half.h"
#include "kernels/topk_scan.h"

#if defined(__x86_64__)
#include <immintrin.h>

// The ignored warnings are the compiler's own about its headers, which use undefined registers on purpose.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace hvd_ext::topk {
namespace {

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
    Ask(p, kAhead);
    Ask(p + 16, kAhead);
    return _mm512_kunpackw(Hits(_mm512_loadu_si512(p + 16)), Hits(_mm512_loadu_si512(p)));
  }
};

template <>
struct Comparer<uint16_t> {
  __m512i magnitude, bound;
  explicit Comparer(uint16_t b)
      : magnitude(_mm512_set1_epi16(0x7fff)), bound(_mm512_set1_epi16(static_cast<int16_t>(b))) {}
  __mmask32 operator()(const uint16_t* p) const {
    Ask(p, kAhead);
    return _mm512_cmpge_epu16_mask(_mm512_and_si512(_mm512_loadu_si512(p), magnitude), bound);
  }
};

template <>
struct Comparer<uint64_t> {
  __m512i magnitude, bound;
  explicit Comparer(uint64_t b)
      : magnitude(_mm512_set1_epi64(0x7fffffffffffffff)), bound(_mm512_set1_epi64(static_cast<int64_t>(b))) {}
  uint32_t Hits(const uint64_t* p) const {
    Ask(p, kAhead);
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

inline __mmask16 UpTo(int64_t lanes) { return static_cast<__mmask16>((uint32_t{1} << lanes) - 1); }

// Sixteen words of 2 or 4 bytes, as 32 bits each.
template <typename Word>
inline __m512i LoadWords(const Word* p) {
  if constexpr (sizeof(Word) == 4) return _mm512_loadu_si512(p);
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Stores the first `count` of 16 words (8 longs), and never writes more than `room`.
template <typename Word>
inline void StoreWords(Word* to, __m512i x, int64_t count, int64_t room) {
  if constexpr (sizeof(Word) == 4) {
    if (room >= 16) return _mm512_storeu_si512(to, x);
    _mm512_mask_storeu_epi32(to, UpTo(count), x);
  } else {
    const __m256i words = _mm512_cvtepi32_epi16(x);
    if (room >= 16) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
    _mm256_mask_storeu_epi16(to, UpTo(count), words);
  }
}

inline void StoreLongs(int64_t* to, __m512i x, int64_t count, int64_t room) {
  if (room >= 8) return _mm512_storeu_si512(to, x);
  _mm512_mask_storeu_epi64(to, static_cast<__mmask8>(UpTo(count)), x);
}

// For topk_vector_loops.h.
using Floats = __m512;
constexpr int64_t kLanes = 16;
inline Floats LoadFloats(const float* p) { return _mm512_loadu_ps(p); }
inline void StoreFloats(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats AllFloats(float x) { return _mm512_set1_ps(x); }

// Stores the first `count` of 16 elements. They are seldom more than 4, and whole registers would often cross a cache
// line.
inline void PutFew(uint32_t* to, __m512i x, int64_t count) {
  if (count > 4) return _mm512_storeu_si512(to, x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(x));
}

template <typename Places>
inline int64_t Part(const Comparer<uint32_t>& hits, Floats a, float* kept, Places places, Candidates<uint32_t> to,
                    int64_t count) {
  const __m512i bits = _mm512_castps_si512(a);
  const __mmask16 found = hits.Hits(bits);
  StoreFloats(kept, _mm512_maskz_mov_ps(_knot_mask16(found), a));
  const int64_t more = __builtin_popcount(found);
  PutFew(to.bits + count, _mm512_maskz_compress_epi32(found, bits), more);
  PutFew(to.places + count, _mm512_maskz_compress_epi32(found, reinterpret_cast<__m512i>(places)), more);
  return count + more;
}

}  // namespace
}  // namespace hvd_ext::topk

#include "kernels/topk_vector_loops.h"

namespace hvd_ext::topk {
namespace {

template <typename Bits>
int64_t Scan(const Bits* x, int64_t elements, Bits bound, uint16_t* ids) {
  const Comparer<Bits> hits(bound);
  const __m512i step = _mm512_set1_epi16(32);
  __m512i lanes = FirstIds();
  int64_t count = 0, i = 0;
  for (; i + 64 <= elements; i += 64) {
    if (BeginsPage<Bits>(i)) Ask(x + i, kPageAhead);
    const __mmask32 low = hits(x + i), high = hits(x + i + 32);
    const __m512i upper = _mm512_add_epi16(lanes, step);
    count = PutIds(ids, count, lanes, low);
    count = PutIds(ids, count, upper, high);
    lanes = _mm512_add_epi16(upper, step);
  }
  return ScanRest(x, i, elements, bound, ids, count);
}

template <typename Bits>
void Append(const Bits* x, uint16_t* ids, int64_t count, uint32_t place, Candidates<Bits> to) {
  const __m512i base = _mm512_set1_epi32(static_cast<int>(place));
  _mm512_storeu_si512(ids + count, _mm512_setzero_si512());  // the loop reads 16 ids at once: past the end they are 0
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i id = LoadWords(ids + i);
    _mm512_storeu_si512(to.places + i, _mm512_add_epi32(id, base));
    for (int64_t j = i; j < i + 16; ++j) to.bits[j] = x[ids[j]];
  }
}

int64_t Between32(const uint32_t* bits, int64_t count, uint32_t low, uint32_t high, uint32_t* to, int64_t* above) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i lows = _mm512_set1_epi32(static_cast<int>(low)), highs = _mm512_set1_epi32(static_cast<int>(high));
  int64_t i = 0, found = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512i keys = _mm512_and_si512(_mm512_loadu_si512(bits + i), magnitude);
    const __mmask16 over = _mm512_cmpge_epu32_mask(keys, highs);
    const __mmask16 hits = _mm512_mask_cmpge_epu32_mask(_knot_mask16(over), keys, lows);
    _mm512_storeu_si512(to + found, _mm512_maskz_compress_epi32(hits, keys));
    found += __builtin_popcount(hits);
    *above += __builtin_popcount(over);
  }
  return BetweenRest(bits, i, count, low, high, to, found, above);
}

int64_t Between16(const uint16_t* bits, int64_t count, uint16_t low, uint16_t high, uint16_t* to, int64_t* above) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const __m512i lows = _mm512_set1_epi16(static_cast<int16_t>(low)),
                highs = _mm512_set1_epi16(static_cast<int16_t>(high));
  int64_t i = 0, found = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512i keys = _mm512_and_si512(_mm512_loadu_si512(bits + i), magnitude);
    const __mmask32 over = _mm512_cmpge_epu16_mask(keys, highs);
    found = PutIds(to, found, keys, _mm512_mask_cmpge_epu16_mask(_knot_mask32(over), keys, lows));
    *above += __builtin_popcount(over);
  }
  return BetweenRest(bits, i, count, low, high, to, found, above);
}

// Marks the picks among 16 candidates.
struct Picker {
  __m512i magnitude, bound, greatest;
  uint32_t operator()(__m512i bits, int64_t* ties) {
    const __m512i keys = _mm512_and_si512(bits, magnitude);
    greatest = _mm512_max_epu32(greatest, keys);
    const uint32_t equal = _mm512_cmpeq_epu32_mask(keys, bound);
    const uint32_t picked = _mm512_cmpgt_epu32_mask(keys, bound);
    return equal == 0 ? picked : picked | FirstTies(equal, ties);
  }
  template <typename Bits>
  Bits Greatest(Bits before) const {
    return std::max(before, static_cast<Bits>(_mm512_reduce_max_epu32(greatest)));
  }
};

template <typename Bits>
inline void StoreIndices(Picks<Bits> picks, __m512i places, int64_t base, uint32_t picked, int64_t at, int64_t end) {
  if (!picks.wide) {
    const __m512i indices = _mm512_add_epi32(places, _mm512_set1_epi32(static_cast<int>(base)));
    return StoreWords(static_cast<int32_t*>(picks.indices) + at,
                      _mm512_maskz_compress_epi32(static_cast<__mmask16>(picked), indices), __builtin_popcount(picked),
                      end - at);
  }
  const __m512i bases = _mm512_set1_epi64(base);
  int64_t* to = static_cast<int64_t*>(picks.indices) + at;
  const __m256i halves[2] = {_mm512_castsi512_si256(places), _mm512_extracti64x4_epi64(places, 1)};
  for (int half = 0; half < 2; ++half) {
    const uint32_t mine = (picked >> (8 * half)) & 0xff;
    const __m512i indices = _mm512_add_epi64(_mm512_cvtepu32_epi64(halves[half]), bases);
    const int64_t count = __builtin_popcount(mine);
    StoreLongs(to, _mm512_maskz_compress_epi64(static_cast<__mmask8>(mine), indices), count, end - at);
    to += count;
    at += count;
  }
}

template <typename Bits>
int64_t Emit(Candidates<Bits> from, int64_t count, Bits bound, int64_t* ties, int64_t base, Picks<Bits> picks,
             int64_t at, int64_t end, Bits* greatest) {
  Picker picker{_mm512_set1_epi32(kMagnitude<Bits>), _mm512_set1_epi32(static_cast<int>(bound)),
                _mm512_setzero_si512()};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512i bits = LoadWords(from.bits + i);
    const uint32_t picked = picker(bits, ties);
    StoreIndices(picks, LoadWords(from.places + i), base, picked, at, end);
    const int64_t found = __builtin_popcount(picked);
    if (picks.values != nullptr) {
      StoreWords(picks.values + at, _mm512_maskz_compress_epi32(static_cast<__mmask16>(picked), bits), found, end - at);
    }
    at += found;
  }
  *greatest = picker.Greatest(*greatest);
  return EmitRest(from, i, count, bound, ties, base, picks, at, end, greatest);
}

}  // namespace

#pragma GCC pop_options

extern const Loops<uint16_t> kLoops16Avx512 = {Scan<uint16_t>, Append<uint16_t>, Between16, Emit<uint16_t>};
extern const Loops<uint32_t> kLoops32Avx512 = {Scan<uint32_t>, Append<uint32_t>, Between32, Emit<uint32_t>};
extern const Loops<uint64_t> kLoops64Avx512 = {Scan<uint64_t>, Append<uint64_t>, BetweenEach<uint64_t>,
                                               EmitEach<uint64_t>};
extern const FeedbackLoops kFeedbackAvx512 = {ScanFeedback, AccumulateVectors};

}  // namespace hvd_ext::topk
#endif

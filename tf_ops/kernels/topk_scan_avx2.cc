// The loops of the selection for processors with AVX2, which has no instruction that packs the marked lanes of a
// register: a table gives the numbers of the marked lanes for each mask of eight.
#include <algorithm>

#include "kernels/half.h"
#include "kernels/topk_scan.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,popcnt")

namespace hvd_ext::topk {
namespace {

// For each mask, the numbers of its set bits from the lowest on, one byte each.
struct LaneTable {
  uint64_t lanes[256];
  constexpr LaneTable() : lanes() {
    for (int mask = 0; mask < 256; ++mask) {
      int shift = 0;
      for (uint64_t lane = 0; lane < 8; ++lane) {
        if ((mask >> lane & 1) == 0) continue;
        lanes[mask] |= lane << shift;
        shift += 8;
      }
    }
  }
};
alignas(64) constexpr LaneTable kTable;

inline __m128i Lanes(uint32_t mask) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kTable.lanes[mask])); }

template <typename T>
inline __m256i Load(const T* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

template <typename T>
inline void Store(T* p, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}

inline uint32_t Mask(__m256i lanes) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes))); }

// Compares eight elements: bit i of the result says whether the key of p[i] is >= bound. Keys have no sign bit, so
// signed comparisons order them.
template <typename Bits>
struct Comparer;

template <>
struct Comparer<uint32_t> {
  __m256i magnitude, below;
  explicit Comparer(uint32_t bound)
      : magnitude(_mm256_set1_epi32(0x7fffffff)), below(_mm256_set1_epi32(static_cast<int>(bound - 1))) {}
  __m256i Found(__m256i bits) const { return _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), below); }
  uint32_t Hits(__m256i bits) const { return Mask(Found(bits)); }
  uint32_t operator()(const uint32_t* p) const { return Hits(Load(p)); }
};

template <>
struct Comparer<uint16_t> {
  __m128i magnitude, below;
  explicit Comparer(uint16_t bound)
      : magnitude(_mm_set1_epi16(0x7fff)), below(_mm_set1_epi16(static_cast<int16_t>(bound - 1))) {}
  uint32_t operator()(const uint16_t* p) const {
    const __m128i keys = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), magnitude);
    const __m128i hits = _mm_packs_epi16(_mm_cmpgt_epi16(keys, below), _mm_setzero_si128());
    return static_cast<uint32_t>(_mm_movemask_epi8(hits));
  }
};

template <>
struct Comparer<uint64_t> {
  __m256i magnitude, below;
  explicit Comparer(uint64_t bound)
      : magnitude(_mm256_set1_epi64x(0x7fffffffffffffff)), below(_mm256_set1_epi64x(static_cast<int64_t>(bound - 1))) {}
  uint32_t Four(const uint64_t* p) const {
    const __m256i hits = _mm256_cmpgt_epi64(_mm256_and_si256(Load(p), magnitude), below);
    return static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(hits)));
  }
  uint32_t operator()(const uint64_t* p) const { return Four(p) | Four(p + 4) << 4; }
};

inline __m256i Packed(__m256i x, uint32_t mask) {
  return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(Lanes(mask)));
}

// For topk_vector_loops.h.
using Floats = __m256;
constexpr int64_t kLanes = 8;
inline Floats LoadFloats(const float* p) { return _mm256_loadu_ps(p); }
inline void StoreFloats(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats AllFloats(float x) { return _mm256_set1_ps(x); }

template <typename Places>
inline int64_t Part(const Comparer<uint32_t>& hits, Floats a, float* kept, Places places, Candidates<uint32_t> to,
                    int64_t count) {
  const __m256i bits = _mm256_castps_si256(a), found = hits.Found(bits);
  StoreFloats(kept, _mm256_andnot_ps(_mm256_castsi256_ps(found), a));
  const uint32_t mask = Mask(found);
  Store(to.bits + count, Packed(bits, mask));
  Store(to.places + count, Packed(reinterpret_cast<__m256i>(places), mask));
  return count + __builtin_popcount(mask);
}

}  // namespace
}  // namespace hvd_ext::topk

#include "kernels/topk_vector_loops.h"

namespace hvd_ext::topk {
namespace {

inline int64_t PutIds(uint16_t* ids, int64_t count, __m128i first, uint32_t mask) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(ids + count), _mm_add_epi16(first, _mm_cvtepu8_epi16(Lanes(mask))));
  return count + __builtin_popcount(mask);
}

template <typename Bits>
int64_t Scan(const Bits* x, int64_t elements, Bits bound, uint16_t* ids) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Bits));
  const Comparer<Bits> hits(bound);
  const __m128i step = _mm_set1_epi16(8);
  __m128i first = _mm_setzero_si128();
  int64_t count = 0, i = 0;
  for (; i + 32 <= elements; i += 32) {
    if (BeginsPage<Bits>(i)) Ask(x + i, kPageAhead);
    for (int64_t j = 0; j < 32; j += kLine) Ask(x + i + j, kAhead);
    for (int64_t j = 0; j < 32; j += 8) {
      count = PutIds(ids, count, first, hits(x + i + j));
      first = _mm_add_epi16(first, step);
    }
  }
  return ScanRest(x, i, elements, bound, ids, count);
}

int64_t Between32(const uint32_t* bits, int64_t count, uint32_t low, uint32_t high, uint32_t* to, int64_t* above) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const Comparer<uint32_t> from_low(low), from_high(high);
  int64_t i = 0, found = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i keys = _mm256_and_si256(Load(bits + i), magnitude);
    const uint32_t over = from_high.Hits(keys), mask = from_low.Hits(keys) & ~over;
    Store(to + found, Packed(keys, mask));
    found += __builtin_popcount(mask);
    *above += __builtin_popcount(over);
  }
  return BetweenRest(bits, i, count, low, high, to, found, above);
}

int64_t Emit32(Candidates<uint32_t> from, int64_t count, uint32_t bound, int64_t* ties, int64_t base,
               Picks<uint32_t> picks, int64_t at, int64_t end, uint32_t* greatest) {
  __m256i most = _mm256_setzero_si256();
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), bounds = _mm256_set1_epi32(static_cast<int>(bound));
  int64_t i = 0;
  for (; i + 8 <= count && at + 8 <= end; i += 8) {
    const __m256i bits = Load(from.bits + i), keys = _mm256_and_si256(bits, magnitude);
    most = _mm256_max_epu32(most, keys);
    const __m256i greater = _mm256_cmpgt_epi32(keys, bounds), same = _mm256_cmpeq_epi32(keys, bounds);
    uint32_t mask = Mask(greater);
    const uint32_t equal = Mask(same);
    if (equal != 0) mask |= FirstTies(equal, ties);
    const __m256i places = Packed(Load(from.places + i), mask);
    if (picks.wide) {
      int64_t* to = static_cast<int64_t*>(picks.indices) + at;
      const __m256i bases = _mm256_set1_epi64x(base);
      Store(to, _mm256_add_epi64(_mm256_cvtepu32_epi64(_mm256_castsi256_si128(places)), bases));
      Store(to + 4, _mm256_add_epi64(_mm256_cvtepu32_epi64(_mm256_extracti128_si256(places, 1)), bases));
    } else {
      Store(static_cast<int32_t*>(picks.indices) + at,
            _mm256_add_epi32(places, _mm256_set1_epi32(static_cast<int>(base))));
    }
    if (picks.values != nullptr) Store(picks.values + at, Packed(bits, mask));
    at += __builtin_popcount(mask);
  }
  alignas(32) uint32_t lanes[8];
  Store(lanes, most);
  *greatest = std::max(*greatest, *std::max_element(lanes, lanes + 8));
  return EmitRest(from, i, count, bound, ties, base, picks, at, end, greatest);
}

}  // namespace

#pragma GCC pop_options

extern const Loops<uint16_t> kLoops16Avx2 = {Scan<uint16_t>, AppendEach<uint16_t>, BetweenEach<uint16_t>,
                                             EmitEach<uint16_t>};
extern const Loops<uint32_t> kLoops32Avx2 = {Scan<uint32_t>, AppendEach<uint32_t>, Between32, Emit32};
extern const Loops<uint64_t> kLoops64Avx2 = {Scan<uint64_t>, AppendEach<uint64_t>, BetweenEach<uint64_t>,
                                             EmitEach<uint64_t>};
extern const FeedbackLoops kFeedbackAvx2 = {ScanFeedback, AccumulateVectors};

}  // namespace hvd_ext::topk
#endif

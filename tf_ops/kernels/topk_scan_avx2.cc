// The loops of the selection for processors with AVX2, which has no instruction that packs the marked lanes of a
// register: a table gives the numbers of the marked lanes for each mask of eight.
#include <algorithm>

#include "kernels/topk_loops.h"

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

template <typename T>
inline void Ask(const T* p, int64_t ahead = kAhead) {
  _mm_prefetch(reinterpret_cast<const char*>(p) + ahead, _MM_HINT_T0);
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
    for (int64_t j = 0; j < 32; j += kLine) Ask(x + i + j);
    for (int64_t j = 0; j < 32; j += 8) {
      count = PutIds(ids, count, first, hits(x + i + j));
      first = _mm_add_epi16(first, step);
    }
  }
  return ScanRest(x, i, elements, bound, ids, count);
}

template <typename Bits>
void Append(const Bits* x, uint16_t* ids, int64_t count, uint32_t place, Candidates<Bits> to) {
  AppendRest(x, ids, int64_t{0}, count, place, to);
}

inline __m256i Packed(__m256i x, uint32_t mask) {
  return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(Lanes(mask)));
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

template <typename Bits>
int64_t Between(const Bits* bits, int64_t count, Bits low, Bits high, Bits* to, int64_t* above) {
  return BetweenRest(bits, int64_t{0}, count, low, high, to, int64_t{0}, above);
}

// Keeps only the first *ties of the marked ties, and reduces *ties by their number.
inline uint32_t FirstTies(uint32_t marked, int64_t* ties) {
  const int64_t all = __builtin_popcount(marked);
  const int64_t kept = all <= *ties ? all : *ties;
  *ties -= kept;
  return _pdep_u32((uint32_t{1} << kept) - 1, marked);
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

template <typename Bits>
int64_t Emit(Candidates<Bits> from, int64_t count, Bits bound, int64_t* ties, int64_t base, Picks<Bits> picks,
             int64_t at, int64_t end, Bits* greatest) {
  return EmitRest(from, int64_t{0}, count, bound, ties, base, picks, at, end, greatest);
}

// Returns `a` of eight elements and stores the next velocity. kKind: 0 no velocity, 1 momentum, 2 Nesterov.
template <int kKind>
inline __m256 Eight(const ErrorFeedback& f, int64_t i, __m256 momentum) {
  const __m256 gradient = _mm256_loadu_ps(f.gradient + i), residual = _mm256_loadu_ps(f.residual + i);
  if constexpr (kKind == 0) return _mm256_add_ps(residual, gradient);
  const __m256 velocity = _mm256_add_ps(_mm256_mul_ps(momentum, _mm256_loadu_ps(f.velocity + i)), gradient);
  _mm256_storeu_ps(f.next_velocity + i, velocity);
  if constexpr (kKind == 1) return _mm256_add_ps(residual, velocity);
  return _mm256_add_ps(residual, _mm256_add_ps(gradient, _mm256_mul_ps(momentum, velocity)));
}

template <int kKind>
inline void AskPages(const ErrorFeedback& f, int64_t i) {
  if (!BeginsPage<float>(i)) return;
  Ask(f.gradient + i, kPageAhead);
  Ask(f.residual + i, kPageAhead);
  if constexpr (kKind != 0) Ask(f.velocity + i, kPageAhead);
}

template <int kKind>
int64_t ScanFeedback(const ErrorFeedback& feedback, int64_t elements, uint32_t bound, uint32_t place,
                     Candidates<uint32_t> to) {
  const ErrorFeedback f = feedback;  // a copy that no store can alias: its pointers stay in registers
  const Comparer<uint32_t> hits(bound);
  const __m256 momentum = _mm256_set1_ps(f.correction.momentum);
  const __m256i step = _mm256_set1_epi32(8);
  __m256i places =
      _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(static_cast<int>(place)));
  int64_t count = 0, i = 0;
  for (; i + 16 <= elements; i += 16) {
    AskPages<kKind>(f, i);
    for (int64_t j = i; j < i + 16; j += 8) {
      const __m256 a = Eight<kKind>(f, j, momentum);
      const __m256i bits = _mm256_castps_si256(a), found = hits.Found(bits);
      _mm256_storeu_ps(f.next_residual + j, _mm256_andnot_ps(_mm256_castsi256_ps(found), a));
      const uint32_t mask = Mask(found);
      Store(to.bits + count, Packed(bits, mask));
      Store(to.places + count, Packed(places, mask));
      count += __builtin_popcount(mask);
      places = _mm256_add_epi32(places, step);
    }
  }
  return FeedbackRest(f, i, elements, bound, place, to, count);
}

int64_t ScanFeedbackOf(const ErrorFeedback& f, int64_t elements, uint32_t bound, uint32_t place,
                       Candidates<uint32_t> to) {
  if (f.velocity == nullptr) return ScanFeedback<0>(f, elements, bound, place, to);
  return f.correction.nesterov ? ScanFeedback<2>(f, elements, bound, place, to)
                               : ScanFeedback<1>(f, elements, bound, place, to);
}

template <int kKind>
void AccumulateAs(const ErrorFeedback& f, int64_t elements, float* accumulated) {
  const __m256 momentum = _mm256_set1_ps(f.correction.momentum);
  int64_t i = 0;
  for (; i + 16 <= elements; i += 16) {
    AskPages<kKind>(f, i);
    for (int64_t j = i; j < i + 16; j += 8) {
      _mm256_storeu_ps(accumulated + j, Eight<kKind>(f, j, momentum));
      _mm256_storeu_ps(f.next_residual + j, _mm256_setzero_ps());
    }
  }
  AccumulateRest(f, i, elements, accumulated);
}

void AccumulateOf(const ErrorFeedback& f, int64_t elements, float* accumulated) {
  if (f.velocity == nullptr) return AccumulateAs<0>(f, elements, accumulated);
  return f.correction.nesterov ? AccumulateAs<2>(f, elements, accumulated) : AccumulateAs<1>(f, elements, accumulated);
}

}  // namespace

#pragma GCC pop_options

extern const Loops<uint16_t> kLoops16Avx2 = {Scan<uint16_t>, Append<uint16_t>, Between<uint16_t>, Emit<uint16_t>};
extern const Loops<uint32_t> kLoops32Avx2 = {Scan<uint32_t>, Append<uint32_t>, Between32, Emit32};
extern const Loops<uint64_t> kLoops64Avx2 = {Scan<uint64_t>, Append<uint64_t>, Between<uint64_t>, Emit<uint64_t>};
extern const FeedbackLoops kFeedbackAvx2 = {ScanFeedbackOf, AccumulateOf};

}  // namespace hvd_ext::topk
#endif

// The loops of the selection for processors with AVX-512 and VBMI2 (Ice Lake, Zen 4 and later). No branch depends on
// the data: a comparison of 32 elements gives a mask, and the mask compresses a register of 16-bit ids.
#include <algorithm>

#include "kernels/topk_avx512.h"
#include "kernels/topk_loops.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

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
    const __m512i id = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + i)));
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

int64_t Between64(const uint64_t* bits, int64_t count, uint64_t low, uint64_t high, uint64_t* to, int64_t* above) {
  return BetweenRest(bits, int64_t{0}, count, low, high, to, int64_t{0}, above);
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
    return StoreInts(static_cast<int32_t*>(picks.indices) + at,
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

int64_t Emit32(Candidates<uint32_t> from, int64_t count, uint32_t bound, int64_t* ties, int64_t base,
               Picks<uint32_t> picks, int64_t at, int64_t end, uint32_t* greatest) {
  Picker picker{_mm512_set1_epi32(0x7fffffff), _mm512_set1_epi32(static_cast<int>(bound)), _mm512_setzero_si512()};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512i bits = _mm512_loadu_si512(from.bits + i);
    const uint32_t picked = picker(bits, ties);
    StoreIndices(picks, _mm512_loadu_si512(from.places + i), base, picked, at, end);
    const int64_t found = __builtin_popcount(picked);
    if (picks.values != nullptr) {
      StoreInts(reinterpret_cast<int32_t*>(picks.values) + at,
                _mm512_maskz_compress_epi32(static_cast<__mmask16>(picked), bits), found, end - at);
    }
    at += found;
  }
  *greatest = picker.Greatest(*greatest);
  return EmitRest(from, i, count, bound, ties, base, picks, at, end, greatest);
}

int64_t Emit16(Candidates<uint16_t> from, int64_t count, uint16_t bound, int64_t* ties, int64_t base,
               Picks<uint16_t> picks, int64_t at, int64_t end, uint16_t* greatest) {
  Picker picker{_mm512_set1_epi32(0x7fff), _mm512_set1_epi32(bound), _mm512_setzero_si512()};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from.bits + i));
    const uint32_t picked = picker(_mm512_cvtepu16_epi32(bits), ties);
    StoreIndices(picks, _mm512_loadu_si512(from.places + i), base, picked, at, end);
    const int64_t found = __builtin_popcount(picked);
    if (picks.values != nullptr) {
      StoreShorts(picks.values + at, _mm256_maskz_compress_epi16(static_cast<__mmask16>(picked), bits), found,
                  end - at);
    }
    at += found;
  }
  *greatest = picker.Greatest(*greatest);
  return EmitRest(from, i, count, bound, ties, base, picks, at, end, greatest);
}

int64_t Emit64(Candidates<uint64_t> from, int64_t count, uint64_t bound, int64_t* ties, int64_t base,
               Picks<uint64_t> picks, int64_t at, int64_t end, uint64_t* greatest) {
  return EmitRest(from, int64_t{0}, count, bound, ties, base, picks, at, end, greatest);
}

// Returns `a` of 16 elements and stores the next velocity. kKind: 0 no velocity, 1 momentum, 2 Nesterov.
template <int kKind>
inline __m512 Sixteen(const ErrorFeedback& f, int64_t i, __m512 momentum) {
  const __m512 gradient = _mm512_loadu_ps(f.gradient + i), residual = _mm512_loadu_ps(f.residual + i);
  if constexpr (kKind == 0) return _mm512_add_ps(residual, gradient);
  const __m512 velocity = _mm512_add_ps(_mm512_mul_ps(momentum, _mm512_loadu_ps(f.velocity + i)), gradient);
  _mm512_storeu_ps(f.next_velocity + i, velocity);
  if constexpr (kKind == 1) return _mm512_add_ps(residual, velocity);
  return _mm512_add_ps(residual, _mm512_add_ps(gradient, _mm512_mul_ps(momentum, velocity)));
}

// The hardware prefetcher keeps up with several streams, except for the address translation of new pages.
template <int kKind>
inline void AskPages(const ErrorFeedback& f, int64_t i) {
  if (!BeginsPage<float>(i)) return;
  Ask(f.gradient + i, kPageAhead);
  Ask(f.residual + i, kPageAhead);
  if constexpr (kKind != 0) Ask(f.velocity + i, kPageAhead);
}

// Stores the first `count` of 16 elements. They are seldom more than 4, and whole registers would often cross a cache
// line.
inline void PutFew(uint32_t* to, __m512i x, int64_t count) {
  if (count > 4) return _mm512_storeu_si512(to, x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(x));
}

// Of 16 elements, stores those below the bound in `kept`, with 0 for the others, and adds the others to the candidates.
inline int64_t Part(const Comparer<uint32_t>& hits, __m512 a, float* kept, __m512i places, Candidates<uint32_t> to,
                    int64_t count) {
  const __m512i bits = _mm512_castps_si512(a);
  const __mmask16 found = hits.Hits(bits);
  _mm512_storeu_ps(kept, _mm512_maskz_mov_ps(_knot_mask16(found), a));
  const int64_t more = __builtin_popcount(found);
  PutFew(to.bits + count, _mm512_maskz_compress_epi32(found, bits), more);
  PutFew(to.places + count, _mm512_maskz_compress_epi32(found, places), more);
  return count + more;
}

template <int kKind>
int64_t ScanFeedback(const ErrorFeedback& feedback, int64_t elements, uint32_t bound, uint32_t place,
                     Candidates<uint32_t> to) {
  const ErrorFeedback f = feedback;  // a copy that no store can alias: its pointers stay in registers
  const Comparer<uint32_t> hits(bound);
  const __m512 momentum = _mm512_set1_ps(f.correction.momentum);
  const __m512i step = _mm512_set1_epi32(16);
  __m512i places = _mm512_add_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(FirstIds())),
                                    _mm512_set1_epi32(static_cast<int>(place)));
  int64_t count = 0, i = 0;
  for (; i + 32 <= elements; i += 32) {
    AskPages<kKind>(f, i);
    const __m512 low = Sixteen<kKind>(f, i, momentum), high = Sixteen<kKind>(f, i + 16, momentum);
    count = Part(hits, low, f.next_residual + i, places, to, count);
    places = _mm512_add_epi32(places, step);
    count = Part(hits, high, f.next_residual + i + 16, places, to, count);
    places = _mm512_add_epi32(places, step);
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
  const __m512 momentum = _mm512_set1_ps(f.correction.momentum);
  int64_t i = 0;
  for (; i + 16 <= elements; i += 16) {
    AskPages<kKind>(f, i);
    const __m512 a = Sixteen<kKind>(f, i, momentum);
    _mm512_storeu_ps(accumulated + i, a);
    _mm512_storeu_ps(f.next_residual + i, _mm512_setzero_ps());
  }
  AccumulateRest(f, i, elements, accumulated);
}

void AccumulateOf(const ErrorFeedback& f, int64_t elements, float* accumulated) {
  if (f.velocity == nullptr) return AccumulateAs<0>(f, elements, accumulated);
  return f.correction.nesterov ? AccumulateAs<2>(f, elements, accumulated) : AccumulateAs<1>(f, elements, accumulated);
}

}  // namespace

#pragma GCC pop_options

extern const Loops<uint16_t> kLoops16Avx512 = {Scan<uint16_t>, Append<uint16_t>, Between16, Emit16};
extern const Loops<uint32_t> kLoops32Avx512 = {Scan<uint32_t>, Append<uint32_t>, Between32, Emit32};
extern const Loops<uint64_t> kLoops64Avx512 = {Scan<uint64_t>, Append<uint64_t>, Between64, Emit64};
extern const FeedbackLoops kFeedbackAvx512 = {ScanFeedbackOf, AccumulateOf};

}  // namespace hvd_ext::topk
#endif

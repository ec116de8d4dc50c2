// Conversions between float32 in memory and float16 or bfloat16 in messages.
#include <type_traits>

#include "kernels/dtypes.h"
#include "kernels/each.h"
#include "kernels/f16c.h"
#include "kernels/reduce.h"
#include "kernels/wide.h"

namespace hvd_ext {
namespace {

#if defined(__x86_64__)
HVD_EXT_F16C inline __m256 Times8(__m256 x, float factor) { return _mm256_mul_ps(x, _mm256_set1_ps(factor)); }

HVD_EXT_F16C inline void Eight(const NarrowEach<Float16>& each, int64_t i) {
  Store8(each.to + i, Times8(_mm256_loadu_ps(each.x + i), each.scale.down));
  _mm256_storeu_ps(each.x + i, Times8(Load8(each.to + i), each.scale.up));
}

HVD_EXT_F16C inline void Eight(const WidenEach<Float16>& each, int64_t i) {
  _mm256_storeu_ps(each.to + i, Times8(Load8(each.x + i), each.scale.up));
}

HVD_EXT_F16C inline void Eight(const AddEach<Float16>& each, int64_t i) {
  __m256 sum = _mm256_add_ps(_mm256_loadu_ps(each.to + i), Times8(Load8(each.x + i), each.scale.up));
  _mm256_storeu_ps(each.to + i, sum);
}

HVD_EXT_F16C inline void Eight(const RoundEach<Float16>& each, int64_t i) {
  __m128i halves = _mm256_cvtps_ph(Times8(_mm256_loadu_ps(each.x + i), each.scale.down), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_ps(each.x + i, Times8(_mm256_cvtph_ps(halves), each.scale.up));
}

template <typename Each>
HVD_EXT_F16C void LoopF16C(Each each, int64_t elements) {
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) Eight(each, i);
  for (; i < elements; ++i) each(i);
}
#endif

template <template <typename> class Each, typename Half>
void Loop(Each<Half> each, int64_t elements) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Half, Float16>) {
    if (kF16C) return LoopF16C(each, elements);
  }
#endif
  Widely<EachLoop<Each<Half>>>(each, elements);
}

constexpr const char* kNoWire = "float32 cannot be sent as";

}  // namespace

bool IsWire(DType wire) { return wire == DType::kFloat16 || wire == DType::kBFloat16; }

void Narrow(DType wire, void* to, float* x, int64_t elements, float scale) {
  WithHalf(kNoWire, wire, [&](auto half) {
    using Half = decltype(half);
    Loop(NarrowEach<Half>{static_cast<Half*>(to), x, Scale(scale)}, elements);
  });
}

void Widen(DType wire, float* to, const void* x, int64_t elements, float scale) {
  WithHalf(kNoWire, wire, [&](auto half) {
    using Half = decltype(half);
    Loop(WidenEach<Half>{to, static_cast<const Half*>(x), Scale(scale)}, elements);
  });
}

void AddWidened(DType wire, float* accumulator, const void* x, int64_t elements, float scale) {
  WithHalf(kNoWire, wire, [&](auto half) {
    using Half = decltype(half);
    Loop(AddEach<Half>{accumulator, static_cast<const Half*>(x), Scale(scale)}, elements);
  });
}

void Round(DType wire, float* x, int64_t elements, float scale) {
  WithHalf(kNoWire, wire, [&](auto half) { Loop(RoundEach<decltype(half)>{x, Scale(scale)}, elements); });
}

}  // namespace hvd_ext

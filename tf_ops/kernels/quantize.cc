#include "kernels/quantize.h"

#include <algorithm>
#include <cstring>

#include "kernels/denormals.h"
#include "kernels/half.h"
#include "kernels/topk_scan.h"

namespace hvd_ext {
namespace {

#define HVD_EXT_INLINE __attribute__((always_inline)) inline

constexpr float kUnit = 1.0f / 1024;     // of a scale
constexpr uint16_t kMostScale = 0x7bff;  // the largest finite float16
constexpr float kRounds = 12582912.0f;   // 1.5 * 2^23: a float32 near it has no fraction
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr int kLanes = 16;  // of the sums of a block

HVD_EXT_INLINE float ScaleOf(uint16_t bits) { return ToFloat(Float16{bits}) * kUnit; }

// The least scale from `least` on.
HVD_EXT_INLINE uint16_t ScaleFrom(float least) {
  const float units = least * (1 / kUnit);
  if (!(units < 65504.0f)) return kMostScale;
  const uint16_t bits = ToFloat16(units).bits;
  return static_cast<uint16_t>(bits + (ToFloat(Float16{bits}) < units ? 1 : 0));
}

// One block of `count` elements, with x[i] + y[i] = 0 behind them.
template <int kBits>
HVD_EXT_INLINE bool QuantizeBlock(int32_t block, int32_t count, const float* x, const float* y, uint16_t* scale,
                                  unsigned char* packed, float* left) {
  constexpr int kMost = kBits == 8 ? 127 : 7;
  uint32_t largest = 0;
  if (y != nullptr) {
    for (int32_t i = 0; i < block; ++i) left[i] = x[i] + y[i];
  } else if (left != x) {
    std::memcpy(left, x, static_cast<size_t>(block) * sizeof(float));
  }
  for (int32_t i = 0; i < block; ++i) largest = std::max(largest, BitsOf(left[i]) & 0x7fffffffu);
  if (largest >= kInfinity) {  // receivers check scales before they look whether the values are finite
    *scale = 0;
    std::memset(packed, 0, static_cast<size_t>(block) * kBits / 8);
    return false;
  }
  if constexpr (kBits == 1) {
    float lanes[kLanes] = {};
    for (int32_t i = 0; i < block; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += FloatOf(BitsOf(left[i + lane]) & 0x7fffffffu);
    }
    float sum = 0;
    for (float lane : lanes) sum += lane;
    const float units = sum / static_cast<float>(count) * (1 / kUnit);
    *scale = units < 65504.0f ? ToFloat16(units).bits : kMostScale;
    const uint32_t magnitude = BitsOf(ScaleOf(*scale));
    const int32_t apart = block / 8;
    std::memset(packed, 0, static_cast<size_t>(apart));
    for (int bit = 0; bit < 8; ++bit) {
      float* a = left + bit * apart;
      for (int32_t i = 0; i < apart; ++i) {
        const uint32_t sign = BitsOf(a[i]) & 0x80000000u;
        packed[i] = static_cast<unsigned char>(packed[i] | sign >> 31 << bit);
        a[i] -= FloatOf(magnitude | sign);
      }
    }
  } else {
    *scale = ScaleFrom(FloatOf(largest) / kMost);
    const float step = ScaleOf(*scale);
    const float inverse = step > 0 ? 1 / step : 0;
    int32_t numbers[Quantization::kMostBlock];
    for (int32_t i = 0; i < block; ++i) {
      const float scaled = std::min(std::max(left[i] * inverse, static_cast<float>(-kMost)), static_cast<float>(kMost));
      const float rounded = (scaled + kRounds) - kRounds;
      numbers[i] = static_cast<int32_t>(rounded);
      left[i] -= rounded * step;
    }
    if constexpr (kBits == 8) {
      for (int32_t i = 0; i < block; ++i) packed[i] = static_cast<unsigned char>(numbers[i]);
    } else {
      const int32_t apart = block / 2;
      for (int32_t i = 0; i < apart; ++i) {
        packed[i] = static_cast<unsigned char>((numbers[i] + 8) | (numbers[i + apart] + 8) << 4);
      }
    }
  }
  return true;
}

template <int kBits>
HVD_EXT_INLINE bool QuantizeAll(int32_t block, int64_t elements, const float* x, const float* y, uint16_t* scales,
                                unsigned char* packed, float* left) {
  const int64_t nbytes = static_cast<int64_t>(block) * kBits / 8;
  bool finite = true;
  int64_t at = 0;
  for (; at + block <= elements; at += block, ++scales, packed += nbytes) {
    finite &= QuantizeBlock<kBits>(block, block, x + at, y == nullptr ? nullptr : y + at, scales, packed, left + at);
  }
  if (at == elements) return finite;
  float padded[Quantization::kMostBlock];
  for (int32_t i = 0; i < block; ++i) {
    const int64_t from = at + i;
    padded[i] = from < elements ? (y == nullptr ? x[from] : x[from] + y[from]) : 0.0f;
  }
  finite &= QuantizeBlock<kBits>(block, static_cast<int32_t>(elements - at), padded, nullptr, scales, packed, padded);
  std::memcpy(left + at, padded, static_cast<size_t>(elements - at) * sizeof(float));
  return finite;
}

// data[i] += the number of element `first` + i of a block
template <int kBits>
HVD_EXT_INLINE void AddOf(int32_t block, uint16_t scale, const unsigned char* packed, int32_t first, int32_t elements,
                          float* data) {
  const float step = ScaleOf(scale);
  if constexpr (kBits == 8) {
    const auto* numbers = reinterpret_cast<const signed char*>(packed) + first;
    for (int32_t i = 0; i < elements; ++i) data[i] += static_cast<float>(numbers[i]) * step;
    return;
  }
  constexpr int kParts = 8 / kBits;
  const int32_t apart = block / kParts, end = first + elements;
  for (int part = 0; part < kParts; ++part) {  // which bits of a byte
    const int32_t from = std::max(first, part * apart), to = std::min(end, (part + 1) * apart);
    const unsigned char* bytes = packed + (from - part * apart);
    float* out = data + (from - first);
    for (int32_t i = 0; i < to - from; ++i) {
      if constexpr (kBits == 4) {
        out[i] += static_cast<float>((bytes[i] >> (4 * part) & 15) - 8) * step;
      } else {
        out[i] += FloatOf(BitsOf(step) | static_cast<uint32_t>(bytes[i] >> part & 1) << 31);
      }
    }
  }
}

template <int kBits>
HVD_EXT_INLINE void AddAll(int32_t block, const uint16_t* scales, const unsigned char* packed, int64_t first,
                           int64_t elements, float* data) {
  const int64_t nbytes = static_cast<int64_t>(block) * kBits / 8;
  for (int64_t at = first, end = first + elements; at < end;) {
    const int64_t number = at / block, here = at % block;
    const int64_t count = std::min(end - at, block - here);
    AddOf<kBits>(block, scales[number], packed + number * nbytes, static_cast<int32_t>(here),
                 static_cast<int32_t>(count), data + (at - first));
    at += count;
  }
}

// The compiler vectorises the loops for each of the instruction sets.
struct Loops {
  bool (*quantize)(int32_t block, int64_t elements, const float* x, const float* y, uint16_t* scales,
                   unsigned char* packed, float* left);
  void (*add)(int32_t block, const uint16_t* scales, const unsigned char* packed, int64_t first, int64_t elements,
              float* data);
};

#define HVD_EXT_VERSION(name, attribute)                                                                           \
  template <int kBits>                                                                                             \
  attribute bool Quantize##name(int32_t block, int64_t elements, const float* x, const float* y, uint16_t* scales, \
                                unsigned char* packed, float* left) {                                              \
    return QuantizeAll<kBits>(block, elements, x, y, scales, packed, left);                                        \
  }                                                                                                                \
  template <int kBits>                                                                                             \
  attribute void Add##name(int32_t block, const uint16_t* scales, const unsigned char* packed, int64_t first,      \
                           int64_t elements, float* data) {                                                        \
    AddAll<kBits>(block, scales, packed, first, elements, data);                                                   \
  }                                                                                                                \
  Loops name(int32_t bits) {                                                                                       \
    if (bits == 8) return {Quantize##name<8>, Add##name<8>};                                                       \
    if (bits == 4) return {Quantize##name<4>, Add##name<4>};                                                       \
    return {Quantize##name<1>, Add##name<1>};                                                                      \
  }

HVD_EXT_VERSION(Portable, )
#if defined(__x86_64__)
HVD_EXT_VERSION(Avx2, __attribute__((target("avx2"))))
HVD_EXT_VERSION(Avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#else
#define Avx512 Portable
#define Avx2 Portable
#endif

Loops LoopsOf(int32_t bits) {
  const topk::Path path = topk::CurrentPath();
  return path == topk::Path::kAvx512 ? Avx512(bits) : path == topk::Path::kAvx2 ? Avx2(bits) : Portable(bits);
}

}  // namespace

bool Quantize(const Quantization& how, int64_t elements, const float* x, const float* y, uint16_t* scales,
              unsigned char* packed, float* left) {
  const WithDenormals denormals;
  return LoopsOf(how.bits).quantize(how.block, elements, x, y, scales, packed, left);
}

void AddQuantized(const Quantization& how, const uint16_t* scales, const unsigned char* packed, int64_t first,
                  int64_t elements, float* data) {
  const WithDenormals denormals;
  LoopsOf(how.bits).add(how.block, scales, packed, first, elements, data);
}

}  // namespace hvd_ext

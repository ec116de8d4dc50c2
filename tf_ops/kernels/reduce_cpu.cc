#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <type_traits>

#include "kernels/dtypes.h"
#include "kernels/f16c.h"
#include "kernels/half.h"
#include "kernels/reduce.h"
#include "kernels/wide.h"

namespace hvd_ext {
namespace {

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// Of two values a minimum or a maximum chooses the same one whatever their order, so that ranks which combine them in
// opposite orders agree.
template <ReduceOp op, typename T>
HVD_EXT_ALWAYS T Combined(T a, T b) {
  if constexpr (op == ReduceOp::kSum) return a + b;
  if constexpr (op == ReduceOp::kProduct) return a * b;
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) return std::signbit(a) == (op == ReduceOp::kMin) ? a : b;  // only zeros can be equal and differ in sign
  }
  return (op == ReduceOp::kMin) == (a < b) ? a : b;
}

// Halves take many instructions each, and wide vectors make them as fast as memory.
template <ReduceOp op, typename T>
HVD_EXT_ALWAYS void CombineLoop(T* accumulator, const T* x, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    if constexpr (kIsHalf<T>) {
      FromFloat(Combined<op>(ToFloat(accumulator[i]), ToFloat(x[i])), &accumulator[i]);
    } else {
      accumulator[i] = Combined<op>(accumulator[i], x[i]);
    }
  }
}

template <typename T>
HVD_EXT_ALWAYS void DivideLoop(T* data, int64_t divisor, int64_t elements) {
  const float float_divisor = static_cast<float>(divisor);
  for (int64_t i = 0; i < elements; ++i) {
    if constexpr (kIsHalf<T>) {
      FromFloat(ToFloat(data[i]) / float_divisor, &data[i]);
    } else if constexpr (std::is_floating_point_v<T>) {
      data[i] /= static_cast<T>(divisor);
    } else {
      data[i] = static_cast<T>(data[i] / divisor);
    }
  }
}

#if defined(__x86_64__)
HVD_EXT_F16C void AddF16C(Float16* accumulator, const Float16* x, int64_t elements) {
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) Store8(accumulator + i, _mm256_add_ps(Load8(accumulator + i), Load8(x + i)));
  CombineLoop<ReduceOp::kSum>(accumulator + i, x + i, elements - i);
}

HVD_EXT_F16C void DivideF16C(Float16* data, int64_t divisor, int64_t elements) {
  const __m256 divisors = _mm256_set1_ps(static_cast<float>(divisor));
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) Store8(data + i, _mm256_div_ps(Load8(data + i), divisors));
  DivideLoop(data + i, divisor, elements - i);
}
#endif

template <ReduceOp op>
void CombineAs(const char* what, DType dtype, void* accumulator, const void* x, int64_t elements) {
  WithNumber(what, dtype, [&](auto zero) {
    using Element = decltype(zero);
    // Sums and products of integers are unsigned, because signed overflow is undefined.
    constexpr bool kWraps = std::is_integral_v<Element> && (op == ReduceOp::kSum || op == ReduceOp::kProduct);
    using T = typename std::conditional_t<kWraps, std::make_unsigned<Element>, std::common_type<Element>>::type;
    T* to = static_cast<T*>(accumulator);
    const T* from = static_cast<const T*>(x);
#if defined(__x86_64__)
    if constexpr (op == ReduceOp::kSum && std::is_same_v<T, Float16>) {
      if (kF16C) return AddF16C(to, from, elements);
    }
#endif
    Widely<CombineLoop<op, T>>(to, from, elements);
  });
}

// In the order of the enumerations.
struct DTypeFacts {
  const char* name;
  size_t size;
};
constexpr DTypeFacts kDTypes[] = {{"float32", 4}, {"float64", 8}, {"float16", 2}, {"bfloat16", 2},
                                  {"int32", 4},   {"int64", 8},   {"bytes", 1}};
constexpr const char* kOpNames[] = {"sum", "average", "minimum", "maximum", "product"};

}  // namespace

void Refuse(const char* what, DType dtype) {
  std::fprintf(stderr, "hvd_ext: %s %s (%d): a bug, callers must refuse it\n", what, NameOf(dtype),
               static_cast<int>(dtype));
  std::abort();
}

const char* NameOf(ReduceOp op) {
  const size_t number = static_cast<size_t>(op);
  return number < std::size(kOpNames) ? kOpNames[number] : "unknown";
}

size_t SizeOf(DType dtype) {
  const size_t number = static_cast<size_t>(dtype);
  return number < std::size(kDTypes) ? kDTypes[number].size : 0;
}

const char* NameOf(DType dtype) {
  const size_t number = static_cast<size_t>(dtype);
  return number < std::size(kDTypes) ? kDTypes[number].name : "unknown";
}

void Add(DType dtype, void* accumulator, const void* x, int64_t elements) {
  CombineAs<ReduceOp::kSum>("Add of dtype", dtype, accumulator, x, elements);
}

void Combine(ReduceOp op, DType dtype, void* accumulator, const void* x, int64_t elements) {
  constexpr const char* kWhat = "Combine of dtype";
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return Add(dtype, accumulator, x, elements);
    case ReduceOp::kMin:
      return CombineAs<ReduceOp::kMin>(kWhat, dtype, accumulator, x, elements);
    case ReduceOp::kMax:
      return CombineAs<ReduceOp::kMax>(kWhat, dtype, accumulator, x, elements);
    case ReduceOp::kProduct:
      return CombineAs<ReduceOp::kProduct>(kWhat, dtype, accumulator, x, elements);
  }
}

void CombineWidened(ReduceOp op, DType wire, float* accumulator, const void* x, int64_t elements) {
  if (op == ReduceOp::kSum || op == ReduceOp::kAverage) return AddWidened(wire, accumulator, x, elements);
  constexpr int64_t kAtOnce = 2048;
  float widened[kAtOnce];
  const char* from = static_cast<const char*>(x);
  for (int64_t at = 0; at < elements; at += kAtOnce) {
    const int64_t count = std::min(kAtOnce, elements - at);
    Widen(wire, widened, from + at * static_cast<int64_t>(SizeOf(wire)), count);
    Combine(op, DType::kFloat32, accumulator + at, widened, count);
  }
}

void Divide(DType dtype, void* data, int64_t divisor, int64_t elements) {
  if (divisor == 1) return;
  WithNumber("Divide of dtype", dtype, [&](auto zero) {
    using T = decltype(zero);
#if defined(__x86_64__)
    if constexpr (std::is_same_v<T, Float16>) {
      if (kF16C) return DivideF16C(static_cast<Float16*>(data), divisor, elements);
    }
#endif
    Widely<DivideLoop<T>>(static_cast<T*>(data), divisor, elements);
  });
}

}  // namespace hvd_ext

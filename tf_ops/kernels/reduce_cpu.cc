#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "kernels/f16c.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext {
namespace {

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

template <typename T>
__attribute__((always_inline)) inline void AddLoop(T* accumulator, const T* x, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    if constexpr (kIsHalf<T>) {
      FromFloat(ToFloat(accumulator[i]) + ToFloat(x[i]), &accumulator[i]);
    } else {
      accumulator[i] += x[i];
    }
  }
}

// Chooses the same one of two values whatever their order, so that ranks which combine them in opposite orders agree.
template <ReduceOp op, typename T>
__attribute__((always_inline)) inline T Chosen(T a, T b) {
  if constexpr (op == ReduceOp::kProduct) return a * b;
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) return std::signbit(a) == (op == ReduceOp::kMin) ? a : b;  // only zeros can be equal and differ in sign
  }
  return (op == ReduceOp::kMin) == (a < b) ? a : b;
}

template <ReduceOp op, typename T>
__attribute__((always_inline)) inline void ChooseLoop(T* accumulator, const T* x, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    if constexpr (kIsHalf<T>) {
      FromFloat(Chosen<op>(ToFloat(accumulator[i]), ToFloat(x[i])), &accumulator[i]);
    } else {
      accumulator[i] = Chosen<op>(accumulator[i], x[i]);
    }
  }
}

template <typename T>
__attribute__((always_inline)) inline void DivideLoop(T* data, int64_t divisor, int64_t elements) {
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

// The build targets any x86-64. Halves take many instructions each, and wide vectors make them as fast as memory. The
// version is chosen by hand, because the compiler's function multiversioning (ifunc) is resolved too early for the
// sanitizers.
#if defined(__x86_64__)
#define HVD_EXT_WIDE __attribute__((target("avx2")))
const bool wide = __builtin_cpu_supports("avx2");
const bool f16c = HasF16C();
#else
#define HVD_EXT_WIDE
const bool wide = false;
#endif

template <typename T>
HVD_EXT_WIDE void AddWide(T* accumulator, const T* x, int64_t elements) {
  AddLoop(accumulator, x, elements);
}

template <ReduceOp op, typename T>
HVD_EXT_WIDE void ChooseWide(T* accumulator, const T* x, int64_t elements) {
  ChooseLoop<op>(accumulator, x, elements);
}

template <typename T>
HVD_EXT_WIDE void DivideWide(T* data, int64_t divisor, int64_t elements) {
  DivideLoop(data, divisor, elements);
}

#if defined(__x86_64__)
HVD_EXT_F16C void AddF16C(Float16* accumulator, const Float16* x, int64_t elements) {
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) Store8(accumulator + i, _mm256_add_ps(Load8(accumulator + i), Load8(x + i)));
  AddLoop(accumulator + i, x + i, elements - i);
}

HVD_EXT_F16C void DivideF16C(Float16* data, int64_t divisor, int64_t elements) {
  const __m256 divisors = _mm256_set1_ps(static_cast<float>(divisor));
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) Store8(data + i, _mm256_div_ps(Load8(data + i), divisors));
  DivideLoop(data + i, divisor, elements - i);
}
#endif

template <typename T>
void AddAs(void* accumulator, const void* x, int64_t elements) {
  T* to = static_cast<T*>(accumulator);
  const T* from = static_cast<const T*>(x);
#if defined(__x86_64__)
  if constexpr (std::is_same_v<T, Float16>) {
    if (f16c) return AddF16C(to, from, elements);
  }
#endif
  if (wide) {
    AddWide(to, from, elements);
  } else {
    AddLoop(to, from, elements);
  }
}

template <ReduceOp op, typename T>
void ChooseAs(void* accumulator, const void* x, int64_t elements) {
  T* to = static_cast<T*>(accumulator);
  const T* from = static_cast<const T*>(x);
  if (wide) {
    ChooseWide<op>(to, from, elements);
  } else {
    ChooseLoop<op>(to, from, elements);
  }
}

template <typename T>
void DivideAs(void* data, int64_t divisor, int64_t elements) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<T, Float16>) {
    if (f16c) return DivideF16C(static_cast<Float16*>(data), divisor, elements);
  }
#endif
  if (wide) {
    DivideWide(static_cast<T*>(data), divisor, elements);
  } else {
    DivideLoop(static_cast<T*>(data), divisor, elements);
  }
}

[[noreturn]] void Refuse(const char* what, DType dtype) {
  std::fprintf(stderr, "hvd_ext: %s of dtype %s (%d): a bug, callers must refuse it\n", what, NameOf(dtype),
               static_cast<int>(dtype));
  std::abort();
}

template <ReduceOp op>
void Choose(DType dtype, void* accumulator, const void* x, int64_t elements) {
  switch (dtype) {
    case DType::kFloat32:
      return ChooseAs<op, float>(accumulator, x, elements);
    case DType::kFloat64:
      return ChooseAs<op, double>(accumulator, x, elements);
    case DType::kFloat16:
      return ChooseAs<op, Float16>(accumulator, x, elements);
    case DType::kBFloat16:
      return ChooseAs<op, BFloat16>(accumulator, x, elements);
    case DType::kInt32:  // a product is unsigned, because signed overflow is undefined
      return ChooseAs<op, std::conditional_t<op == ReduceOp::kProduct, uint32_t, int32_t>>(accumulator, x, elements);
    case DType::kInt64:
      return ChooseAs<op, std::conditional_t<op == ReduceOp::kProduct, uint64_t, int64_t>>(accumulator, x, elements);
    case DType::kBytes:
      break;
  }
  Refuse("Combine", dtype);
}

}  // namespace

const char* NameOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMin:
      return "minimum";
    case ReduceOp::kMax:
      return "maximum";
    case ReduceOp::kProduct:
      return "product";
  }
  return "unknown";
}

size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBytes:
      return 1;
  }
  return 0;
}

const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kBytes:
      return "bytes";
  }
  return "unknown";
}

void Add(DType dtype, void* accumulator, const void* x, int64_t elements) {
  switch (dtype) {
    case DType::kFloat32:
      return AddAs<float>(accumulator, x, elements);
    case DType::kFloat64:
      return AddAs<double>(accumulator, x, elements);
    case DType::kFloat16:
      return AddAs<Float16>(accumulator, x, elements);
    case DType::kBFloat16:
      return AddAs<BFloat16>(accumulator, x, elements);
    case DType::kInt32:  // unsigned, because signed overflow is undefined
      return AddAs<uint32_t>(accumulator, x, elements);
    case DType::kInt64:
      return AddAs<uint64_t>(accumulator, x, elements);
    case DType::kBytes:
      break;
  }
  Refuse("Add", dtype);
}

void Combine(ReduceOp op, DType dtype, void* accumulator, const void* x, int64_t elements) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return Add(dtype, accumulator, x, elements);
    case ReduceOp::kMin:
      return Choose<ReduceOp::kMin>(dtype, accumulator, x, elements);
    case ReduceOp::kMax:
      return Choose<ReduceOp::kMax>(dtype, accumulator, x, elements);
    case ReduceOp::kProduct:
      return Choose<ReduceOp::kProduct>(dtype, accumulator, x, elements);
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
  switch (dtype) {
    case DType::kFloat32:
      return DivideAs<float>(data, divisor, elements);
    case DType::kFloat64:
      return DivideAs<double>(data, divisor, elements);
    case DType::kFloat16:
      return DivideAs<Float16>(data, divisor, elements);
    case DType::kBFloat16:
      return DivideAs<BFloat16>(data, divisor, elements);
    case DType::kInt32:
      return DivideAs<int32_t>(data, divisor, elements);
    case DType::kInt64:
      return DivideAs<int64_t>(data, divisor, elements);
    case DType::kBytes:
      break;
  }
  Refuse("Divide", dtype);
}

}  // namespace hvd_ext

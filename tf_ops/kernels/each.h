// What the element-wise kernels do to element i, on a processor (reduce_cpu.cc, wire_cpu.cc) and on a GPU
// (reduce_gpu.cu.cc): one text, so that both give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/half.h"
#include "kernels/reduce.h"

#define HVD_EXT_EACH HVD_EXT_ANYWHERE __attribute__((always_inline)) inline

namespace hvd_ext {

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// Of two values a minimum or a maximum chooses the same one whatever their order, so that ranks which combine them in
// opposite orders agree.
template <ReduceOp op, typename T>
HVD_EXT_EACH T Combined(T a, T b) {
  if constexpr (op == ReduceOp::kSum) return a + b;
  if constexpr (op == ReduceOp::kProduct) return a * b;
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return static_cast<T>(NAN);
    if (a == b) return std::signbit(a) == (op == ReduceOp::kMin) ? a : b;  // only zeros can be equal and differ in sign
  }
  return (op == ReduceOp::kMin) == (a < b) ? a : b;
}

// Sums and products of integers are unsigned, because signed overflow is undefined.
template <ReduceOp op, typename T>
using Combinable =
    typename std::conditional_t<std::is_integral_v<T> && (op == ReduceOp::kSum || op == ReduceOp::kProduct),
                                std::make_unsigned<T>, std::common_type<T>>::type;

template <ReduceOp op, typename T>
struct CombineEach {
  T* to;
  const T* x;
  HVD_EXT_EACH void operator()(int64_t i) const {
    if constexpr (kIsHalf<T>) {
      FromFloat(Combined<op>(ToFloat(to[i]), ToFloat(x[i])), &to[i]);
    } else {
      to[i] = Combined<op>(to[i], x[i]);
    }
  }
};

template <typename T>
struct DivideEach {
  T* data;
  int64_t divisor;
  HVD_EXT_EACH void operator()(int64_t i) const {
    if constexpr (kIsHalf<T>) {
      FromFloat(ToFloat(data[i]) / static_cast<float>(divisor), &data[i]);
    } else if constexpr (std::is_floating_point_v<T>) {
      data[i] /= static_cast<T>(divisor);
    } else {
      data[i] = static_cast<T>(data[i] / divisor);
    }
  }
};

// ---- float32 in memory, halves in messages
struct Scale {
  explicit Scale(float scale) : down(1 / scale), up(scale) {}
  float down, up;
};

// The products with a power of two are exact, except below float32's least normal number, which a half rounds to 0.
// bfloat16 has float32's range: nothing is multiplied, and numbers below the least normal one keep their bits.
template <typename Half>
HVD_EXT_EACH float Times(float x, float factor) {
  return std::is_same_v<Half, Float16> ? x * factor : x;
}

template <typename Half>
struct NarrowEach {
  Half* __restrict to;
  float* __restrict x;
  Scale scale;
  HVD_EXT_EACH void operator()(int64_t i) const {
    FromFloat(Times<Half>(x[i], scale.down), &to[i]);
    x[i] = Times<Half>(ToFloat(to[i]), scale.up);
  }
};

template <typename Half>
struct WidenEach {
  float* __restrict to;
  const Half* __restrict x;
  Scale scale;
  HVD_EXT_EACH void operator()(int64_t i) const { to[i] = Times<Half>(ToFloat(x[i]), scale.up); }
};

template <typename Half>
struct AddEach {
  float* __restrict to;
  const Half* __restrict x;
  Scale scale;
  HVD_EXT_EACH void operator()(int64_t i) const { to[i] += Times<Half>(ToFloat(x[i]), scale.up); }
};

template <typename Half>
struct RoundEach {
  float* x;
  Scale scale;
  HVD_EXT_EACH void operator()(int64_t i) const {
    Half half;
    FromFloat(Times<Half>(x[i], scale.down), &half);
    x[i] = Times<Half>(ToFloat(half), scale.up);
  }
};

template <typename Each>
HVD_EXT_EACH void EachLoop(Each each, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) each(i);
}

}  // namespace hvd_ext

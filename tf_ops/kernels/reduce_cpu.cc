#include <algorithm>
#include <iterator>
#include <type_traits>

#include "kernels/dtypes.h"
#include "kernels/each.h"
#include "kernels/f16c.h"
#include "kernels/reduce.h"
#include "kernels/wide.h"

namespace hvd_ext {
namespace {

#if defined(__x86_64__)
HVD_EXT_F16C void AddF16C(Float16* accumulator, const Float16* x, int64_t elements) {
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) Store8(accumulator + i, _mm256_add_ps(Load8(accumulator + i), Load8(x + i)));
  EachLoop(CombineEach<ReduceOp::kSum, Float16>{accumulator + i, x + i}, elements - i);
}

HVD_EXT_F16C void DivideF16C(Float16* data, int64_t divisor, int64_t elements) {
  const __m256 divisors = _mm256_set1_ps(static_cast<float>(divisor));
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) Store8(data + i, _mm256_div_ps(Load8(data + i), divisors));
  EachLoop(DivideEach<Float16>{data + i, divisor}, elements - i);
}
#endif

template <ReduceOp op>
void CombineAs(const char* what, DType dtype, void* accumulator, const void* x, int64_t elements) {
  WithNumber(what, dtype, [&](auto zero) {
    using T = Combinable<op, decltype(zero)>;
    T* to = static_cast<T*>(accumulator);
    const T* from = static_cast<const T*>(x);
#if defined(__x86_64__)
    if constexpr (op == ReduceOp::kSum && std::is_same_v<T, Float16>) {
      if (kF16C) return AddF16C(to, from, elements);
    }
#endif
    using Each = CombineEach<op, T>;
    Widely<EachLoop<Each>>(Each{to, from}, elements);
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
    using Each = DivideEach<T>;
    Widely<EachLoop<Each>>(Each{static_cast<T*>(data), divisor}, elements);
  });
}

}  // namespace hvd_ext

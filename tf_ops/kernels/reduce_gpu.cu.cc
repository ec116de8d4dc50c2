#include "kernels/reduce_gpu.h"

#include "kernels/dtypes.h"
#include "kernels/each.h"
#include "kernels/each_gpu.h"

namespace hvd_ext::gpu {
namespace {

template <typename Half, ReduceOp op>
struct CombineWidenedEach {
  float* to;
  const Half* x;
  HVD_EXT_EACH void operator()(int64_t i) const { to[i] = Combined<op>(to[i], ToFloat(x[i])); }
};

// Calls body(std::integral_constant) with the operation, where an average is a sum.
template <typename Body>
void WithOp(ReduceOp op, const Body& body) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return body(std::integral_constant<ReduceOp, ReduceOp::kSum>());
    case ReduceOp::kMin:
      return body(std::integral_constant<ReduceOp, ReduceOp::kMin>());
    case ReduceOp::kMax:
      return body(std::integral_constant<ReduceOp, ReduceOp::kMax>());
    case ReduceOp::kProduct:
      return body(std::integral_constant<ReduceOp, ReduceOp::kProduct>());
  }
}

constexpr const char* kNoWire = "float32 cannot be sent as";

}  // namespace

void Combine(ReduceOp op, DType dtype, void* accumulator, const void* x, int64_t elements, cudaStream_t stream) {
  WithOp(op, [&](auto operation) {
    WithNumber("Combine of dtype", dtype, [&](auto zero) {
      using T = Combinable<decltype(operation)::value, decltype(zero)>;
      using Each = CombineEach<decltype(operation)::value, T>;
      ForEach(Each{static_cast<T*>(accumulator), static_cast<const T*>(x)}, elements, stream);
    });
  });
}

void Divide(DType dtype, void* data, int64_t divisor, int64_t elements, cudaStream_t stream) {
  if (divisor == 1) return;
  WithNumber("Divide of dtype", dtype, [&](auto zero) {
    using T = decltype(zero);
    ForEach(DivideEach<T>{static_cast<T*>(data), divisor}, elements, stream);
  });
}

void Narrow(DType wire, void* to, float* x, int64_t elements, float scale, cudaStream_t stream) {
  WithHalf(kNoWire, wire, [&](auto half) {
    using Half = decltype(half);
    ForEach(NarrowEach<Half>{static_cast<Half*>(to), x, Scale(scale)}, elements, stream);
  });
}

void Widen(DType wire, float* to, const void* x, int64_t elements, float scale, cudaStream_t stream) {
  WithHalf(kNoWire, wire, [&](auto half) {
    using Half = decltype(half);
    ForEach(WidenEach<Half>{to, static_cast<const Half*>(x), Scale(scale)}, elements, stream);
  });
}

void AddWidened(DType wire, float* accumulator, const void* x, int64_t elements, float scale, cudaStream_t stream) {
  WithHalf(kNoWire, wire, [&](auto half) {
    using Half = decltype(half);
    ForEach(AddEach<Half>{accumulator, static_cast<const Half*>(x), Scale(scale)}, elements, stream);
  });
}

void CombineWidened(ReduceOp op, DType wire, float* accumulator, const void* x, int64_t elements, cudaStream_t stream) {
  WithOp(op, [&](auto operation) {
    WithHalf(kNoWire, wire, [&](auto half) {
      using Half = decltype(half);
      using Each = CombineWidenedEach<Half, decltype(operation)::value>;
      ForEach(Each{accumulator, static_cast<const Half*>(x)}, elements, stream);
    });
  });
}

void Round(DType wire, float* x, int64_t elements, float scale, cudaStream_t stream) {
  WithHalf(kNoWire, wire, [&](auto half) { ForEach(RoundEach<decltype(half)>{x, Scale(scale)}, elements, stream); });
}

}  // namespace hvd_ext::gpu

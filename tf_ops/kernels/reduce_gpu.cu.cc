// One kernel for all: a thread does element i, and those that lie a grid's width further on. The elements of a warp are
// neighbours, so its loads are whole lines, also those of host memory across the bus.
#include "kernels/reduce_gpu.h"

#include <algorithm>

#include "kernels/dtypes.h"
#include "kernels/each.h"

namespace hvd_ext::gpu {
namespace {

constexpr int kThreadsOfEach = 256;
// As many as an H200 runs at once: 132 multiprocessors with 8 blocks.
constexpr int64_t kMostBlocks = 1056;

template <typename Half, ReduceOp op>
struct CombineWidenedEach {
  float* to;
  const Half* x;
  HVD_EXT_EACH void operator()(int64_t i) const { to[i] = Combined<op>(to[i], ToFloat(x[i])); }
};

template <typename Each>
__global__ void __launch_bounds__(kThreadsOfEach) Apply(Each each, int64_t elements) {
  const int64_t step = int64_t{gridDim.x} * kThreadsOfEach;
  for (int64_t i = int64_t{blockIdx.x} * kThreadsOfEach + threadIdx.x; i < elements; i += step) each(i);
}

template <typename Each>
void ForEach(Each each, int64_t elements, cudaStream_t stream) {
  if (elements == 0) return;
  const int64_t blocks = std::min((elements + kThreadsOfEach - 1) / kThreadsOfEach, kMostBlocks);
  LaunchApart(Apply<Each>, blocks, kThreadsOfEach, stream, each, elements);
}

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

// Element-wise kernels of the engine. No MPI, no TensorFlow, no threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd_ext {

// The values are part of the C ABI (hvd_ext/engine/engine.py mirrors them).
enum class DType : int32_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kBytes = 6
};

// How the ranks' values become one. The values are part of the C ABI (hvd_ext/options/__init__.py mirrors them).
enum class ReduceOp : int32_t {
  kSum = 0,
  kAverage = 1,  // added up, and divided at the end
  kMin = 2,
  kMax = 3,
  kProduct = 4
};
constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                                   ReduceOp::kProduct};
const char* NameOf(ReduceOp op);  // "sum", ...; "unknown" for an unknown value

// Bytes per element; kBytes (uint8, moved but never reduced) has 1. 0 for an unknown value.
size_t SizeOf(DType dtype);
const char* NameOf(DType dtype);  // "float32", ...

// Combine, Add and Divide refuse kBytes by ending the process: the engine has refused it before.

// accumulator[i] = accumulator[i] op x[i], and the same bits if the two change places. Halves are combined in float32
// and rounded once to nearest even; integers wrap. Of a minimum or a maximum, NaN is the result where either is NaN,
// and -0 is less than 0.
void Combine(ReduceOp op, DType dtype, void* accumulator, const void* x, int64_t elements);

// Combine with the sum.
void Add(DType dtype, void* accumulator, const void* x, int64_t elements);

// data[i] /= divisor. Floats round once; halves divide in float32; integers truncate toward zero, as C++ does.
void Divide(DType dtype, void* data, int64_t divisor, int64_t elements);

// float32 that travels as halves. `wire` is float16 or bfloat16 (IsWire), others end the process as above; rounding is
// to nearest even, and beyond float16's 65504 there is only infinity.
bool IsWire(DType wire);
// to[i] = x[i] rounded, and x[i] becomes what was sent.
void Narrow(DType wire, void* to, float* x, int64_t elements);
// to[i] = x[i]
void Widen(DType wire, float* to, const void* x, int64_t elements);
// accumulator[i] += x[i], in float32
void AddWidened(DType wire, float* accumulator, const void* x, int64_t elements);
// accumulator[i] = accumulator[i] op x[i], in float32
void CombineWidened(ReduceOp op, DType wire, float* accumulator, const void* x, int64_t elements);
// x[i] = x[i] rounded
void Round(DType wire, float* x, int64_t elements);

}  // namespace hvd_ext

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

// How the values of the ranks are combined. The values are part of the C ABI (hvd_ext/options/__init__.py mirrors
// them).
enum class ReduceOp : int32_t {
  kSum = 0,
  kAverage = 1,  // the sum, divided at the end
  kMin = 2,
  kMax = 3,
  kProduct = 4
};
constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                                   ReduceOp::kProduct};
const char* NameOf(ReduceOp op);  // "sum", ...; "unknown" for an unknown value

// Bytes per element: 1 for kBytes (uint8, which is moved but never reduced), and 0 for an unknown value.
size_t SizeOf(DType dtype);
const char* NameOf(DType dtype);  // "float32", ...

// Combine, Add and Divide abort the process if they are given kBytes: the engine refuses it before it calls them.

// accumulator[i] = accumulator[i] op x[i]. Exchanging the two operands gives the same bits. Halves are combined in
// float32 and rounded once, to nearest even; integers wrap around. A minimum or a maximum is NaN where either operand
// is NaN, and -0 is less than 0.
void Combine(ReduceOp op, DType dtype, void* accumulator, const void* x, int64_t elements);

// Combine with ReduceOp::kSum.
void Add(DType dtype, void* accumulator, const void* x, int64_t elements);

// data[i] /= divisor. Floats round once; halves divide in float32; integers truncate toward zero, as C++ does.
void Divide(DType dtype, void* data, int64_t divisor, int64_t elements);

// Conversions for float32 values that are sent as halves. `wire` is float16 or bfloat16 (see IsWire); any other dtype
// aborts the process. Rounding is to nearest even. A float16 holds x / scale, where the scale is a power of two from 1
// on, so that values up to 65504 * scale can be sent, and those beyond become infinity. bfloat16 ignores the scale.
bool IsWire(DType wire);
// to[i] = x[i] / scale rounded, and x[i] becomes the value that was sent, so that the sender keeps what it sends.
void Narrow(DType wire, void* to, float* x, int64_t elements, float scale = 1);
// to[i] = x[i] * scale
void Widen(DType wire, float* to, const void* x, int64_t elements, float scale = 1);
// accumulator[i] += x[i] * scale, in float32
void AddWidened(DType wire, float* accumulator, const void* x, int64_t elements, float scale = 1);
// accumulator[i] = accumulator[i] op x[i], in float32; without a scale
void CombineWidened(ReduceOp op, DType wire, float* accumulator, const void* x, int64_t elements);
// x[i] = x[i] rounded, as Narrow does
void Round(DType wire, float* x, int64_t elements, float scale = 1);

}  // namespace hvd_ext

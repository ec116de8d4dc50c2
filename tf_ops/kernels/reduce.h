// Element-wise kernels of the engine. No MPI, no TensorFlow, no threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd_ext {

// The values are part of the C ABI (hvd_ext/engine.py mirrors them).
enum class DType : int32_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kBytes = 6
};

// Bytes per element; kBytes (uint8, moved but never reduced) has 1. 0 for an unknown value.
size_t SizeOf(DType dtype);
const char* NameOf(DType dtype);  // "float32", ...

// Add and Divide refuse kBytes by ending the process: the engine has refused it before.

// accumulator[i] += x[i]. Halves are added in float32 and rounded once to nearest even; integers wrap.
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
// x[i] = x[i] rounded
void Round(DType wire, float* x, int64_t elements);

}  // namespace hvd_ext

// From a dtype to the C++ type of its elements.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext {

// Ends the process: `what` cannot be done with the dtype.
[[noreturn]] inline void Refuse(const char* what, DType dtype) {
  std::fprintf(stderr, "hvd_ext: %s %d: a bug, callers must refuse it\n", what, static_cast<int>(dtype));
  std::abort();
}

// Calls body(T()) for the type T of a floating-point dtype's elements. For other dtypes the process is ended, with the
// words `what`.
template <typename Body>
void WithFloat(const char* what, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float());
    case DType::kFloat64:
      return body(double());
    case DType::kFloat16:
      return body(Float16());
    case DType::kBFloat16:
      return body(BFloat16());
    default:
      Refuse(what, dtype);
  }
}

// The same for the dtypes of numbers.
template <typename Body>
void WithNumber(const char* what, DType dtype, const Body& body) {
  if (dtype == DType::kInt32) return body(int32_t());
  if (dtype == DType::kInt64) return body(int64_t());
  WithFloat(what, dtype, body);
}

// The same for the dtypes of messages.
template <typename Body>
void WithHalf(const char* what, DType dtype, const Body& body) {
  if (dtype == DType::kFloat16) return body(Float16());
  if (dtype == DType::kBFloat16) return body(BFloat16());
  Refuse(what, dtype);
}

}  // namespace hvd_ext

// TensorFlow's dtypes in the engine's words.
#pragma once

#include "kernels/reduce.h"
#include "tensorflow/core/framework/types.h"

namespace hvd_ext {

// The ops' attribute T admits these types only. uint8 is moved as bytes and never reduced.
inline DType FromTensorFlow(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_FLOAT:
      return DType::kFloat32;
    case tensorflow::DT_DOUBLE:
      return DType::kFloat64;
    case tensorflow::DT_HALF:
      return DType::kFloat16;
    case tensorflow::DT_BFLOAT16:
      return DType::kBFloat16;
    case tensorflow::DT_INT32:
      return DType::kInt32;
    case tensorflow::DT_INT64:
      return DType::kInt64;
    default:
      return DType::kBytes;
  }
}

}  // namespace hvd_ext

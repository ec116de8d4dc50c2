// What the kernels and definitions of the data ops share, on TensorFlow's C API alone: a library of these ops that was
// built on one TensorFlow runs on others.
//
// The ops are registered as stateless, since tf.data refuses to save iterators whose functions hold stateful ops. What
// keeps them from being merged or folded is their inputs: see the Python faces (hvd_ext/data/native.py).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_datatype.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"
#include "tensorflow/c/tf_tstring.h"

namespace hvd_ext {

template <auto kDelete>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    kDelete(object);
  }
};
using TensorPointer = std::unique_ptr<TF_Tensor, Deleter<TF_DeleteTensor>>;
using StatusPointer = std::unique_ptr<TF_Status, Deleter<TF_DeleteStatus>>;
using ShapePointer = std::unique_ptr<TF_ShapeHandle, Deleter<TF_DeleteShapeHandle>>;

// One run of a kernel. The first failure is the one that TensorFlow is told of, when the run ends; after it the
// accessors return null or 0.
class Run {
 public:
  explicit Run(TF_OpKernelContext* context) : context_(context), status_(TF_NewStatus()) {}
  ~Run() {
    if (!ok()) TF_OpKernelContext_Failure(context_, status_.get());
  }
  Run(const Run&) = delete;

  bool ok() const { return TF_GetCode(status_.get()) == TF_OK; }
  void Fail(TF_Code code, const std::string& words);
  void Take(const Status& status);  // fails where the status does

  // The input at an index; it lives until the run ends. `name` is for messages.
  const TF_Tensor* Input(int index);
  const TF_Tensor* Vector(int index, const char* name);
  int64_t Scalar(int index, const char* name);  // of type int64
  const TF_TString* StringScalar(int index, const char* name);
  // A new output, whose memory is not set unless it holds strings, which are empty.
  TF_Tensor* Output(int index, TF_DataType dtype, std::initializer_list<int64_t> dims);
  // An output that is there already; null fails, for want of memory.
  TF_Tensor* Output(int index, TensorPointer tensor);
  // A new output with these numbers.
  void Output(int index, const std::vector<int64_t>& numbers);

 private:
  // The input, if it has this rank; `must` says what it must be.
  const TF_Tensor* Ranked(int index, const char* name, int rank, const char* must);

  TF_OpKernelContext* const context_;
  const StatusPointer status_;
  std::vector<TensorPointer> held_;
};

// As in "[2, 3]".
std::string ShapeOf(const TF_Tensor* tensor);

template <typename T>
T* DataOf(const TF_Tensor* tensor) {
  return static_cast<T*>(TF_TensorData(tensor));
}

// One op: its definition and its kernel for the CPU. A kernel may be null.
struct OpCard {
  const char* name;
  std::initializer_list<const char*> inputs, outputs, attributes;
  void (*shapes)(TF_ShapeInferenceContext*, TF_Status*);
  void* (*make)(TF_OpKernelConstruction*);
  void (*run)(void* kernel, TF_OpKernelContext*);
  void (*drop)(void* kernel);
};

// For OpCard::make and OpCard::drop of a kernel that is a bool, the value of its one attribute.
void* MakeFlag(TF_OpKernelConstruction* construction, const char* attribute);
void DropFlag(void* kernel);

// Registers an op while the library is being loaded; returns true. An op that TensorFlow does not take ends the process
// with TensorFlow's words, as TensorFlow's own macros do.
bool Register(const OpCard& card);

// --- shapes. TensorFlow's C API reaches inputs and outputs other than the first in its latest versions only, and
// neither lists of attributes nor the number of outputs. So the input that shapes depend on comes first, the shape of
// an output that cannot be set stays unknown, and the Python faces, which know all of it, set shapes where they are
// static.

// The shape of the first input, which must have this rank; null and a failed status otherwise.
ShapePointer FirstInput(TF_ShapeInferenceContext* context, int64_t rank, TF_Status* status);
// A vector; a negative size is unknown.
ShapePointer VectorOf(TF_ShapeInferenceContext* context, int64_t size);
ShapePointer Concatenated(TF_ShapeInferenceContext* context, TF_ShapeHandle* first, TF_ShapeHandle* second,
                          TF_Status* status);
// Sets an output's shape; returns false where the output cannot be reached.
bool SetOutput(TF_ShapeInferenceContext* context, int index, TF_ShapeHandle* shape);

}  // namespace hvd_ext

#include "ops/data/capi.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hvd_ext {
namespace {

// As tf_ops/ops/status.h has it.
TF_Code CodeOf(Code code) {
  switch (code) {
    case Code::kOk:
      return TF_OK;
    case Code::kInvalid:
      return TF_INVALID_ARGUMENT;
    case Code::kMismatch:
      return TF_FAILED_PRECONDITION;
    case Code::kCommunication:
      return TF_UNKNOWN;
    case Code::kStopped:
      return TF_ABORTED;
    default:
      return TF_INTERNAL;
  }
}

void EndIfFailed(const TF_Status* status, const char* name) {
  if (TF_GetCode(status) == TF_OK) return;
  std::fprintf(stderr, "hvd_ext: TensorFlow does not take the op %s: %s\n", name, TF_Message(status));
  std::abort();
}

}  // namespace

std::string ShapeOf(const TF_Tensor* tensor) {
  std::string text = "[";
  for (int i = 0; i < TF_NumDims(tensor); ++i) text += (i ? ", " : "") + std::to_string(TF_Dim(tensor, i));
  return text + "]";
}

void Run::Fail(TF_Code code, const std::string& words) {
  if (ok()) TF_SetStatus(status_.get(), code, words.c_str());
}

void Run::Take(const Status& status) {
  if (!status.ok()) Fail(CodeOf(status.code), status.message);
}

const TF_Tensor* Run::Input(int index) {
  if (!ok()) return nullptr;
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context_, index, &tensor, status_.get());
  if (!ok()) return nullptr;
  held_.emplace_back(tensor);
  return tensor;
}

const TF_Tensor* Run::Ranked(int index, const char* name, int rank, const char* must) {
  const TF_Tensor* tensor = Input(index);
  if (tensor == nullptr || TF_NumDims(tensor) == rank) return tensor;
  Fail(TF_INVALID_ARGUMENT, std::string(name) + " (shape " + ShapeOf(tensor) + "): must be a " + must);
  return nullptr;
}

const TF_Tensor* Run::Vector(int index, const char* name) { return Ranked(index, name, 1, "vector"); }

int64_t Run::Scalar(int index, const char* name) {
  const TF_Tensor* tensor = Ranked(index, name, 0, "single number");
  return tensor == nullptr ? 0 : *DataOf<const int64_t>(tensor);
}

const TF_TString* Run::StringScalar(int index, const char* name) {
  const TF_Tensor* tensor = Ranked(index, name, 0, "single string");
  return tensor == nullptr ? nullptr : DataOf<const TF_TString>(tensor);
}

TF_Tensor* Run::Output(int index, TF_DataType dtype, std::initializer_list<int64_t> dims) {
  if (!ok()) return nullptr;
  size_t nbytes = dtype == TF_STRING ? sizeof(TF_TString) : TF_DataTypeSize(dtype);
  for (int64_t dim : dims) nbytes *= static_cast<size_t>(dim);
  TF_Tensor* tensor =
      TF_AllocateOutput(context_, index, dtype, dims.begin(), static_cast<int>(dims.size()), nbytes, status_.get());
  if (tensor != nullptr) held_.emplace_back(tensor);
  return ok() ? tensor : nullptr;
}

TF_Tensor* Run::Output(int index, TensorPointer tensor) {
  if (tensor == nullptr) Fail(TF_RESOURCE_EXHAUSTED, "there is no memory for output " + std::to_string(index));
  if (ok()) TF_SetOutput(context_, index, tensor.get(), status_.get());
  if (!ok()) return nullptr;
  held_.push_back(std::move(tensor));
  return held_.back().get();
}

void Run::Output(int index, const std::vector<int64_t>& numbers) {
  TF_Tensor* tensor = Output(index, TF_INT64, {static_cast<int64_t>(numbers.size())});
  if (tensor == nullptr || numbers.empty()) return;
  std::memcpy(TF_TensorData(tensor), numbers.data(), numbers.size() * sizeof(int64_t));
}

void* MakeFlag(TF_OpKernelConstruction* construction, const char* attribute) {
  StatusPointer status(TF_NewStatus());
  TF_Bool flag = 0;
  TF_OpKernelConstruction_GetAttrBool(construction, attribute, &flag, status.get());
  if (TF_GetCode(status.get()) != TF_OK) TF_OpKernelConstruction_Failure(construction, status.get());
  return new bool(flag != 0);
}

void DropFlag(void* kernel) { delete static_cast<bool*>(kernel); }

bool Register(const OpCard& card) {
  StatusPointer status(TF_NewStatus());
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(card.name);
  for (const char* attribute : card.attributes) TF_OpDefinitionBuilderAddAttr(op, attribute);
  for (const char* input : card.inputs) TF_OpDefinitionBuilderAddInput(op, input);
  for (const char* output : card.outputs) TF_OpDefinitionBuilderAddOutput(op, output);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, card.shapes);
  TF_RegisterOpDefinition(op, status.get());
  EndIfFailed(status.get(), card.name);
  TF_KernelBuilder* kernel = TF_NewKernelBuilder(card.name, "CPU", card.make, card.run, card.drop);
  TF_RegisterKernelBuilder(card.name, kernel, status.get());
  EndIfFailed(status.get(), card.name);
  return true;
}

ShapePointer FirstInput(TF_ShapeInferenceContext* context, int64_t rank, TF_Status* status) {
  ShapePointer shape(TF_NewShapeHandle()), ranked(TF_NewShapeHandle());
  TF_ShapeInferenceContextGetInput(context, 0, shape.get(), status);
  if (TF_GetCode(status) != TF_OK) return nullptr;
  TF_ShapeInferenceContextWithRank(context, shape.get(), rank, ranked.get(), status);
  return TF_GetCode(status) == TF_OK ? std::move(ranked) : nullptr;
}

ShapePointer VectorOf(TF_ShapeInferenceContext* context, int64_t size) {
  return ShapePointer(TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(size)));
}

ShapePointer Concatenated(TF_ShapeInferenceContext* context, TF_ShapeHandle* first, TF_ShapeHandle* second,
                          TF_Status* status) {
  ShapePointer shape(TF_NewShapeHandle());
  TF_ShapeInferenceContextConcatenateShapes(context, first, second, shape.get(), status);
  return TF_GetCode(status) == TF_OK ? std::move(shape) : nullptr;
}

bool SetOutput(TF_ShapeInferenceContext* context, int index, TF_ShapeHandle* shape) {
  StatusPointer status(TF_NewStatus());
  TF_ShapeInferenceContextSetOutput(context, index, shape, status.get());
  return TF_GetCode(status.get()) == TF_OK;
}

}  // namespace hvd_ext

#include <cstring>

#include "engine/codec.h"

namespace hvd_ext {
namespace {

class Plain : public DenseCodec {
 public:
  Plain(DType dtype, ReduceOp op) : dtype_(dtype), op_(op) {}

  bool IsPlain() const override { return true; }
  int64_t Nbytes(int64_t elements) const override { return elements * static_cast<int64_t>(SizeOf(dtype_)); }
  void Write(Queue* queue, char* message, char* data, int64_t elements, int32_t) const override {
    queue->Copy(message, data, Nbytes(elements));
  }
  void Read(Queue* queue, const char* message, char* data, int64_t elements) const override {
    queue->Copy(data, message, Nbytes(elements));
  }
  void Combine(Queue* queue, const char* message, char* data, int64_t elements) const override {
    queue->Combine(op_, dtype_, data, message, elements);
  }
  void Finish(Queue*, char*, int64_t, int) const override {}

 private:
  const DType dtype_;
  const ReduceOp op_;
};

// Sums that are sent as float16 are scaled. A sum of n values is sent divided by a power of two from n on, and so does
// not leave float16's range where the values are in it; their number is sent behind it. Scaling by the number of values
// that a message holds, and not by that of the ranks, keeps the small values of the first rounds out of float16's
// denormals.
class Half : public DenseCodec {
 public:
  Half(DType wire, ReduceOp op)
      : wire_(wire), op_(op), scales_(wire == DType::kFloat16 && (op == ReduceOp::kSum || op == ReduceOp::kAverage)) {}

  bool CountsTerms() const override { return scales_; }
  int64_t Nbytes(int64_t elements) const override {
    return 2 * elements + (scales_ ? static_cast<int64_t>(sizeof(int32_t)) : 0);
  }
  void Write(Queue* queue, char* message, char* data, int64_t elements, int32_t terms) const override {
    if (scales_) std::memcpy(message + 2 * elements, &terms, sizeof(terms));
    queue->Narrow(wire_, message, Floats(data), elements, Scale(terms));
  }
  int32_t Terms(const char* message, int64_t elements) const override {
    int32_t terms = 1;
    if (scales_) std::memcpy(&terms, message + 2 * elements, sizeof(terms));
    return terms;
  }
  void Read(Queue* queue, const char* message, char* data, int64_t elements) const override {
    queue->Widen(wire_, Floats(data), message, elements, Scale(Terms(message, elements)));
  }
  void Combine(Queue* queue, const char* message, char* data, int64_t elements) const override {
    if (!scales_) return queue->CombineWidened(op_, wire_, Floats(data), message, elements);
    queue->AddWidened(wire_, Floats(data), message, elements, Scale(Terms(message, elements)));
  }
  void Finish(Queue* queue, char* data, int64_t elements, int ranks) const override {
    queue->Round(wire_, Floats(data), elements, Scale(ranks));
  }

 private:
  static float* Floats(char* data) { return reinterpret_cast<float*>(data); }
  float Scale(int32_t terms) const {
    float scale = 1;
    while (scales_ && scale < static_cast<float>(terms)) scale *= 2;
    return scale;
  }

  const DType wire_;
  const ReduceOp op_;
  const bool scales_;
};

}  // namespace

std::unique_ptr<const DenseCodec> MakeDenseCodec(DType dtype, std::optional<DType> wire, ReduceOp op) {
  if (!wire) return std::make_unique<Plain>(dtype, op);
  return std::make_unique<Half>(*wire, op);
}

}  // namespace hvd_ext

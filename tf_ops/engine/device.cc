#include "engine/device.h"

#include <cstring>
#include <new>

namespace hvd_ext {
namespace {

class HostQueue : public Queue {
 public:
  int64_t Last() override { return 0; }
  bool Done(int64_t) override { return true; }

  void Follow(void*) override {}
  void Lead(void*) override {}
  void Copy(void* to, const void* from, int64_t nbytes) override {
    if (nbytes > 0) std::memcpy(to, from, static_cast<size_t>(nbytes));
  }
  void Combine(ReduceOp op, DType dtype, void* data, const void* message, int64_t elements) override {
    hvd_ext::Combine(op, dtype, data, message, elements);
  }
  void Divide(DType dtype, void* data, int64_t divisor, int64_t elements) override {
    hvd_ext::Divide(dtype, data, divisor, elements);
  }
  void Narrow(DType wire, void* message, float* data, int64_t elements, float scale) override {
    hvd_ext::Narrow(wire, message, data, elements, scale);
  }
  void Widen(DType wire, float* data, const void* message, int64_t elements, float scale) override {
    hvd_ext::Widen(wire, data, message, elements, scale);
  }
  void AddWidened(DType wire, float* data, const void* message, int64_t elements, float scale) override {
    hvd_ext::AddWidened(wire, data, message, elements, scale);
  }
  void CombineWidened(ReduceOp op, DType wire, float* data, const void* message, int64_t elements) override {
    hvd_ext::CombineWidened(op, wire, data, message, elements);
  }
  void Round(DType wire, float* data, int64_t elements, float scale) override {
    hvd_ext::Round(wire, data, elements, scale);
  }

  void Clear(void* data, int64_t nbytes) override {
    if (nbytes > 0) std::memset(data, 0, static_cast<size_t>(nbytes));
  }
  void AddEntries(float* data, int64_t, int64_t base, const int32_t* positions, const float* values,
                  int64_t count) override {
    for (int64_t i = 0; i < count; ++i) data[positions[i] - base] += values[i];
  }
  void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated) override {
    hvd_ext::Accumulate(feedback, elements, accumulated, nullptr);
  }
  void TopKErrorFeedback(const Selection& selection, TopKScratch* scratch, char*, int64_t* counts, int32_t* positions,
                         float* values, int32_t* non_finite) override {
    bool seen = false;
    hvd_ext::TopKErrorFeedback(selection.options, selection.feedback, selection.segments.data(),
                               static_cast<int64_t>(selection.segments.size()), scratch, nullptr, counts, positions,
                               /*wide=*/false, values, &seen);
    *non_finite = seen;
  }
};

class TheHost : public Device {
 public:
  bool IsHost() const override { return true; }
  Queue* queue(int) override { return &queue_; }
  bool Selects(Selector) const override { return true; }
  char* Allocate(int64_t nbytes) override {
    return static_cast<char*>(::operator new(static_cast<size_t>(nbytes), kAlignment));
  }
  void Free(char* data) override { ::operator delete(data, kAlignment); }
  void Pin(char*, int64_t) override {}
  void Unpin(char*) override {}

 private:
  static constexpr std::align_val_t kAlignment{64};  // a cache line, and the widest vector
  HostQueue queue_;
};

}  // namespace

// Never destroyed: buffers may outlive static objects.
const std::shared_ptr<Device>& HostDevice() {
  static const auto* host = new std::shared_ptr<Device>(std::make_shared<TheHost>());
  return *host;
}

}  // namespace hvd_ext

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
};

class TheHost : public Device {
 public:
  bool IsHost() const override { return true; }
  Queue* queue(int) override { return &queue_; }
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

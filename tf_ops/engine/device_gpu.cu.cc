// Each queue is a stream, and an event follows each operation: Done asks the events, and never waits. Kernels and
// copies reach messages where they lie, in registered host memory, so that a sum reads them once across the bus, or in
// memory of a GPU that another process has shared (CUDA IPC).
#include "engine/device_gpu.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/feedback_gpu.h"
#include "kernels/reduce_gpu.h"
#include "kernels/topk_gpu.h"

namespace hvd_ext {
namespace {

void Must(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // an error that was told is not told again
  throw std::runtime_error(std::string("GPU: ") + call + ": " + cudaGetErrorName(code) + " (" +
                           cudaGetErrorString(code) + ")");
}
#define HVD_EXT_MUST(call) Must((call), #call)

// The calls of this thread are for a GPU while it lives.
class On {
 public:
  explicit On(int gpu) {
    HVD_EXT_MUST(cudaGetDevice(&before_));
    if (before_ == gpu) return;
    HVD_EXT_MUST(cudaSetDevice(gpu));
    changed_ = true;
  }
  ~On() {
    if (changed_) cudaSetDevice(before_);
  }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// The workspace of a selection: its picks, before they are copied into messages, and what the kernels need.
struct SelectionPlaces {
  explicit SelectionPlaces(const Selection& selection) {
    for (const TopKSegment& segment : selection.segments) {
      segments.push_back({segment.begin, segment.elements, segment.k});
    }
    values = Part(4 * selection.picks());
    non_finite = Part(4 * selection.picks());
    kernels = Part(sizeof(int32_t));
    const int64_t count = static_cast<int64_t>(segments.size());
    kernels_nbytes = hvd_ext_topk_gpu_workspace(static_cast<int32_t>(DType::kFloat32), segments.data(), count);
    if (kernels_nbytes < 0) throw std::runtime_error(std::string("GPU: ") + hvd_ext_topk_gpu_error());
    nbytes += kernels_nbytes;
  }

  std::vector<HvdExtTopKSegment> segments;
  int64_t nbytes = 0;  // of all
  // Where the parts begin; the positions do first.
  int64_t values = 0, non_finite = 0, kernels = 0;
  int64_t kernels_nbytes = 0;

 private:
  // Ends the part under way, and returns where the next one begins.
  int64_t Part(int64_t part_nbytes) {
    nbytes += (part_nbytes + 255) / 256 * 256;
    return nbytes;
  }
};

class GpuQueue : public Queue {
 public:
  explicit GpuQueue(int gpu) : gpu_(gpu) {
    const On on(gpu_);
    HVD_EXT_MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~GpuQueue() override {  // a GPU that has failed cannot free anything
    cudaStreamSynchronize(stream_);
    for (const Operation& operation : open_) cudaEventDestroy(operation.ended);
    for (cudaEvent_t event : idle_) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }

  int64_t Last() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }
  bool Done(int64_t number) override {
    std::lock_guard<std::mutex> lock(mutex_);
    while (done_ < number && !open_.empty()) {
      const cudaError_t code = cudaEventQuery(open_.front().ended);
      if (code == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
      }
      Must(code, "an operation");
      done_ = open_.front().number;
      idle_.push_back(open_.front().ended);
      open_.pop_front();
    }
    return done_ >= number;
  }

  void Follow(void* stream) override {
    Between([&](cudaEvent_t event) {
      HVD_EXT_MUST(cudaEventRecord(event, static_cast<cudaStream_t>(stream)));
      HVD_EXT_MUST(cudaStreamWaitEvent(stream_, event));
    });
  }
  void Lead(void* stream) override {
    Between([&](cudaEvent_t event) {
      HVD_EXT_MUST(cudaEventRecord(event, stream_));
      HVD_EXT_MUST(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event));
    });
  }
  void Copy(void* to, const void* from, int64_t nbytes) override {
    Push(nbytes,
         [&] { HVD_EXT_MUST(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes), cudaMemcpyDefault, stream_)); });
  }
  void Combine(ReduceOp op, DType dtype, void* data, const void* message, int64_t elements) override {
    Push(elements, [&] { gpu::Combine(op, dtype, data, message, elements, stream_); });
  }
  void Divide(DType dtype, void* data, int64_t divisor, int64_t elements) override {
    Push(elements, [&] { gpu::Divide(dtype, data, divisor, elements, stream_); });
  }
  void Narrow(DType wire, void* message, float* data, int64_t elements, float scale) override {
    Push(elements, [&] { gpu::Narrow(wire, message, data, elements, scale, stream_); });
  }
  void Widen(DType wire, float* data, const void* message, int64_t elements, float scale) override {
    Push(elements, [&] { gpu::Widen(wire, data, message, elements, scale, stream_); });
  }
  void AddWidened(DType wire, float* data, const void* message, int64_t elements, float scale) override {
    Push(elements, [&] { gpu::AddWidened(wire, data, message, elements, scale, stream_); });
  }
  void CombineWidened(ReduceOp op, DType wire, float* data, const void* message, int64_t elements) override {
    Push(elements, [&] { gpu::CombineWidened(op, wire, data, message, elements, stream_); });
  }
  void Round(DType wire, float* data, int64_t elements, float scale) override {
    Push(elements, [&] { gpu::Round(wire, data, elements, scale, stream_); });
  }

  void Clear(void* data, int64_t nbytes) override {
    Push(nbytes, [&] { HVD_EXT_MUST(cudaMemsetAsync(data, 0, static_cast<size_t>(nbytes), stream_)); });
  }
  void AddEntries(float* data, int64_t, int64_t base, const int32_t* positions, const float* values,
                  int64_t count) override {
    Push(count, [&] { gpu::AddEntries(data, base, positions, values, count, stream_); });
  }
  void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated) override {
    Push(elements, [&] { gpu::Accumulate(feedback, elements, accumulated, stream_); });
  }
  void TopKErrorFeedback(const Selection& selection, TopKScratch*, char* workspace, int64_t* counts, int32_t* positions,
                         float* values, int32_t* non_finite) override {
    const SelectionPlaces places(selection);
    const ErrorFeedback& feedback = selection.feedback;
    const int64_t picks = selection.picks(), segments = static_cast<int64_t>(places.segments.size());
    for (int64_t s = 0; s < segments; ++s) counts[s] = places.segments[static_cast<size_t>(s)].k;
    auto* picked = reinterpret_cast<int32_t*>(workspace);
    auto* flag = reinterpret_cast<int32_t*>(workspace + places.non_finite);
    const auto copy = [this](void* to, const void* from, int64_t nbytes) {
      if (nbytes == 0) return;
      HVD_EXT_MUST(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes), cudaMemcpyDefault, stream_));
    };
    Push(1, [&] {
      gpu::Accumulate(feedback, selection.elements(), feedback.next_residual, stream_);
      const int code = hvd_ext_topk_gpu(static_cast<int32_t>(DType::kFloat32), feedback.next_residual,
                                        places.segments.data(), segments, picked, /*wide=*/0, workspace + places.values,
                                        flag, workspace + places.kernels, places.kernels_nbytes, stream_);
      if (code != 0) throw std::runtime_error(std::string("GPU: ") + hvd_ext_topk_gpu_error());
      gpu::Take(feedback, picked, picks, stream_);
      copy(positions, picked, 4 * picks);
      copy(values, workspace + places.values, 4 * picks);
      copy(non_finite, flag, sizeof(int32_t));
    });
  }

  void Wait() { cudaStreamSynchronize(stream_); }

 private:
  struct Operation {
    int64_t number;
    cudaEvent_t ended;
  };

  template <typename Start>
  void Push(int64_t elements, const Start& start) {
    if (elements == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const On on(gpu_);
    AddIdle();
    start();
    HVD_EXT_MUST(cudaGetLastError());
    HVD_EXT_MUST(cudaEventRecord(idle_.back(), stream_));
    open_.push_back({++last_, idle_.back()});
    idle_.pop_back();
  }

  // Has an event record and awaited at once; it may be used again then, since the wait is for its newest record so far.
  template <typename Join>
  void Between(const Join& join) {
    std::lock_guard<std::mutex> lock(mutex_);
    const On on(gpu_);
    AddIdle();
    join(idle_.back());
  }

  void AddIdle() {
    if (!idle_.empty()) return;
    cudaEvent_t event = nullptr;
    HVD_EXT_MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    idle_.push_back(event);
  }

  const int gpu_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  int64_t last_ = 0, done_ = 0;
  std::deque<Operation> open_;     // of which Done has not seen the end
  std::vector<cudaEvent_t> idle_;  // events to use again
};

// How often each block of host memory is pinned: the engines of a process may have one arena, and CUDA registers memory
// once.
struct Pins {
  std::mutex mutex;
  std::map<const char*, int> counts;
};
Pins& ThePins() {
  static auto* pins = new Pins;
  return *pins;
}

// Of a block's name. A process cannot open a handle of its own, and needs none.
struct SharedBlock {
  std::array<uint32_t, 4> process;
  char* data;
  cudaIpcMemHandle_t handle;
};
static_assert(sizeof(SharedBlock) == sizeof(Device::BlockName), "a name holds one");

const std::array<uint32_t, 4>& ThisProcess() {
  static const std::array<uint32_t, 4> process = [] {
    std::random_device random;
    return std::array<uint32_t, 4>{random(), random(), random(), random()};
  }();
  return process;
}

class GpuDevice : public Device {
 public:
  explicit GpuDevice(int gpu) : gpu_(gpu) {
    const On on(gpu_);
    int reaches = 0;
    HVD_EXT_MUST(cudaDeviceGetAttribute(&reaches, cudaDevAttrCanUseHostPointerForRegisteredMem, gpu_));
    if (reaches == 0) throw std::runtime_error("GPU: it does not reach registered host memory at the host's addresses");
    std::array<char, 32> bus{};
    HVD_EXT_MUST(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), gpu_));
    bus_ = bus.data();
    for (int i = 0; i < kQueues; ++i) queues_.push_back(std::make_unique<GpuQueue>(gpu_));
  }

  Queue* queue(int number) override { return queues_[static_cast<size_t>(number)].get(); }
  int64_t WorkspaceNbytes(const Selection& selection) override { return SelectionPlaces(selection).nbytes; }

  char* Allocate(int64_t nbytes) override {
    const On on(gpu_);
    void* data = nullptr;
    nbytes = (nbytes > 0 ? nbytes + kGrain - 1 : kGrain) / kGrain * kGrain;
    const cudaError_t code = cudaMalloc(&data, static_cast<size_t>(nbytes));
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    Must(code, "cudaMalloc");
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<char*>(data)].nbytes = nbytes;
    return static_cast<char*>(data);
  }
  // Free and Unpin are called by destructors, and a GPU that has failed frees nothing: codes are not looked at.
  void Free(char* data) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = blocks_.find(data);
      if (found != blocks_.end() && found->second.shares) {
        found->second.is_freed = true;
        return;
      }
      blocks_.erase(data);
    }
    cudaFree(data);  // it waits
    cudaGetLastError();
  }

  bool Share(const void* data, BlockName* name, int64_t* offset) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const char* at = static_cast<const char*>(data);
    const auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) return false;
    auto& [begin, block] = *std::prev(after);
    if (at >= begin + block.nbytes) return false;
    if (!block.shares) {
      const On on(gpu_);
      SharedBlock shared{ThisProcess(), const_cast<char*>(begin), {}};
      if (cudaIpcGetMemHandle(&shared.handle, shared.data) != cudaSuccess) {  // as in some containers
        cudaGetLastError();
        return false;
      }
      std::memcpy(block.name.bytes.data(), &shared, sizeof(shared));
      block.shares = true;
    }
    *name = block.name;
    *offset = at - begin;
    return true;
  }
  void Unshare(const BlockName& name) override {
    char* data = BlockOf(name).data;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = blocks_.find(data);
      if (found == blocks_.end()) return;
      found->second.shares = false;
      if (!found->second.is_freed) return;
    }
    Free(data);
  }
  char* Reach(const BlockName& name) override {
    const SharedBlock block = BlockOf(name);
    if (block.process == ThisProcess()) return block.data;
    const On on(gpu_);
    void* reached = nullptr;
    if (cudaIpcOpenMemHandle(&reached, block.handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    opened_.insert(reached);
    return static_cast<char*>(reached);
  }
  std::string Name() const override { return bus_; }
  Medium MediumTo(const char* reached) override {
    // The bus has no atomics. A GPU that this process does not see has no number here, and is taken for one behind it.
    const On on(gpu_);
    cudaPointerAttributes attributes{};
    int atomics = 0;
    const bool known = cudaPointerGetAttributes(&attributes, reached) == cudaSuccess && attributes.device != gpu_ &&
                       cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, gpu_,
                                                 attributes.device) == cudaSuccess;
    cudaGetLastError();
    return known && atomics != 0 ? Medium::kNvlink : Medium::kPcie;
  }
  void Leave(char* reached) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (opened_.erase(reached) == 0) return;
    }
    const On on(gpu_);
    cudaIpcCloseMemHandle(reached);
    cudaGetLastError();
  }

  void Pin(char* data, int64_t nbytes) override {
    const On on(gpu_);
    std::lock_guard<std::mutex> lock(ThePins().mutex);
    if (ThePins().counts[data]++ > 0) return;
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    const cudaError_t code = cudaHostRegister(data, static_cast<size_t>(nbytes), flags);
    if (code != cudaSuccess) ThePins().counts.erase(data);
    Must(code, "cudaHostRegister");
  }
  void Unpin(char* data) override {
    for (const auto& queue : queues_) queue->Wait();
    std::lock_guard<std::mutex> lock(ThePins().mutex);
    const auto found = ThePins().counts.find(data);
    if (found == ThePins().counts.end() || --found->second > 0) return;
    ThePins().counts.erase(found);
    cudaHostUnregister(data);
    cudaGetLastError();
  }

 private:
  static constexpr int64_t kGrain = gpu::kSharedNbytes;
  struct Block {
    int64_t nbytes = 0;
    BlockName name;  // where it is shared
    bool shares = false, is_freed = false;
  };

  static SharedBlock BlockOf(const BlockName& name) {
    SharedBlock block;
    std::memcpy(&block, name.bytes.data(), sizeof(block));
    return block;
  }

  const int gpu_;
  std::string bus_;  // its place in the host
  std::vector<std::unique_ptr<GpuQueue>> queues_;
  std::mutex mutex_;
  std::map<const char*, Block> blocks_;
  std::set<void*> opened_;
};

}  // namespace

std::shared_ptr<Device> MakeGpuDevice(int gpu) { return std::make_shared<GpuDevice>(gpu); }

}  // namespace hvd_ext

int64_t hvd_ext_gpu_version(void) { return hvd_ext::kGpuVersion; }

const char* hvd_ext_gpu_device(int gpu, std::shared_ptr<hvd_ext::Device>* device) {
  thread_local std::string error;
  try {
    *device = hvd_ext::MakeGpuDevice(gpu);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

#include "gpu/cuda_stand_in.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace hvd_ext::gpu::stand_in {
namespace {

constexpr int64_t kPage = 4096, kSpaceNbytes = int64_t{1} << 36;
// An operation in four sleeps before it runs, at the longest for this time.
constexpr unsigned kSleeps = 4, kLongest_us = 100;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

// The GPUs, each with what joins it to each of them.
const std::vector<std::string>& Gpus() {
  static const std::vector<std::string> gpus = [] {
    const char* told = std::getenv("HVD_EXT_STAND_IN_GPUS");
    std::istringstream words(told == nullptr ? "nn nn" : told);
    return std::vector<std::string>(std::istream_iterator<std::string>(words), {});
  }();
  return gpus;
}

cudaError_t Told(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

// What waits for an event waits for its newest record at that time, whatever records follow.
struct Record {
  bool ended = false;
};

// Memory that an operation uses.
struct Use {
  const char* data;
  int64_t nbytes;
};

struct Operation {
  std::function<void()> run;  // null for a wait
  std::vector<Use> uses;
  std::shared_ptr<Record> record;  // that this waits for, or makes
};

struct Stream {
  std::deque<Operation> operations;  // the first may be running
};

class Machine {
 public:
  static Machine& Get() {
    static auto* machine = new Machine;  // its thread runs to the end of the process
    return *machine;
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::map<char*, int64_t> blocks, ranges;          // of the device; of the host, registered
  std::map<char*, int> gpus;                        // of each block
  std::map<char*, std::pair<int, int64_t>> opened;  // blocks of other processes: the file, and where the count is
  std::set<Stream*> streams;
  std::map<void*, std::shared_ptr<Record>> events;  // each with its newest record
  int64_t limit = kSpaceNbytes, taken = 0;
  bool holds = false;
  cudaError_t broken = cudaSuccess;
  std::mutex running;  // held by what runs now

  // Whether memory of the device was given out there, or was opened there.
  bool WasTaken(const void* data) const {
    return (data >= space_ && data < space_ + taken_space_) || (data >= foreign_ && data < foreign_ + taken_foreign_);
  }
  bool IsOfDevice(const void* data) const { return data >= space_ && data < foreign_ + kSpaceNbytes; }

  // Whether an operation may use memory now. These need the lock.
  bool Has(const Use& use) const {
    const char* begin = use.data;
    int64_t left = use.nbytes;
    if (IsOfDevice(begin)) return BlockOf(begin, left) != blocks.end();
    while (left > 0) {  // ranges may lie one after the other
      const auto after = ranges.upper_bound(const_cast<char*>(begin));
      if (after == ranges.begin()) return false;
      const auto& [start, length] = *std::prev(after);
      const int64_t inside = start + length - begin;
      if (inside <= 0) return false;
      begin += inside;
      left -= inside;
    }
    return true;
  }
  bool HasAll(const std::vector<Use>& uses) const {
    return std::all_of(uses.begin(), uses.end(), [this](const Use& use) { return Has(use); });
  }
  bool IsIdle() const {
    return std::all_of(streams.begin(), streams.end(), [](const Stream* one) { return one->operations.empty(); });
  }

  // What names a block for other processes.
  struct Handle {
    pid_t process;
    int file;
    int64_t offset, nbytes;
    int gpu;
  };
  Handle HandleOf(char* data) const { return {getpid(), file_, data - space_, blocks.at(data), gpus.at(data)}; }
  // The GPU of the block in which data lies; -1 where there is none.
  int GpuOf(const void* data) const {
    const auto found = BlockOf(static_cast<const char*>(data), 0);
    return found == blocks.end() ? -1 : gpus.at(found->first);
  }
  // A block of another process, as this one reaches it; null where it is not there.
  char* OpenForeign(const Handle& handle) {
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    const int64_t pages = Pages(handle.nbytes);
    char* data = foreign_ + taken_foreign_;
    if (mmap(data, static_cast<size_t>(pages), PROT_NONE, MAP_SHARED | MAP_FIXED, file, handle.offset) != data) {
      std::abort();
    }
    taken_foreign_ += pages + kPage;
    blocks[data] = handle.nbytes;
    gpus[data] = handle.gpu;
    opened[data] = {file, handle.offset + pages};
    CountOpened(file, handle.offset + pages, 1);
    return data;
  }
  bool CloseForeign(char* data) {
    const auto found = opened.find(data);
    if (found == opened.end()) return false;
    CountOpened(found->second.first, found->second.second, -1);
    const size_t pages = static_cast<size_t>(Pages(blocks[data]));
    if (mmap(data, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != data) {
      std::abort();
    }
    close(found->second.first);
    opened.erase(found);
    blocks.erase(data);
    return true;
  }
  // How many times other processes have opened a block.
  int Openings(char* data) const { return CountOpened(file_, data - space_ + Pages(blocks.at(data)), 0); }

  // An address is never given out twice, and a page that is never given out follows each block.
  char* Take(int64_t nbytes) {
    const int64_t rounded = Pages(nbytes) + kPage;
    char* data = space_ + taken_space_;
    if (taken_space_ + rounded > kSpaceNbytes) return nullptr;
    taken_space_ += rounded;
    blocks[data] = nbytes;
    gpus[data] = current_device;
    taken += nbytes;
    Open(data, nbytes, true);
    std::memset(data, 0xa5, static_cast<size_t>(nbytes));
    Open(data, nbytes, false);
    return data;
  }
  void Give(char* data) {
    const int64_t nbytes = blocks[data];
    Open(data, nbytes, false);
    if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, data - space_, Pages(nbytes)) != 0) std::abort();
    taken -= nbytes;
    blocks.erase(data);
  }

  void RunNow(const Operation& operation) {
    std::lock_guard<std::mutex> alone(running);
    if (!OpenAll(operation, true)) return;
    operation.run();
    OpenAll(operation, false);
  }

 private:
  Machine() {
    constexpr size_t kSize = static_cast<size_t>(kSpaceNbytes);
    void* space = mmap(nullptr, 2 * kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) std::abort();
    space_ = static_cast<char*>(space);
    foreign_ = space_ + kSpaceNbytes;
    file_ = memfd_create("stand_in", MFD_CLOEXEC);
    if (file_ < 0 || ftruncate(file_, kSpaceNbytes) != 0 ||
        mmap(space, kSize, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file_, 0) != space) {
      std::abort();
    }
    std::thread([this] { Run(); }).detach();
  }

  static int64_t Pages(int64_t nbytes) { return (std::max<int64_t>(nbytes, 1) + kPage - 1) / kPage * kPage; }
  // The count lies in the page that follows the block in its process's file. Returns it after the change.
  static int CountOpened(int file, int64_t offset, int change) {
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
    if (page == MAP_FAILED) std::abort();
    const int count = *static_cast<std::atomic<int>*>(page) += change;
    munmap(page, kPage);
    return count;
  }
  static void Open(char* data, int64_t nbytes, bool opens) {
    const int rights = opens ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (mprotect(data, static_cast<size_t>(Pages(nbytes)), rights) != 0) std::abort();
  }
  std::map<char*, int64_t>::const_iterator BlockOf(const char* data, int64_t nbytes) const {
    const auto after = blocks.upper_bound(const_cast<char*>(data));
    if (after == blocks.begin()) return blocks.end();
    const auto found = std::prev(after);
    return data + nbytes <= found->first + found->second ? found : blocks.end();
  }
  // Opens what an operation uses, or closes it; false where it may not be used.
  bool OpenAll(const Operation& operation, bool opens) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!HasAll(operation.uses)) broken = cudaErrorLaunchFailure;
    if (broken != cudaSuccess) return false;
    for (const Use& use : operation.uses) {
      if (!IsOfDevice(use.data)) continue;
      const auto& [data, nbytes] = *BlockOf(use.data, use.nbytes);
      Open(data, nbytes, opens);
    }
    return true;
  }

  static bool IsReady(const Stream& stream) {
    if (stream.operations.empty()) return false;
    const Operation& first = stream.operations.front();
    return first.run != nullptr || first.record->ended;
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      std::vector<Stream*> ready;
      for (Stream* stream : streams) {
        if (!holds && IsReady(*stream)) ready.push_back(stream);
      }
      if (ready.empty()) {
        changed.wait(lock);
        continue;
      }
      Stream* stream = ready[random_() % ready.size()];
      Operation& operation = stream->operations.front();
      if (operation.run != nullptr) {
        const unsigned delay_us = random_() % kSleeps == 0 ? random_() % kLongest_us : 0;
        lock.unlock();
        if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        RunNow(operation);
        lock.lock();
        if (operation.record != nullptr) operation.record->ended = true;
      }
      stream->operations.pop_front();
      changed.notify_all();
    }
  }

  int file_ = -1;  // behind the first of both spaces
  char *space_ = nullptr, *foreign_ = nullptr;
  std::atomic<int64_t> taken_space_{0}, taken_foreign_{0};
  std::mt19937 random_{1};
};

using Lock = std::unique_lock<std::mutex>;

cudaError_t Push(Machine* machine, cudaStream_t stream, Operation operation) {
  {
    Lock lock(machine->mutex);
    if (machine->broken != cudaSuccess) return machine->broken;
    if (!machine->HasAll(operation.uses)) return cudaErrorInvalidValue;
    if (stream != nullptr) {
      auto* of = static_cast<Stream*>(stream);
      if (machine->streams.count(of) == 0) return cudaErrorInvalidResourceHandle;
      of->operations.push_back(std::move(operation));
      machine->changed.notify_all();
      return cudaSuccess;
    }
  }
  if (operation.run != nullptr) machine->RunNow(operation);
  return cudaSuccess;
}

std::string Counted(size_t count, const char* what) {
  return count == 0 ? "" : (std::to_string(count) + " " + what + (count == 1 ? "" : "s") + " ");
}

}  // namespace

void Enqueue(cudaStream_t stream, std::function<void()> work, std::vector<const void*> words) {
  Operation operation{std::move(work), {}, nullptr};
  for (const void* word : words) {
    if (Machine::Get().WasTaken(word)) operation.uses.push_back({static_cast<const char*>(word), 0});
  }
  Told(Push(&Machine::Get(), stream, std::move(operation)));
}

void Hold(bool holds) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  machine.holds = holds;
  machine.changed.notify_all();
}

void Limit(int64_t nbytes) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  machine.limit = nbytes;
}

void Break(cudaError_t code) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  machine.broken = code;
}

std::string Left() {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  return Counted(machine.blocks.size() - machine.opened.size(), "block") + Counted(machine.ranges.size(), "range") +
         Counted(machine.streams.size(), "stream") + Counted(machine.events.size(), "event") +
         Counted(machine.opened.size(), "opening");
}

}  // namespace hvd_ext::gpu::stand_in

// Left, for Python; the text is this thread's, until its next call.
extern "C" const char* hvd_ext_stand_in_left() {
  thread_local std::string left;
  left = hvd_ext::gpu::stand_in::Left();
  return left.c_str();
}

using namespace hvd_ext::gpu::stand_in;

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    default:
      return "another error";
  }
}

const char* cudaGetErrorString(cudaError_t) { return "the stand-in has no words for it"; }

cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(Gpus().size())) return Told(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return *value = attribute == cudaDevAttrMultiProcessorCount ? processors : 1, cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  attributes->device = machine.GpuOf(data);
  return Told(attributes->device < 0 ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int from, int to) {
  return *value = Gpus()[static_cast<size_t>(from)][static_cast<size_t>(to)] == 'n', cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* name, int length, int device) {
  std::snprintf(name, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t nbytes) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  if (machine.broken != cudaSuccess) return Told(machine.broken);
  const int64_t wanted = static_cast<int64_t>(nbytes);
  *data = machine.taken + wanted > machine.limit ? nullptr : machine.Take(wanted);
  return Told(*data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFree(void* data) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  if (data == nullptr) return cudaSuccess;
  char* block = static_cast<char*>(data);
  if (machine.blocks.count(block) == 0 || machine.opened.count(block) > 0) return Told(cudaErrorInvalidValue);
  machine.changed.wait(lock, [&] { return machine.IsIdle(); });
  if (machine.Openings(block) > 0) return Told(machine.broken = cudaErrorLaunchFailure);
  machine.Give(block);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  char* block = static_cast<char*>(data);
  if (refuses_handles || machine.blocks.count(block) == 0 || machine.opened.count(block) > 0) {
    return Told(cudaErrorInvalidValue);
  }
  const Machine::Handle made = machine.HandleOf(block);
  std::memcpy(handle->reserved, &made, sizeof(made));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  Machine::Handle made;
  std::memcpy(&made, handle.reserved, sizeof(made));
  const char joined = Gpus()[static_cast<size_t>(current_device)][static_cast<size_t>(made.gpu)];
  if (made.process == getpid() || refuses_handles || joined == 'h') return Told(cudaErrorInvalidResourceHandle);
  *data = machine.OpenForeign(made);
  return Told(*data == nullptr ? cudaErrorInvalidResourceHandle : cudaSuccess);
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  machine.changed.wait(lock, [&] { return machine.IsIdle(); });
  return Told(machine.CloseForeign(static_cast<char*>(data)) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void* data, size_t nbytes, unsigned) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  if (machine.broken != cudaSuccess) return Told(machine.broken);
  if (machine.ranges.count(static_cast<char*>(data)) > 0) return Told(cudaErrorHostMemoryAlreadyRegistered);
  machine.ranges[static_cast<char*>(data)] = static_cast<int64_t>(nbytes);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* data) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  return Told(machine.ranges.erase(static_cast<char*>(data)) == 0 ? cudaErrorHostMemoryNotRegistered : cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  auto* made = new Stream;
  machine.streams.insert(made);
  *stream = made;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (const cudaError_t code = cudaStreamSynchronize(stream); code == cudaErrorInvalidResourceHandle) return code;
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  machine.streams.erase(static_cast<Stream*>(stream));
  delete static_cast<Stream*>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  auto* of = static_cast<Stream*>(stream);
  if (machine.streams.count(of) == 0) return Told(cudaErrorInvalidResourceHandle);
  machine.changed.wait(lock, [&] { return of->operations.empty(); });
  return Told(machine.broken);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  static intptr_t made = 0;
  *event = reinterpret_cast<void*>(++made);
  machine.events[*event] = nullptr;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  return Told(machine.events.erase(event) == 0 ? cudaErrorInvalidResourceHandle : cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Machine& machine = Machine::Get();
  Operation operation{[] {}, {}, nullptr};
  {
    Lock lock(machine.mutex);
    const auto found = machine.events.find(event);
    if (found == machine.events.end()) return Told(cudaErrorInvalidResourceHandle);
    found->second = operation.record = std::make_shared<Record>(Record{stream == nullptr});
  }
  return Told(Push(&machine, stream, std::move(operation)));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Machine& machine = Machine::Get();
  Lock lock(machine.mutex);
  const auto found = machine.events.find(event);
  if (found == machine.events.end()) return Told(cudaErrorInvalidResourceHandle);
  if (machine.broken != cudaSuccess) return Told(machine.broken);
  return Told(found->second != nullptr && !found->second->ended ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Machine& machine = Machine::Get();
  Operation operation{nullptr, {}, nullptr};
  {
    Lock lock(machine.mutex);
    const auto found = machine.events.find(event);
    if (found == machine.events.end()) return Told(cudaErrorInvalidResourceHandle);
    if (found->second == nullptr) return cudaSuccess;
    operation.record = found->second;
  }
  return Told(Push(&machine, stream, std::move(operation)));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
  Machine& machine = Machine::Get();
  const bool to_device = machine.IsOfDevice(to), from_device = machine.IsOfDevice(from);
  const cudaMemcpyKind right = from_device ? (to_device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost)
                                           : (to_device ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost);
  if (kind != cudaMemcpyDefault && kind != right) return Told(cudaErrorInvalidMemcpyDirection);
  const int64_t size = static_cast<int64_t>(nbytes);
  const auto copy = [=] { std::memcpy(to, from, nbytes); };
  return Told(Push(&machine, stream,
                   {copy, {{static_cast<char*>(to), size}, {static_cast<const char*>(from), size}}, nullptr}));
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
  Operation operation{[=] { std::memset(to, value, nbytes); }, {}, nullptr};
  if (Machine::Get().IsOfDevice(to)) operation.uses.push_back({static_cast<char*>(to), static_cast<int64_t>(nbytes)});
  return Told(Push(&Machine::Get(), stream, std::move(operation)));
}

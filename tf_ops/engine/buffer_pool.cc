#include "engine/buffer_pool.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace hvd_ext {
namespace {

constexpr int64_t kPage = 4096;
constexpr int kSmallestLog2 = 8;

// Four classes to each power of two waste at most a fifth of what they hand out.
constexpr int kClasses = 4 * (63 - kSmallestLog2);

int64_t CapacityOf(int size_class) { return int64_t{4 + size_class % 4} << (kSmallestLog2 - 2 + size_class / 4); }

int ClassOf(int64_t nbytes) {
  if (nbytes <= CapacityOf(0)) return 0;
  int log2 = 63 - __builtin_clzll(static_cast<unsigned long long>(nbytes - 1));  // 2^log2 <= nbytes - 1 < 2^(log2 + 1)
  int64_t quarter = (nbytes - 1) >> (log2 - 2);                                  // 4 .. 7
  return 4 * (log2 - kSmallestLog2) + static_cast<int>(quarter - 4) + 1;
}

}  // namespace

struct Buffer::Shelves {
  struct Returned {
    char* data;
    std::array<int64_t, Device::kQueues> last{};  // the newest operations when it was returned
  };

  Shelves(std::shared_ptr<Arena> memory, std::shared_ptr<Device> of, bool host)
      : arena(std::move(memory)), device(std::move(of)), on_host(host) {}

  const std::shared_ptr<Arena> arena;
  const std::shared_ptr<Device> device;
  const bool on_host;
  const bool queues = !device->IsHost();  // operations may use a buffer after it was returned
  Mutex mutex;
  std::vector<std::vector<Returned>> free HVD_EXT_GUARDED_BY(mutex){static_cast<size_t>(kClasses)};
  int64_t allocations HVD_EXT_GUARDED_BY(mutex) = 0;

  char* Allocate(int64_t nbytes) {
    char* data = arena == nullptr ? nullptr : arena->Take(nbytes);
    if (data != nullptr) return data;
    if (!queues || !on_host) return device->Allocate(nbytes);
    nbytes = (nbytes + kPage - 1) / kPage * kPage;
    data = static_cast<char*>(::operator new(static_cast<size_t>(nbytes), std::align_val_t{kPage}));
    device->Pin(data, nbytes);
    return data;
  }

  void Free(char* data) {
    if (arena != nullptr && arena->Owns(data)) return;
    if (!queues || !on_host) return device->Free(data);
    device->Unpin(data);
    ::operator delete(data, std::align_val_t{kPage});
  }

  bool IsIdle(const Returned& returned) const {
    for (int i = 0; queues && i < Device::kQueues; ++i) {
      if (!device->queue(i)->Done(returned.last[static_cast<size_t>(i)])) return false;
    }
    return true;
  }

  ~Shelves() {
    for (const std::vector<Returned>& shelf : free) {
      for (const Returned& returned : shelf) Free(returned.data);
    }
  }
};

Buffer::Buffer(Buffer&& other) noexcept
    : shelves_(std::move(other.shelves_)),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      size_class_(other.size_class_),
      input_(other.input_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer taken(std::move(other));
  std::swap(shelves_, taken.shelves_);
  std::swap(data_, taken.data_);
  std::swap(nbytes_, taken.nbytes_);
  std::swap(size_class_, taken.size_class_);
  std::swap(input_, taken.input_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  Shelves::Returned returned{data_};
  if (shelves_->queues) {
    for (int i = 0; i < Device::kQueues; ++i)
      returned.last[static_cast<size_t>(i)] = shelves_->device->queue(i)->Last();
    shelves_->device->Forget(data_, CapacityOf(size_class_));
  }
  MutexLock lock(&shelves_->mutex);
  shelves_->free[size_class_].push_back(returned);
}

bool Buffer::OnHost() const { return shelves_->on_host; }

void Buffer::NoteInput(int64_t number) {
  MutexLock lock(&shelves_->mutex);
  input_ = std::max(input_, number);
}

BufferPool::BufferPool(std::shared_ptr<Arena> arena, std::shared_ptr<Device> device) {
  if (arena != nullptr && !device->IsHost()) {
    arena->PinBy([device](char* data, int64_t nbytes) { device->Pin(data, nbytes); },
                 [device](char* data) { device->Unpin(data); });
  }
  shelves_ = std::make_shared<Buffer::Shelves>(std::move(arena), std::move(device), /*host=*/true);
}

BufferPool BufferPool::Of(std::shared_ptr<Device> device) {
  return BufferPool(std::make_shared<Buffer::Shelves>(nullptr, std::move(device), /*host=*/false));
}

Buffer BufferPool::Take(int64_t nbytes) {
  Buffer buffer;
  buffer.size_class_ = ClassOf(nbytes);
  buffer.nbytes_ = nbytes;
  buffer.shelves_ = shelves_;
  {
    MutexLock lock(&shelves_->mutex);
    std::vector<Buffer::Shelves::Returned>& shelf = shelves_->free[buffer.size_class_];
    for (size_t i = shelf.size(); i-- > 0;) {
      if (!shelves_->IsIdle(shelf[i])) continue;
      buffer.data_ = shelf[i].data;
      shelf[i] = shelf.back();
      shelf.pop_back();
      return buffer;
    }
    ++shelves_->allocations;
  }
  buffer.data_ = shelves_->Allocate(CapacityOf(buffer.size_class_));
  return buffer;
}

int64_t BufferPool::allocations() const {
  MutexLock lock(&shelves_->mutex);
  return shelves_->allocations;
}

}  // namespace hvd_ext

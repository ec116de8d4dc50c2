#include "engine/buffer_pool.h"

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace hvd_ext {
namespace {

constexpr std::align_val_t kAlignment{64};  // a cache line, and the widest vector
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
  explicit Shelves(std::shared_ptr<Arena> memory) : arena(std::move(memory)) {}

  const std::shared_ptr<Arena> arena;
  Mutex mutex;
  std::vector<std::vector<char*>> free HVD_EXT_GUARDED_BY(mutex){static_cast<size_t>(kClasses)};
  int64_t allocations HVD_EXT_GUARDED_BY(mutex) = 0;

  ~Shelves() {
    for (const std::vector<char*>& shelf : free) {
      for (char* data : shelf) {
        if (arena == nullptr || !arena->Owns(data)) ::operator delete(data, kAlignment);
      }
    }
  }
};

Buffer::Buffer(Buffer&& other) noexcept
    : shelves_(std::move(other.shelves_)),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      size_class_(other.size_class_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer taken(std::move(other));
  std::swap(shelves_, taken.shelves_);
  std::swap(data_, taken.data_);
  std::swap(nbytes_, taken.nbytes_);
  std::swap(size_class_, taken.size_class_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  MutexLock lock(&shelves_->mutex);
  shelves_->free[size_class_].push_back(data_);
}

void Buffer::KeepForEver() {
  // Reachable from a static that is never destroyed: leak checkers then see memory in use, which it is.
  static Mutex* mutex = new Mutex;
  static auto* kept = new std::vector<std::pair<char*, std::shared_ptr<Arena>>>;
  if (data_ == nullptr) return;
  MutexLock lock(mutex);
  kept->emplace_back(data_, shelves_->arena);
  data_ = nullptr;
  nbytes_ = 0;
  shelves_.reset();
}

BufferPool::BufferPool(std::shared_ptr<Arena> arena) : shelves_(std::make_shared<Buffer::Shelves>(std::move(arena))) {}

Buffer BufferPool::Take(int64_t nbytes) {
  Buffer buffer;
  buffer.size_class_ = ClassOf(nbytes);
  buffer.nbytes_ = nbytes;
  buffer.shelves_ = shelves_;
  {
    MutexLock lock(&shelves_->mutex);
    std::vector<char*>& shelf = shelves_->free[buffer.size_class_];
    if (!shelf.empty()) {
      buffer.data_ = shelf.back();
      shelf.pop_back();
      return buffer;
    }
    ++shelves_->allocations;
  }
  int64_t capacity = CapacityOf(buffer.size_class_);
  if (shelves_->arena != nullptr) buffer.data_ = shelves_->arena->Take(capacity);
  if (buffer.data_ == nullptr)
    buffer.data_ = static_cast<char*>(::operator new(static_cast<size_t>(capacity), kAlignment));
  return buffer;
}

int64_t BufferPool::allocations() const {
  MutexLock lock(&shelves_->mutex);
  return shelves_->allocations;
}

}  // namespace hvd_ext

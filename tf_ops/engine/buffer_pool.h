// Memory for buckets, segments and messages: returned buffers are kept by size, so that a steady state allocates
// nothing. With an arena, buffers lie in memory that other ranks map as long as there is room there.
#pragma once

#include <cstdint>
#include <memory>

#include "shm/arena.h"

namespace hvd_ext {

class BufferPool;

// Memory from a pool; goes back to it when destroyed. Movable. May outlive the pool.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  // 64-byte aligned, contents undefined; null for a buffer that holds nothing.
  char* data() const { return data_; }
  // The size that was asked for.
  int64_t nbytes() const { return nbytes_; }
  explicit operator bool() const { return data_ != nullptr; }

  // Keeps the memory valid until the process ends, because a transport may still read or write it after the engine has
  // stopped. This buffer holds nothing afterwards.
  void KeepForEver();

 private:
  friend class BufferPool;
  struct Shelves;
  std::shared_ptr<Shelves> shelves_;
  char* data_ = nullptr;
  int64_t nbytes_ = 0;
  int size_class_ = 0;
};

// Thread-safe. Holds what was returned to it until it is destroyed.
class BufferPool {
 public:
  explicit BufferPool(std::shared_ptr<Arena> arena = nullptr);

  // Gives a buffer of at least `nbytes`; the pointer is valid for 0 too. Throws std::bad_alloc.
  Buffer Take(int64_t nbytes);

  // How often Take had no returned buffer and took new memory.
  int64_t allocations() const;

 private:
  std::shared_ptr<Buffer::Shelves> shelves_;
};

}  // namespace hvd_ext

// Memory for buckets, segments and messages: returned buffers are kept by size, so that a steady state allocates
// nothing. With an arena, buffers lie in memory that other ranks map as long as there is room there.
//
// A buffer may be dropped while operations of a device that use it are queued: its memory is handed out again when they
// have ended.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "engine/device.h"
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
  // Whether plain loads and stores reach it.
  bool OnHost() const;
  // The newest operation of the device's inputs that writes into it.
  int64_t input() const { return input_; }
  void NoteInput(int64_t number);

 private:
  friend class BufferPool;
  struct Shelves;
  std::shared_ptr<Shelves> shelves_;
  char* data_ = nullptr;
  int64_t nbytes_ = 0;
  int size_class_ = 0;
  int64_t input_ = 0;
};

// Thread-safe. Holds what was returned to it until it is destroyed. A copy is the same pool.
class BufferPool {
 public:
  // Host memory, for messages: operations of the device may use it.
  explicit BufferPool(std::shared_ptr<Arena> arena = nullptr, std::shared_ptr<Device> device = HostDevice());
  // Memory of the device.
  static BufferPool Of(std::shared_ptr<Device> device);

  // Gives a buffer of at least `nbytes`; the pointer is valid for 0 too. Throws std::bad_alloc.
  Buffer Take(int64_t nbytes);

  // How often Take had no returned buffer and took new memory.
  int64_t allocations() const;

 private:
  explicit BufferPool(std::shared_ptr<Buffer::Shelves> shelves) : shelves_(std::move(shelves)) {}

  std::shared_ptr<Buffer::Shelves> shelves_;
};

}  // namespace hvd_ext

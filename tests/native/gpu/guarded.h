// Buffers of the emulated device whose surroundings are watched.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "harness.h"

namespace hvd_ext::test {

constexpr char kGuard = 0x5b;

// Memory of exactly this many bytes, at `offset` bytes behind an aligned address, between guard words.
struct Guarded {
  std::vector<char> memory;
  char* data;
  size_t nbytes;

  explicit Guarded(size_t nbytes, size_t offset = 0) : memory(nbytes + offset + 1024, kGuard), nbytes(nbytes) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data()) + 256;
    data = memory.data() + 256 + (256 - begin % 256) % 256 + offset;
    std::memset(data, 0xa5, nbytes);
  }
  void MustBeWhole() const {
    for (const char* at = memory.data(); at < memory.data() + memory.size(); ++at) {
      if ((at < data || at >= data + nbytes) && *at != kGuard) throw Failure("memory beside a buffer was written");
    }
  }
};

}  // namespace hvd_ext::test

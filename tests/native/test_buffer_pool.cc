#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "engine/buffer_pool.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

TEST("buffer pool: a buffer is aligned and as long as was asked for") {
  BufferPool pool;
  for (int64_t nbytes : {0, 1, 63, 64, 65, 1000, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 12345678}) {
    Buffer buffer = pool.Take(nbytes);
    CHECK_EQ(buffer.nbytes(), nbytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    std::memset(buffer.data(), 1, static_cast<size_t>(nbytes));  // the address sanitizer watches
  }
}

TEST("buffer pool: a steady state allocates nothing") {
  BufferPool pool;
  auto step = [&] {
    std::vector<Buffer> buffers;
    for (int64_t nbytes : {100, 100, 60000, 4000000, 59000}) buffers.push_back(pool.Take(nbytes));
  };
  step();
  int64_t after_first = pool.allocations();
  CHECK(after_first > 0);
  for (int i = 0; i < 10; ++i) step();
  CHECK_EQ(pool.allocations(), after_first);
}

TEST("buffer pool: buffers at once have memory of their own, which moves with them and may outlive the pool") {
  Buffer b;
  {
    BufferPool pool;
    Buffer a = pool.Take(1000), other = pool.Take(1000);
    CHECK(a.data() + 1000 <= other.data() || other.data() + 1000 <= a.data());
    char* data = a.data();
    b = std::move(a);
    CHECK(!a);
    CHECK(b.data() == data);
    b = pool.Take(1000);  // releases the first buffer
    CHECK(b.data() != data);
    CHECK(pool.Take(1000).data() == data);
  }
  std::memset(b.data(), 3, 1000);
}

TEST("buffer pool: threads may take and give back at once") {
  BufferPool pool;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 500; ++i) {
        Buffer buffer = pool.Take(100 + i % 7 * 300);
        std::memset(buffer.data(), t, static_cast<size_t>(buffer.nbytes()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.allocations() <= 4 * 7);
}

}  // namespace
}  // namespace hvd_ext::test

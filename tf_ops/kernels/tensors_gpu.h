// Many tensors in one kernel. A table in device memory has a row for each, and says to which tensor each block of the
// kernel belongs. It is written from kernel arguments, since a copy from host memory would wait, or need pinned memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gpu.h"

namespace hvd_ext::gpu {

// A row has a member `elements`.
template <typename Row>
struct Table {
  Row* rows;
  int64_t* starts;  // each tensor's first block, then the number of blocks
  int64_t n;
  int64_t blocks;

  __device__ int64_t TensorOf(int64_t block) const { return Locate(starts, n, block); }  // for all lanes of a warp
};

// Rows as an argument of a kernel, whose arguments are limited to 4 KiB.
template <typename Row>
struct Group {
  static constexpr int kRows = static_cast<int>((4096 - 128) / (sizeof(Row) + sizeof(int64_t)));
  Row rows[kRows];
  int64_t starts[kRows];
};

constexpr int kTableThreads = 64;

template <typename Row>
__global__ void WriteTable(Table<Row> table, Group<Row> group, int64_t first, int count) {
  for (int i = threadIdx.x; i < count; i += kTableThreads) {
    table.rows[first + i] = group.rows[i];
    table.starts[first + i] = group.starts[i];
  }
  if (threadIdx.x == 0 && first == 0) table.starts[table.n] = table.blocks;
}

template <typename Row>
int64_t TableNbytes(int64_t n) {
  return RoundedUp(n * static_cast<int64_t>(sizeof(Row)) + (n + 1) * static_cast<int64_t>(sizeof(int64_t)), 256);
}

inline int64_t BlocksOf(int64_t elements, int64_t block) { return (elements + block - 1) / block; }

// Queues what writes a table of n rows, for blocks of `block` elements, into `memory`, which has TableNbytes. Returns
// 0, or a code of CUDA.
template <typename Row>
int Tabulate(const Row* rows, int64_t n, int64_t block, void* memory, cudaStream_t stream, Table<Row>* table) {
  *table = {static_cast<Row*>(memory), reinterpret_cast<int64_t*>(static_cast<Row*>(memory) + n), n, 0};
  for (int64_t i = 0; i < n; ++i) table->blocks += BlocksOf(rows[i].elements, block);
  int64_t start = 0;
  for (int64_t first = 0; first < n; first += Group<Row>::kRows) {
    const int count = static_cast<int>(std::min<int64_t>(Group<Row>::kRows, n - first));
    Group<Row> group = {};
    for (int i = 0; i < count; ++i) {
      group.rows[i] = rows[first + i];
      group.starts[i] = start;
      start += BlocksOf(rows[first + i].elements, block);
    }
    HVD_EXT_LAUNCH(WriteTable<Row>, 1, kTableThreads, stream, *table, group, first, count);
  }
  return 0;
}

}  // namespace hvd_ext::gpu

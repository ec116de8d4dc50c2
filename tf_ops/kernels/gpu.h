// What the kernels for GPUs share. nvcc compiles this file, and so does g++ for the emulation in tests/native/gpu.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

#ifdef HVD_EXT_EMULATED_GPU
#include "gpu/emulation.h"
#else
#include <cuda_runtime.h>

#define HVD_EXT_SHARED(Type, name) __shared__ Type name

namespace hvd_ext::gpu {

// CUDA puts smaller blocks of a process together, and shares them with each other (CUDA IPC).
constexpr int64_t kSharedNbytes = 2 << 20;

template <typename... Parameters, typename... Arguments>
void Launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  // clang-format off
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(arguments...);
  // clang-format on
}

// Of kernels whose threads do not meet.
template <typename... Parameters, typename... Arguments>
void LaunchApart(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                 Arguments... arguments) {
  Launch(kernel, blocks, threads, stream, arguments...);
}

// Loads and stores of memory that other blocks write during the kernel. They bypass the caches of the multiprocessor.
template <typename Word>
__device__ inline Word LoadNow(const Word* word) {
  return *static_cast<const volatile Word*>(word);
}
__device__ inline void StoreNow(uint64_t* word, uint64_t value) { *static_cast<volatile uint64_t*>(word) = value; }
__device__ inline void Pause() { __nanosleep(32); }

}  // namespace hvd_ext::gpu
#endif

namespace hvd_ext::gpu {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int Lane() { return threadIdx.x % kLanes; }

// Returns the last s with starts[s] <= at, where `starts` ascends and starts[0] = 0 <= at < starts[n]. All lanes of a
// warp must call it.
__device__ inline int64_t Locate(const int64_t* starts, int64_t n, int64_t at) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t step = (high - low + kLanes - 1) / kLanes;
    const int64_t mine = low + Lane() * step;
    const unsigned before = __ballot_sync(kAllLanes, mine < high && starts[mine] <= at);
    low += (kLanes - 1 - __clz(before)) * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}

// ---- on the host

inline thread_local char error[512] = "";  // the text of this thread's last failure

__attribute__((format(printf, 2, 3))) inline int Fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error, sizeof error, format, arguments);
  va_end(arguments);
  return code;
}

#define HVD_EXT_CUDA(call)                                                                                         \
  do {                                                                                                             \
    const cudaError_t code_ = (call);                                                                              \
    if (code_ != cudaSuccess) {                                                                                    \
      return Fail(static_cast<int>(code_), #call ": %s (%s)", cudaGetErrorName(code_), cudaGetErrorString(code_)); \
    }                                                                                                              \
  } while (false)

#define HVD_EXT_LAUNCH(...)           \
  do {                                \
    Launch(__VA_ARGS__);              \
    HVD_EXT_CUDA(cudaGetLastError()); \
  } while (false)

inline int64_t RoundedUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace hvd_ext::gpu

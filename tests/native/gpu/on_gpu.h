// What the checks and timings on a real GPU share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/reduce.h"

namespace hvd_ext::gpu_test {

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

inline void Must(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}
#define MUST(call) Must(call, #call)

// Device memory of exactly this many bytes (apart from cudaMalloc's granularity), filled with garbage.
struct Buffer {
  char* data = nullptr;
  explicit Buffer(int64_t nbytes) {
    MUST(cudaMalloc(&data, std::max<int64_t>(nbytes, 1)));
    MUST(cudaMemset(data, 0xa5, std::max<int64_t>(nbytes, 1)));
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
};

static __global__ void FillGauss(float* x, int64_t elements) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (static_cast<float>(z >> 40) + 0.5f) * 0x1p-24f,
                angle = static_cast<float>(z & 0xffffff) * 0x1p-24f;
    x[i] = sqrtf(-2 * logf(u)) * cospif(2 * angle);
  }
}

static __global__ void Nothing() {}

template <typename Body>
std::vector<float> Milliseconds(const Body& body) {
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  std::vector<float> times;
  for (int repeat = 0; repeat < 23; ++repeat) {
    MUST(cudaEventRecord(begin));
    body();
    MUST(cudaEventRecord(end));
    MUST(cudaEventSynchronize(end));
    float ms = 0;
    MUST(cudaEventElapsedTime(&ms, begin, end));
    if (repeat >= 3) times.push_back(ms);  // the first ones load the kernels
  }
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  return times;
}

// `"NAME_ms": median, "NAME_samples_ms": [all of them]`, as part of a JSON object.
inline std::string Told(const std::string& name, std::vector<float> times) {
  std::ostringstream text;
  for (size_t i = 0; i < times.size(); ++i) text << (i == 0 ? "[" : ", ") << times[i];
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  std::ostringstream all;
  all << '"' << name << "_ms\": " << times[times.size() / 2] << ", \"" << name << "_samples_ms\": " << text.str()
      << ']';
  return all.str();
}

}  // namespace hvd_ext::gpu_test

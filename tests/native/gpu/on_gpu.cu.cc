// On a real GPU: the cases of the emulated tests and larger ones, then times. `topk_on_gpu [--no-times]` ends
// with 0 if every answer was right, with 2 where there is no GPU. Times are the median of 20 calls, each between two
// events, beside a copy of x inside the device's memory; of one line of JSON each.
#include <cuda_runtime.h>

#include <cstdio>

#include "gpu/cases.h"

namespace {

using namespace hvd_ext;
using namespace hvd_ext::gpu_test;

void Must(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}
#define MUST(call) Must(call, #call)

// Device memory of exactly so many bytes (cudaMalloc's own granularity aside), filled with garbage.
struct Buffer {
  char* data = nullptr;
  explicit Buffer(int64_t nbytes) {
    MUST(cudaMalloc(&data, std::max<int64_t>(nbytes, 1)));
    MUST(cudaMemset(data, 0xa5, std::max<int64_t>(nbytes, 1)));
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
};

Answer RunOnGpu(const Problem& problem) {
  const int32_t dtype = static_cast<int32_t>(problem.dtype);
  const int64_t n = static_cast<int64_t>(problem.segments.size()), picks = problem.picks();
  const int64_t width = Width(problem.dtype), index_width = problem.wide ? 8 : 4;
  const int64_t workspace_nbytes = hvd_ext_topk_gpu_workspace(dtype, problem.segments.data(), n);
  const std::vector<char> packed = Packed(problem);
  const int64_t offset = problem.shift * width;
  Buffer x(packed.size() + offset), workspace(workspace_nbytes), indices(picks * index_width), values(picks * width);
  Buffer non_finite(sizeof(int32_t));
  MUST(cudaMemcpy(x.data + offset, packed.data(), packed.size(), cudaMemcpyHostToDevice));
  const int code =
      hvd_ext_topk_gpu(dtype, x.data + offset, problem.segments.data(), n, indices.data, problem.wide, values.data,
                       reinterpret_cast<int32_t*>(non_finite.data), workspace.data, workspace_nbytes, nullptr);
  if (code != 0) throw std::runtime_error(hvd_ext_topk_gpu_error());
  std::vector<char> seen_indices(picks * index_width), seen_values(picks * width);
  int32_t flag = 0;
  MUST(cudaMemcpy(seen_indices.data(), indices.data, seen_indices.size(), cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(seen_values.data(), values.data, seen_values.size(), cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(&flag, non_finite.data, sizeof flag, cudaMemcpyDeviceToHost));
  Answer answer;
  answer.non_finite = flag != 0;
  for (int64_t p = 0; p < picks; ++p) {
    int64_t index = 0;
    uint64_t bits = 0;
    std::memcpy(&index, &seen_indices[p * index_width], index_width);
    std::memcpy(&bits, &seen_values[p * width], width);
    answer.indices.push_back(index);
    answer.values.push_back(bits);
  }
  return answer;
}

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

int64_t CheckAll() {
  int64_t checked = 0;
  uint64_t seed = 1;
  const auto check = [&](Problem problem) {
    problem.shift = static_cast<int64_t>(seed % 130);
    problem.wide = seed % 2 == 0;
    const Answer expected = Expected(problem);
    for (int repeat = 0; repeat < 2; ++repeat) MustBe(problem, RunOnGpu(problem), expected);
    ++checked;
    ++seed;
  };
  const int64_t sizes[] = {1, 2, 31, 1000, 8192, 8193, 32768, 32769, 100003, 1000003};
  for (int kind = 0; kind < kKinds; ++kind) {
    for (DType dtype : kFloats) {
      for (int64_t d : sizes) {
        const int64_t ks[] = {0, 1, d / 1000, d / 100, d / 10, d / 4, d / 2, d - 1, d};
        check(MakeProblem(kind, dtype, d, ks[seed % 9], seed));
        check(MakeProblem(kind, dtype, d, d / 100, seed));
      }
    }
    check(MakeProblem(kind, DType::kFloat32, 6000007, 60000, seed));
    std::vector<int64_t> lengths;
    for (int s = 0; s < 161; ++s) lengths.push_back(int64_t{s} * s * s % 70001);
    check(ManySegments(kind, kFloats[kind % 4], lengths, seed));
  }
  return checked;
}

__global__ void FillGauss(float* x, int64_t elements) {
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

template <typename Body>
float MedianMs(const Body& body) {
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
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

void Time(int64_t d, double density) {
  const int64_t k = static_cast<int64_t>(density * d);
  const HvdExtTopKSegment segment = {0, d, k};
  const int64_t workspace_nbytes = hvd_ext_topk_gpu_workspace(0, &segment, 1);
  Buffer x(4 * d), copy(4 * d), workspace(workspace_nbytes), indices(4 * k), values(4 * k);
  FillGauss<<<1024, 256>>>(reinterpret_cast<float*>(x.data), d);
  MUST(cudaGetLastError());
  const float copied = MedianMs([&] { MUST(cudaMemcpyAsync(copy.data, x.data, 4 * d, cudaMemcpyDeviceToDevice)); });
  const float selected = MedianMs([&] {
    const int code = hvd_ext_topk_gpu(0, x.data, &segment, 1, indices.data, 0, values.data, nullptr, workspace.data,
                                      workspace_nbytes, nullptr);
    if (code != 0) throw std::runtime_error(hvd_ext_topk_gpu_error());
  });
  std::printf("{\"elements\": %lld, \"k\": %lld, \"topk_ms\": %.4f, \"copy_ms\": %.4f, \"workspace_bytes\": %lld}\n",
              static_cast<long long>(d), static_cast<long long>(k), selected, copied,
              static_cast<long long>(workspace_nbytes));
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU was found: nothing was checked\n");
    return 2;
  }
  try {
    cudaDeviceProp device;
    MUST(cudaGetDeviceProperties(&device, 0));
    std::printf("{\"device\": \"%s\"}\n", device.name);
    std::printf("{\"checked\": %lld}\n", static_cast<long long>(CheckAll()));
    if (argc > 1 && std::strcmp(argv[1], "--no-times") == 0) return 0;
    for (int64_t d : {1 << 18, 1 << 20, 25 << 20, 110 << 20}) {
      for (double density : {0.001, 0.01, 0.1}) Time(d, density);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "wrong: %s\n", error.what());
    return 1;
  }
  return 0;
}

// The norms on a real GPU: checks, and times.
#pragma once

#include <cstdio>

#include "gpu/norms_cases.h"
#include "gpu/on_gpu.h"

namespace hvd_ext::gpu_test {

inline std::vector<double> NormsOnGpu(const Problem& problem) {
  const int64_t n = static_cast<int64_t>(problem.segments.size());
  const std::vector<char> packed = Packed(problem);
  const int64_t offset = problem.shift * static_cast<int64_t>(Width(problem.dtype));
  Buffer x(packed.size() + offset), squares(8 * n);
  MUST(cudaMemcpy(x.data + offset, packed.data(), packed.size(), cudaMemcpyHostToDevice));
  const std::vector<HvdExtNormsTensor> tensors = TensorsOf(problem, x.data + offset);
  const int64_t workspace_nbytes = hvd_ext_norms_gpu_workspace(tensors.data(), n);
  Buffer workspace(workspace_nbytes);
  if (hvd_ext_norms_gpu(static_cast<int32_t>(problem.dtype), tensors.data(), n, reinterpret_cast<double*>(squares.data),
                        workspace.data, workspace_nbytes, nullptr) != 0) {
    throw std::runtime_error(hvd_ext_norms_gpu_error());
  }
  std::vector<double> found(n);
  MUST(cudaMemcpy(found.data(), squares.data, 8 * n, cudaMemcpyDeviceToHost));
  return found;
}

// Runs the inputs of the emulated tests, or a few of them, each twice, and throws at the first wrong sum. Returns their
// number.
inline size_t CheckNorms(bool few) {
  size_t checked = 0;
  for (const test::SelectionInput& input : test::SelectionInputs()) {
    const std::string name = input.name;
    for (DType dtype : kFloats) {
      if (few && name != "gauss" && name != "NaN and infinity") continue;
      const Problem problem = NormsProblem(name, dtype, 7 + checked++);
      const std::vector<double> expected = ExpectedSquares(problem);
      for (int repeat = 0; repeat < 2; ++repeat) MustBe(problem, NormsOnGpu(problem), expected);
    }
  }
  return checked;
}

// One line: `tensors` of the same length in one call, beside an empty kernel and a copy in device memory, which moves
// twice the bytes that the norms read.
inline void TimeNorms(int64_t n, int64_t elements) {
  const int64_t d = n * elements;
  Buffer x(4 * d), copy(4 * d), squares(8 * n);
  FillGauss<<<1024, 256>>>(reinterpret_cast<float*>(x.data), d);
  MUST(cudaGetLastError());
  std::vector<HvdExtNormsTensor> tensors;
  for (int64_t t = 0; t < n; ++t) tensors.push_back({x.data + 4 * t * elements, elements});
  const int64_t workspace_nbytes = hvd_ext_norms_gpu_workspace(tensors.data(), n);
  Buffer workspace(workspace_nbytes);
  const std::vector<float> nothing = Milliseconds([] { Nothing<<<1, 32>>>(); });
  const std::vector<float> copied =
      Milliseconds([&] { MUST(cudaMemcpyAsync(copy.data, x.data, 4 * d, cudaMemcpyDeviceToDevice)); });
  const std::vector<float> summed = Milliseconds([&] {
    const int code = hvd_ext_norms_gpu(0, tensors.data(), n, reinterpret_cast<double*>(squares.data), workspace.data,
                                       workspace_nbytes, nullptr);
    if (code != 0) throw std::runtime_error(hvd_ext_norms_gpu_error());
  });
  std::printf("{\"elements\": %lld, \"tensors\": %lld, %s, %s, %s}\n", static_cast<long long>(d),
              static_cast<long long>(n), Told("noop", nothing).c_str(), Told("copy", copied).c_str(),
              Told("norms", summed).c_str());
  std::fflush(stdout);
}

}  // namespace hvd_ext::gpu_test

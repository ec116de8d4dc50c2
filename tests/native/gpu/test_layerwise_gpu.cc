// The kernels of layerwise_gpu.cu.cc, emulated on the host, against the definitions of the updates.
#include <deque>

#include "gpu/guarded.h"
#include "harness.h"
#include "kernels/layerwise_gpu.cu.cc"
#include "layerwise_cases.h"

namespace hvd_ext::test {
namespace {

struct EmulatedMemory {
  std::deque<Guarded> kept;
  float* Put(const std::vector<float>& floats) {
    const size_t nbytes = floats.size() * sizeof(float);
    kept.emplace_back(nbytes, 4 * (kept.size() % 5));
    std::memcpy(kept.back().data, floats.data(), nbytes);
    return reinterpret_cast<float*>(kept.back().data);
  }
  static std::vector<float> Get(const float* from, size_t count) { return {from, from + count}; }
};

// Calls update(workspace, its bytes) and checks that it succeeds and stays in its workspace.
template <typename Update>
void Run(int64_t n, const Update& update) {
  const int64_t nbytes = hvd_ext_layerwise_gpu_workspace(n);
  Guarded workspace(static_cast<size_t>(nbytes));
  if (update(workspace.data, nbytes) != 0) throw Failure(hvd_ext_layerwise_gpu_error());
  workspace.MustBeWhole();
}

LayerwiseAnswer RunEmulated(const LayerwiseProblem& problem, bool in_place) {
  EmulatedMemory memory;
  const LayerwiseAnswer answer = RunLayerwise(
      problem, in_place, &memory,
      [](const LarsVariable* all, int64_t n, const LarsStep& step) {
        Run(n, [&](void* space, int64_t nbytes) { return hvd_ext_lars_gpu(all, n, &step, space, nbytes, nullptr); });
      },
      [](const LambVariable* all, int64_t n, const LambStep& step) {
        Run(n, [&](void* space, int64_t nbytes) { return hvd_ext_lamb_gpu(all, n, &step, space, nbytes, nullptr); });
      },
      [](const MovedVariable* all, int64_t n, const float* rates) {
        Run(n, [&](void* space, int64_t nbytes) { return hvd_ext_move_gpu(all, n, rates, space, nbytes, nullptr); });
      });
  for (const Guarded& buffer : memory.kept) buffer.MustBeWhole();
  return answer;
}

TEST("gpu layerwise: lars and lamb do what their definitions say") {
  for (uint64_t seed : {4, 5}) {
    for (bool wild : {false, true}) {
      std::vector<int64_t> lengths = {0, 1, 255, 256, 257, 4095, 4096, 4097, 9000, 0};
      if (wild) lengths.assign(150, 5);  // more than one group of rows
      const LayerwiseProblem problem = MakeLayerwise(lengths, seed, wild);
      MustBe(RunEmulated(problem, seed % 2 == 0), ExpectedLayerwise(problem));
    }
  }
}

TEST("gpu layerwise: no variables, and wrong workspaces") {
  const float* rates = nullptr;
  CHECK_EQ(hvd_ext_move_gpu(nullptr, 0, rates, Guarded(256).data, 256, nullptr), 0);
  const MovedVariable nothing[] = {{nullptr, nullptr, nullptr, 0}};
  CHECK_EQ(hvd_ext_move_gpu(nothing, 1, rates, Guarded(256).data, 256, nullptr), 0);
  CHECK_EQ(hvd_ext_move_gpu(nothing, 1, rates, Guarded(256).data, 255, nullptr), HVD_EXT_LAYERWISE_GPU_INVALID);
  CHECK(std::strstr(hvd_ext_layerwise_gpu_error(), "workspace (255 bytes") != nullptr);
  CHECK_EQ(hvd_ext_move_gpu(nothing, 1, rates, Guarded(300, 64).data, 256, nullptr), HVD_EXT_LAYERWISE_GPU_INVALID);
}

}  // namespace
}  // namespace hvd_ext::test

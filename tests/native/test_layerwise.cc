// The updates of LARS and LAMB against their definitions, bit for bit, for all instruction sets and numbers of threads.
#include <deque>

#include "harness.h"
#include "kernels/norms.h"
#include "layerwise_cases.h"
#include "parallel.h"
#include "topk_inputs.h"

namespace hvd_ext::test {
namespace {

struct HostMemory {
  std::deque<std::vector<float>> kept;
  float* Put(const std::vector<float>& floats) { return kept.emplace_back(floats).data(); }
  static std::vector<float> Get(const float* from, size_t count) { return {from, from + count}; }
};

TEST("layerwise: lars and lamb do on every path what their definitions say, in place and into other memory") {
  for (bool wild : {false, true}) {
    for (uint64_t seed : {2, 3}) {
      const LayerwiseProblem problem = MakeLayerwise({0, 1, 100, kNormBlock + 5, 33, 7}, seed, wild);
      const LayerwiseAnswer expected = ExpectedLayerwise(problem);
      for (topk::Path path : Paths()) {
        const With with(path);
        for (const ParallelFor& parallel_for : {ParallelFor(), Threads(4)}) {
          HostMemory memory;
          const bool in_place = parallel_for == nullptr;
          MustBe(
              RunLayerwise(
                  problem, in_place, &memory,
                  [&](const auto* all, int64_t n, const LarsStep& step) { LarsUpdate(all, n, step, parallel_for); },
                  [&](const auto* all, int64_t n, const LambStep& step) { LambUpdates(all, n, step, parallel_for); },
                  [&](const auto* all, int64_t n, const float* rates) { ApplyUpdates(all, n, rates, parallel_for); }),
              expected);
        }
      }
    }
  }
}

}  // namespace
}  // namespace hvd_ext::test

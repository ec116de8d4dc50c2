// The kernels of topk_gpu.cu.cc, emulated on the host. The file itself is included, because tests look into the
// workspace to check that a case takes the path that it is meant for.
#include "gpu/cases.h"
#include "gpu/guarded.h"
#include "harness.h"
#include "kernels/topk_gpu.cu.cc"

namespace hvd_ext::test {
namespace {

using namespace gpu_test;
using gpu::State;

struct Outcome {
  Answer answer;
  std::vector<State> states;
};

Outcome RunEmulated(const Problem& problem) {
  const int32_t dtype = static_cast<int32_t>(problem.dtype);
  const int64_t n = static_cast<int64_t>(problem.segments.size()), picks = problem.picks();
  const size_t width = Width(problem.dtype), index_width = problem.wide ? 8 : 4;
  const int64_t workspace_nbytes = hvd_ext_topk_gpu_workspace(dtype, problem.segments.data(), n);
  if (workspace_nbytes < 0) throw Failure(hvd_ext_topk_gpu_error());
  Guarded x(problem.bits.size() * width, problem.shift * width), workspace(workspace_nbytes);
  Guarded indices(picks * index_width), values(picks * width), non_finite(sizeof(int32_t));
  const std::vector<char> packed = Packed(problem);
  if (!packed.empty()) std::memcpy(x.data, packed.data(), packed.size());
  gpu::emulated::Machine& machine = gpu::emulated::machine;
  machine.readable = {{x.data, x.data + x.nbytes}, {workspace.data, workspace.data + workspace.nbytes}};
  machine.strayed = 0;
  const int code =
      hvd_ext_topk_gpu(dtype, x.data, problem.segments.data(), n, indices.data, problem.wide, values.data,
                       reinterpret_cast<int32_t*>(non_finite.data), workspace.data, workspace_nbytes, nullptr);
  if (code != 0) throw Failure(hvd_ext_topk_gpu_error());
  CHECK_EQ(machine.strayed, 0);
  for (const Guarded* buffer : {&x, &workspace, &indices, &values, &non_finite}) buffer->MustBeWhole();

  Outcome outcome{AnswerIn(problem, indices.data, values.data, non_finite.data), std::vector<State>(n)};
  const auto states = [&](auto bits) {
    return gpu::LayoutOf<decltype(bits)>(problem.segments.data(), n, workspace.data).memory.states;
  };
  const State* seen = width == 8 ? states(uint64_t{}) : width == 4 ? states(uint32_t{}) : states(uint16_t{});
  if (n > 0) std::memcpy(outcome.states.data(), seen, n * sizeof(State));
  return outcome;
}

std::vector<State> MustSelect(const Problem& problem) {
  Outcome outcome = RunEmulated(problem);
  MustBe(problem, outcome.answer, Expected(problem));
  return outcome.states;
}

TEST("gpu: every input in every dtype, where candidates are taken in one pass") {
  uint64_t seed = 1;
  for (const SelectionInput& input : SelectionInputs()) {
    for (DType dtype : {DType::kFloat32, kFloats[seed % 3 + 1]}) {
      Problem problem = MakeProblem(input.name, dtype, 33001 + static_cast<int64_t>(seed * 977 % 9000), 0, seed);
      const int64_t elements = problem.segments[0].elements,
                    ks[] = {1, 50, elements / 100, elements / 10, elements / 4};
      problem.segments[0].k = ks[seed % 5];
      problem.shift = static_cast<int64_t>(seed % 37);
      problem.wide = seed % 2 == 0;
      const State state = MustSelect(problem)[0];
      if (state.from_x) throw Failure(problem.name + ": the sample has misled");
      ++seed;
    }
  }
}

TEST("gpu: every input, small or with a great k, where x itself is counted") {
  uint64_t seed = 100;
  const int64_t sizes[] = {1, 2, 31, 257, 1000, 8191, 8192, 8193, 16385};
  for (const SelectionInput& input : SelectionInputs()) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      const int64_t elements = sizes[seed % 9];
      const int64_t ks[] = {0, 1, elements / 10, elements / 3, elements / 2, elements - 1, elements};
      Problem problem = MakeProblem(input.name, kFloats[seed % 4], elements, ks[seed / 9 % 7], seed);
      problem.shift = static_cast<int64_t>(seed % 129);
      CHECK(MustSelect(problem)[0].from_x);
      ++seed;
    }
  }
  for (DType dtype : kFloats)
    MustSelect(MakeProblem("zeros of both signs", dtype, 20011, 20010, 1));  // zeros beside what is not there
}

TEST("gpu: a sample that sees too much or too little costs reads, not elements") {
  constexpr int64_t kElements = 60000;
  for (bool high : {true, false}) {
    Problem problem = MakeProblem("gauss", DType::kFloat32, kElements, high ? 14000 : 1000, 7);
    problem.name = high ? "great where the sample looks" : "small where the sample looks";
    for (uint64_t& bits : problem.bits) bits = (bits & 0x007fffff) | (high ? 0x3f000000 : 0x40000000);
    for (uint32_t t = 0; t < gpu::kSampleThreads; ++t) {
      const uint32_t line = gpu::SampledLine(t, kElements / 16, 0);
      for (int e = 0; e < 16; ++e) {
        uint64_t& bits = problem.bits[line * 16 + e];
        bits = (bits & 0x007fffff) | (high && e < 6 ? 0x40000000 : 0x3f000000);
      }
    }
    const State state = MustSelect(problem)[0];
    CHECK(state.from_x);
    const int64_t above = state.scanned.above, equal = state.scanned.equal;
    CHECK_EQ(high, above + equal < problem.segments[0].k);
  }
}

TEST("gpu: many segments in one call, each with its own k") {
  std::vector<int64_t> lengths = {0, 1, 7, 64, 33000, 5, 0, 8192, 8193, 40000, 0};
  for (int s = 0; s < 60; ++s) lengths.push_back(s * 7 % 300);  // more than a group of Setup, more than a warp of Plan
  for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
    for (const char* name : {"gauss", "ties"}) MustSelect(ManySegments(name, dtype, lengths, 5));
  }
}

TEST("gpu: the answer does not depend on the blocks or on who comes first") {
  gpu::emulated::Machine& machine = gpu::emulated::machine;
  // Ties, and all bins of a histogram in use.
  for (const Problem& problem : {MakeProblem("ties", DType::kFloat32, 70001, 9000, 3),
                                 MakeProblem("random bits", DType::kFloat32, 40000, 15000, 3)}) {
    const Answer expected = Expected(problem);
    const int blocks[][2] = {{1, 1}, {1, 3}, {3, 9}, {40, 2}, {2, 4}, {2, 5}};  // processors, blocks at a time
    for (const auto& [processors, resident] : blocks) {
      gpu::stand_in::processors = processors;
      machine.resident = resident;
      machine.random.seed(static_cast<unsigned>(resident));
      MustBe(problem, RunEmulated(problem).answer, expected);
    }
  }
  gpu::stand_in::processors = 2;
  machine.resident = 3;
}

TEST("gpu: nothing to select from") {
  Problem none;
  CHECK_EQ(RunEmulated(none).answer.non_finite, false);
  none.segments = {{0, 0, 0}, {0, 0, 0}};
  CHECK_EQ(RunEmulated(none).answer.non_finite, false);
}

TEST("gpu: values and the flag may be left out") {
  const HvdExtTopKSegment segment = {0, 3, 1};
  gpu::emulated::machine.readable.clear();
  Guarded x(12), workspace(hvd_ext_topk_gpu_workspace(0, &segment, 1)), index(8);
  const float three[] = {1, -3, 2};
  std::memcpy(x.data, three, sizeof three);
  const int code = hvd_ext_topk_gpu(0, x.data, &segment, 1, index.data, 1, nullptr, nullptr, workspace.data,
                                    static_cast<int64_t>(workspace.nbytes), nullptr);
  CHECK_EQ(code, 0);
  int64_t seen = -1;
  std::memcpy(&seen, index.data, 8);
  CHECK_EQ(seen, 1);
}

// Checks that the call fails as invalid and that its message contains `part`.
void MustRefuse(const char* part, int32_t dtype, std::vector<HvdExtTopKSegment> segments, size_t offset = 0,
                int64_t missing = 0, size_t workspace_offset = 0, int32_t wide = 1) {
  const int64_t n = static_cast<int64_t>(segments.size());
  const int64_t nbytes = std::max<int64_t>(hvd_ext_topk_gpu_workspace(dtype, segments.data(), n), 0);
  Guarded x(64, offset), workspace(1024, workspace_offset);
  const int code = hvd_ext_topk_gpu(dtype, x.data, segments.data(), n, x.data, wide, nullptr, nullptr, workspace.data,
                                    nbytes - missing, nullptr);
  CHECK_EQ(code, HVD_EXT_TOPK_GPU_INVALID);
  if (std::strstr(hvd_ext_topk_gpu_error(), part) == nullptr) throw Failure(hvd_ext_topk_gpu_error());
}

TEST("gpu: wrong arguments are refused in words") {
  MustRefuse("dtype (4): must be 0 float32", 4, {{0, 8, 1}});
  MustRefuse("k (9) of segment 0: must be 0 to its 8 elements", 0, {{0, 8, 9}});
  MustRefuse("k (-1)", 0, {{0, 8, -1}});
  MustRefuse("segment 1 (begin 7, 2 elements): must begin at 8 or after", 0, {{0, 8, 1}, {7, 2, 1}});
  MustRefuse("segment 0 (begin 0, 2147483648 elements)", 0, {{0, int64_t{1} << 31, 1}});
  MustRefuse("indices (int32): hold 2^31 - 1 at most", 0, {{int64_t{1} << 31, 8, 1}}, 0, 0, 0, 0);
  MustRefuse("x (", 0, {{0, 8, 1}}, 2);
  MustRefuse("workspace (", 0, {{0, 8, 1}}, 0, 1);
  MustRefuse("at a multiple of 256", 0, {{0, 8, 1}}, 0, 0, 64);
  CHECK_EQ(hvd_ext_topk_gpu_workspace(0, nullptr, 1), HVD_EXT_TOPK_GPU_INVALID);
  CHECK_EQ(hvd_ext_topk_gpu_workspace(0, nullptr, -1), HVD_EXT_TOPK_GPU_INVALID);
}

constexpr uint32_t kTiles = 600;  // more than a block has threads, twice
void SumUp(uint64_t* descriptors, uint32_t tile, gpu::Counts* before) {
  HVD_EXT_SHARED(gpu::Looked, shared);
  if (threadIdx.x == 0) gpu::Publish(descriptors, tile, {3, 4});
  *before = gpu::LookBack(descriptors, tile, {3, 4}, &shared);
}

TEST("gpu: a look-back adds up to 2^31 - 1, over more tiles than a block has threads") {
  constexpr uint32_t kMany = (1u << 31) - 1 - (kTiles - 1) * 2 - 3;
  std::vector<uint64_t> descriptors(kTiles + 1, gpu::Descriptor(gpu::kOfTile, {2, 0}));
  descriptors[0] = gpu::Descriptor(gpu::kUpToTile, {kMany, kMany});
  gpu::Counts before;
  const auto look = [&](uint32_t tile) {
    gpu::Launch(SumUp, 1, gpu::kThreads, nullptr, descriptors.data(), tile, &before);
  };
  look(kTiles);
  CHECK_EQ(before.above, kMany + (kTiles - 1) * 2);
  CHECK_EQ(before.equal, kMany);
  CHECK_EQ(descriptors[kTiles], gpu::Descriptor(gpu::kUpToTile, {kMany + (kTiles - 1) * 2 + 3, kMany + 4}));
  descriptors[300] = gpu::Descriptor(gpu::kUpToTile, {1000, 7});  // what lies before it does not count
  for (uint32_t tile : {301u, 340u, 599u}) {
    look(tile);
    CHECK_EQ(before.above, 1000 + (tile - 301) * 2);
    CHECK_EQ(before.equal, 7);
    descriptors[tile] = gpu::Descriptor(gpu::kOfTile, {2, 0});
  }
  look(0);
  CHECK_EQ(before.above, 0);
  CHECK_EQ(descriptors[0], gpu::Descriptor(gpu::kUpToTile, {3, 4}));
}

// One block of 64 threads: each thread reads what another has written.
struct Words {
  int of[64];
};
void MissesABarrier(int* seen) {
  HVD_EXT_SHARED(Words, words);
  words.of[threadIdx.x] = 1;
  seen[threadIdx.x] = words.of[63 - threadIdx.x];
}
void WaitsAlone() {
  if (threadIdx.x == 0) __syncthreads();
}

TEST("gpu: the emulation sees a missing barrier and one that not all threads reach") {
  std::vector<int> seen(64);
  gpu::Launch(MissesABarrier, 1, 64, nullptr, seen.data());
  CHECK(std::count(seen.begin(), seen.end(), 1) < 64);
  bool refused = false;
  try {
    gpu::Launch(WaitsAlone, 1, 64, nullptr);
  } catch (const std::runtime_error& error) {
    refused = std::strstr(error.what(), "waits for threads that do not come") != nullptr;
  }
  CHECK(refused);
}

}  // namespace
}  // namespace hvd_ext::test

// The kernels of norms_gpu.cu.cc, emulated on the host, against those of the processor.
#include "gpu/guarded.h"
#include "gpu/norms_cases.h"
#include "harness.h"
#include "kernels/norms_gpu.cu.cc"

namespace hvd_ext::test {
namespace {

using namespace gpu_test;

std::vector<double> RunEmulated(const Problem& problem) {
  const size_t width = Width(problem.dtype), n = problem.segments.size();
  const std::vector<char> packed = Packed(problem);
  Guarded x(packed.size(), problem.shift * width), squares(n * sizeof(double));
  std::memcpy(x.data, packed.data(), packed.size());
  const std::vector<HvdExtNormsTensor> tensors = TensorsOf(problem, x.data);
  const int64_t nbytes = hvd_ext_norms_gpu_workspace(tensors.data(), static_cast<int64_t>(n));
  if (nbytes < 0) throw Failure(hvd_ext_norms_gpu_error());
  Guarded workspace(static_cast<size_t>(nbytes));
  gpu::emulated::Machine& machine = gpu::emulated::machine;
  machine.readable.clear();
  for (const HvdExtNormsTensor& one : tensors) {
    const char* begin = static_cast<const char*>(one.data);
    machine.readable.push_back({begin, begin + one.elements * static_cast<int64_t>(width)});
  }
  machine.strayed = 0;
  const int code = hvd_ext_norms_gpu(static_cast<int32_t>(problem.dtype), tensors.data(), static_cast<int64_t>(n),
                                     reinterpret_cast<double*>(squares.data), workspace.data, nbytes, nullptr);
  if (code != 0) throw Failure(hvd_ext_norms_gpu_error());
  CHECK_EQ(machine.strayed, 0);
  machine.readable.clear();
  for (const Guarded* buffer : {&x, &squares, &workspace}) buffer->MustBeWhole();
  std::vector<double> found(n);
  std::memcpy(found.data(), squares.data, squares.nbytes);
  return found;
}

// The sums that the processor's kernels find.
std::vector<double> OnTheProcessor(const Problem& problem) {
  const std::vector<char> packed = Packed(problem);
  std::vector<double> all;
  for (const HvdExtNormsTensor& one : TensorsOf(problem, packed.data())) {
    std::vector<NormBlock> blocks;
    for (int64_t begin = 0; begin < one.elements; begin += kNormBlock) {
      const int64_t at = begin * static_cast<int64_t>(Width(problem.dtype));
      blocks.push_back({static_cast<const char*>(one.data) + at, std::min(kNormBlock, one.elements - begin)});
    }
    const int64_t n = static_cast<int64_t>(blocks.size());
    std::vector<double> sums(blocks.size());
    NormSquares(problem.dtype, blocks.data(), n, nullptr, sums.data());
    all.push_back(NormSum(sums.data(), n));
  }
  return all;
}

TEST("gpu norms: many tensors have the bits of the processor's norms and of the definition") {
  uint64_t seed = 1;
  for (const char* name : {"gauss", "log-normal", "ties", "ascending", "denormals", "NaN and infinity", "random bits",
                           "few are not zero"}) {
    const Problem problem = NormsProblem(name, kFloats[seed % 4], seed);
    ++seed;
    const std::vector<double> expected = OnTheProcessor(problem);
    MustBe(problem, ExpectedSquares(problem), expected);
    MustBe(problem, RunEmulated(problem), expected);
  }
  for (const char* name : {"denormals", "NaN and infinity", "random bits"}) {  // alone, or with few others
    for (DType dtype : kFloats) {
      Problem problem = MakeProblem(name, dtype, 1600, 0, 3);
      problem.segments.clear();
      for (int64_t i = 0; i < 200; ++i) problem.segments.push_back({8 * i, 1 + i % 8, 0});
      MustBe(problem, RunEmulated(problem), OnTheProcessor(problem));
    }
  }
}

TEST("gpu norms: no tensors, and tensors without elements") {
  CHECK_EQ(hvd_ext_norms_gpu(0, nullptr, 0, nullptr, Guarded(256).data, 256, nullptr), 0);
  const HvdExtNormsTensor nothing[] = {{nullptr, 0}, {nullptr, 0}};
  Guarded workspace(static_cast<size_t>(hvd_ext_norms_gpu_workspace(nothing, 2)));
  double squares[] = {1, 2};
  CHECK_EQ(hvd_ext_norms_gpu(1, nothing, 2, squares, workspace.data, 256, nullptr), 0);
  CHECK_EQ(squares[0], 0);
  CHECK_EQ(squares[1], 0);
}

// Checks that the call fails as invalid and that its message contains `part`.
void MustRefuse(const char* part, int32_t dtype, std::vector<HvdExtNormsTensor> tensors, int64_t nbytes = 512,
                size_t offset = 0) {
  Guarded workspace(1024, offset);
  double squares[2];
  const int64_t n = static_cast<int64_t>(tensors.size());
  CHECK_EQ(hvd_ext_norms_gpu(dtype, tensors.data(), n, squares, workspace.data, nbytes, nullptr),
           HVD_EXT_NORMS_GPU_INVALID);
  if (std::strstr(hvd_ext_norms_gpu_error(), part) == nullptr) throw Failure(hvd_ext_norms_gpu_error());
}

TEST("gpu norms: wrong arguments are refused in words") {
  alignas(8) const char x[64] = {};
  MustRefuse("dtype (4): must be 0 float32", 4, {{x, 8}});
  MustRefuse("tensor 1 (-1 elements at", 0, {{x, 8}, {x, -1}});
  MustRefuse("must have 0 or more elements, in memory", 0, {{nullptr, 1}});
  MustRefuse("tensors (2): must have fewer than 2^31 blocks", 0, {{x, int64_t{1} << 46}, {x, int64_t{1} << 46}});
  MustRefuse("must begin at a multiple of an element's 8 bytes", 1, {{x + 4, 1}});
  MustRefuse("workspace (255 bytes", 0, {{x, 8}}, 255);
  MustRefuse("at a multiple of 256", 0, {{x, 8}}, 512, 64);
  CHECK_EQ(hvd_ext_norms_gpu_workspace(nullptr, 1), HVD_EXT_NORMS_GPU_INVALID);
  CHECK_EQ(hvd_ext_norms_gpu_workspace(nullptr, -1), HVD_EXT_NORMS_GPU_INVALID);
}

}  // namespace
}  // namespace hvd_ext::test

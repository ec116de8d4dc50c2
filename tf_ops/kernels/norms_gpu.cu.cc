// Sums of squares on a GPU. The definition of kernels/norms.h is made for a warp: its 32 lanes are those of the
// definition, so each block of 65,536 elements belongs to one warp, whose loads are whole lines. The steps are kernels
// in one stream:
//   WriteTable   (tensors_gpu.h) writes the table of tensors to the workspace
//   Squares      one warp, alone in its CUDA block, for each block of a tensor: tensors of all lengths spread over the
//                multiprocessors evenly
//   Add          one thread for each tensor adds the sums of its blocks in their order
//
// A lane's additions wait for each other, 2,048 in a block, which takes about 10 us. Reading is what takes longest as
// long as there are enough blocks, and if each lane has many loads on their way: it asks for the next kAhead elements
// before it adds the last ones.
#include "kernels/norms_gpu.h"

#include <algorithm>
#include <cstring>

#include "kernels/norms.h"
#include "kernels/tensors_gpu.h"

namespace hvd_ext::gpu {
namespace {

constexpr int kAhead = 32;
constexpr int kAddThreads = 64;

struct Memory {
  Table<HvdExtNormsTensor> tensors;
  double* sums;  // of blocks
};

// How the elements of a dtype lie in memory, and their magnitudes, which float64 holds exactly.
struct Float32 {
  using Word = float;
  static __device__ double Wide(Word x) { return x; }
};
struct Float64 {
  using Word = double;
  static __device__ double Wide(Word x) { return x; }
};
__device__ inline float FloatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
struct Half {
  using Word = unsigned short;
  static __device__ double Wide(Word x) {
    // The exponent's bias is 112 less than that of float32; infinity and NaN keep the greatest exponent.
    const uint32_t magnitude = x & 0x7fffu;
    if (magnitude >= 0x7c00u) return FloatOfBits(magnitude << 13 | 0x7f800000u);
    return static_cast<double>(FloatOfBits(magnitude << 13)) * 0x1p112;
  }
};
struct BHalf {
  using Word = unsigned short;
  static __device__ double Wide(Word x) { return FloatOfBits(static_cast<uint32_t>(x) << 16); }
};

// A product and a sum stay two operations: float64 would round otherwise.
template <typename Format>
__device__ inline double Plus(double sum, typename Format::Word x) {
  const double wide = Format::Wide(x);
  return __dadd_rn(sum, __dmul_rn(wide, wide));
}

template <typename Format>
__global__ void __launch_bounds__(kLanes) Squares(Memory memory) {
  using Word = typename Format::Word;
  constexpr int kBatch = kAhead * kLanes;
  const int64_t number = memory.tensors.TensorOf(blockIdx.x);
  const HvdExtNormsTensor tensor = memory.tensors.rows[number];
  const int64_t begin = (blockIdx.x - memory.tensors.starts[number]) * kNormBlock;
  const int64_t left = tensor.elements - begin;
  const int elements = static_cast<int>(left < kNormBlock ? left : kNormBlock);
  const Word* x = static_cast<const Word*>(tensor.data) + begin;
  double sum = 0;
  int at = Lane();
  if (elements >= kBatch) {
    Word next[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next[i] = __ldcs(x + at + i * kLanes);
    for (; at + kBatch - Lane() <= elements; at += kBatch) {
      Word now[kAhead];
      const bool more = at + 2 * kBatch - Lane() <= elements;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) now[i] = next[i];
      if (more) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) next[i] = __ldcs(x + at + kBatch + i * kLanes);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) sum = Plus<Format>(sum, now[i]);
    }
  }
  for (; at < elements; at += kLanes) sum = Plus<Format>(sum, __ldcs(x + at));
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum = __dadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, step));
  if (Lane() == 0) memory.sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kAddThreads) Add(Memory memory, double* squares) {
  const int64_t tensor = int64_t{blockIdx.x} * kAddThreads + threadIdx.x;
  if (tensor >= memory.tensors.n) return;
  double sum = 0;
  const int64_t end = memory.tensors.starts[tensor + 1];
#pragma unroll 8
  for (int64_t block = memory.tensors.starts[tensor]; block < end; ++block) sum = __dadd_rn(sum, memory.sums[block]);
  squares[tensor] = sum;
}

// Returns the number of blocks, or HVD_EXT_NORMS_GPU_INVALID where the tensors are refused.
int64_t BlocksOfAll(const HvdExtNormsTensor* tensors, int64_t n) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (n < 0 || n > kMost || (n > 0 && tensors == nullptr)) {
    return Fail(HVD_EXT_NORMS_GPU_INVALID, "tensors (%lld): must be 0 to 2^31 - 1, with an array",
                static_cast<long long>(n));
  }
  int64_t blocks = 0;
  for (int64_t i = 0; i < n; ++i) {
    const long long elements = tensors[i].elements, number = i;
    if (elements < 0 || elements > kMost * kNormBlock || (elements > 0 && tensors[i].data == nullptr)) {
      return Fail(HVD_EXT_NORMS_GPU_INVALID,
                  "tensor %lld (%lld elements at %p): must have 0 or more elements, in memory", number, elements,
                  tensors[i].data);
    }
    blocks += NormBlocks(elements);
    if (blocks > kMost) {
      return Fail(HVD_EXT_NORMS_GPU_INVALID, "tensors (%lld): must have fewer than 2^31 blocks of %lld elements",
                  static_cast<long long>(n), static_cast<long long>(kNormBlock));
    }
  }
  return blocks;
}

int64_t WorkspaceNbytes(int64_t n, int64_t blocks) {
  return TableNbytes<HvdExtNormsTensor>(n) + RoundedUp(blocks * static_cast<int64_t>(sizeof(double)), 256);
}

template <typename Format>
int Run(const HvdExtNormsTensor* tensors, int64_t n, int64_t blocks, double* squares, void* workspace,
        int64_t workspace_nbytes, cudaStream_t stream) {
  const int64_t needed = WorkspaceNbytes(n, blocks);
  if (workspace_nbytes < needed || reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    return Fail(HVD_EXT_NORMS_GPU_INVALID, "workspace (%lld bytes at %p): must have %lld bytes at a multiple of 256",
                static_cast<long long>(workspace_nbytes), workspace, static_cast<long long>(needed));
  }
  for (int64_t i = 0; i < n; ++i) {
    if (reinterpret_cast<uintptr_t>(tensors[i].data) % sizeof(typename Format::Word) != 0) {
      return Fail(HVD_EXT_NORMS_GPU_INVALID, "tensor %lld (at %p): must begin at a multiple of an element's %zu bytes",
                  static_cast<long long>(i), tensors[i].data, sizeof(typename Format::Word));
    }
  }
  if (n == 0) return 0;
  Memory memory;
  memory.sums = reinterpret_cast<double*>(static_cast<char*>(workspace) + TableNbytes<HvdExtNormsTensor>(n));
  if (const int code = Tabulate(tensors, n, kNormBlock, workspace, stream, &memory.tensors); code != 0) return code;
  if (blocks > 0) {
    HVD_EXT_LAUNCH(Squares<Format>, blocks, kLanes, stream, memory);
  }
  HVD_EXT_LAUNCH(Add, (n + kAddThreads - 1) / kAddThreads, kAddThreads, stream, memory, squares);
  return 0;
}

}  // namespace
}  // namespace hvd_ext::gpu

int64_t hvd_ext_norms_gpu_workspace(const HvdExtNormsTensor* tensors, int64_t n_tensors) {
  using namespace hvd_ext::gpu;
  const int64_t blocks = BlocksOfAll(tensors, n_tensors);
  return blocks < 0 ? blocks : WorkspaceNbytes(n_tensors, blocks);
}

int hvd_ext_norms_gpu(int32_t dtype, const HvdExtNormsTensor* tensors, int64_t n_tensors, double* squares,
                      void* workspace, int64_t workspace_nbytes, void* stream) {
  using namespace hvd_ext::gpu;
  using hvd_ext::DType;
  const int64_t blocks = BlocksOfAll(tensors, n_tensors);
  if (blocks < 0) return static_cast<int>(blocks);
  const auto run = [&](auto format) {
    return Run<decltype(format)>(tensors, n_tensors, blocks, squares, workspace, workspace_nbytes,
                                 static_cast<cudaStream_t>(stream));
  };
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      return run(Float32());
    case DType::kFloat64:
      return run(Float64());
    case DType::kFloat16:
      return run(Half());
    case DType::kBFloat16:
      return run(BHalf());
    default:
      return Fail(HVD_EXT_NORMS_GPU_INVALID, "dtype (%d): must be 0 float32, 1 float64, 2 float16 or 3 bfloat16",
                  dtype);
  }
}

const char* hvd_ext_norms_gpu_error(void) { return hvd_ext::gpu::error; }

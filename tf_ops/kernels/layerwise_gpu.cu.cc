// The updates of LARS and LAMB on a GPU: one kernel for all variables, each block of which updates kPiece elements of
// one variable. Reading and writing is what takes time.
#include "kernels/layerwise_gpu.h"

#include <cfloat>
#include <cmath>

#include "kernels/layerwise_each.h"
#include "kernels/tensors_gpu.h"

namespace hvd_ext::gpu {
namespace {

constexpr int kUpdateThreads = 256;
constexpr int64_t kPiece = 4096;

// A GPU computes with denormals, so that each of them is made 0 here.
struct Flushed {
  HVD_EXT_EACH static float Of(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
};

// A thread's part of a block.
struct Strided {
  int64_t begin, end;
  template <typename Each>
  HVD_EXT_EACH void operator()(Each each) const {
    for (int64_t i = begin; i < end; i += kUpdateThreads) each(i);
  }
};

template <typename Variable, typename Step>
__global__ void __launch_bounds__(kUpdateThreads) Update(Table<Variable> table, Step step) {
  const int64_t number = table.TensorOf(blockIdx.x);
  const Variable variable = table.rows[number];
  const int64_t begin = (blockIdx.x - table.starts[number]) * kPiece;
  const int64_t end = begin + kPiece < variable.elements ? begin + kPiece : variable.elements;
  OfVariable<Flushed>(variable, number, step, Strided{begin + static_cast<int64_t>(threadIdx.x), end});
}

int64_t WorkspaceNbytes(int64_t n) { return TableNbytes<LambVariable>(n); }  // the longest rows

template <typename Variable, typename Step>
int Run(const Variable* variables, int64_t n, const Step& step, void* workspace, int64_t workspace_nbytes,
        void* to_stream) {
  static_assert(sizeof(Variable) <= sizeof(LambVariable), "the size of the workspace");
  const int64_t needed = WorkspaceNbytes(n);
  if (n < 0 || workspace_nbytes < needed || reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    return Fail(HVD_EXT_LAYERWISE_GPU_INVALID,
                "workspace (%lld bytes at %p): must have %lld bytes at a multiple of 256",
                static_cast<long long>(workspace_nbytes), workspace, static_cast<long long>(needed));
  }
  if (n == 0) return 0;
  const auto stream = static_cast<cudaStream_t>(to_stream);
  Table<Variable> table;
  if (const int code = Tabulate(variables, n, kPiece, workspace, stream, &table); code != 0) return code;
  if (table.blocks == 0) return 0;
  HVD_EXT_LAUNCH((Update<Variable, Step>), table.blocks, kUpdateThreads, stream, table, step);
  return 0;
}

}  // namespace
}  // namespace hvd_ext::gpu

int64_t hvd_ext_layerwise_gpu_workspace(int64_t n) { return hvd_ext::gpu::WorkspaceNbytes(n); }

int hvd_ext_lars_gpu(const hvd_ext::LarsVariable* variables, int64_t n, const hvd_ext::LarsStep* step, void* workspace,
                     int64_t workspace_nbytes, void* stream) {
  return hvd_ext::gpu::Run(variables, n, *step, workspace, workspace_nbytes, stream);
}

int hvd_ext_lamb_gpu(const hvd_ext::LambVariable* variables, int64_t n, const hvd_ext::LambStep* step, void* workspace,
                     int64_t workspace_nbytes, void* stream) {
  return hvd_ext::gpu::Run(variables, n, *step, workspace, workspace_nbytes, stream);
}

int hvd_ext_move_gpu(const hvd_ext::MovedVariable* variables, int64_t n, const float* rates, void* workspace,
                     int64_t workspace_nbytes, void* stream) {
  return hvd_ext::gpu::Run(variables, n, rates, workspace, workspace_nbytes, stream);
}

const char* hvd_ext_layerwise_gpu_error(void) { return hvd_ext::gpu::error; }

#include "kernels/norms.h"

#include <algorithm>

#include "kernels/denormals.h"
#include "kernels/dtypes.h"
#include "kernels/half.h"
#include "kernels/topk_scan.h"
#include "kernels/wide.h"

#if defined(__x86_64__)
#include <immintrin.h>
// of the compiler's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace hvd_ext {
namespace {

constexpr int64_t kLanes = 32;
constexpr int64_t kAhead = 2048;  // how far the prefetch runs ahead of the loads, as in the yardstick (read_pass.cc)

// Adds the elements from `begin` on to their lanes, and the lanes to each other.
template <typename T>
inline double Rest(const T* x, int64_t begin, int64_t elements, double* lanes) {
  for (int64_t i = begin; i < elements; ++i) lanes[i % kLanes] += Wide(x[i]) * Wide(x[i]);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <typename T>
double Squares(topk::Path, const T* x, int64_t elements) {
  double lanes[kLanes] = {};
  return Rest(x, 0, elements, lanes);
}

#if defined(__x86_64__)
// The square of a float32 is exact in float64, so a fused multiply-add has the bits of a product and a sum.
#define HVD_EXT_512 __attribute__((target("avx512f,fma")))
#define HVD_EXT_256 __attribute__((target("avx2,fma")))

HVD_EXT_ALWAYS void AskLanes(const float* x, int64_t i) {
  if (topk::BeginsPage<float>(i)) Ask(x + i, topk::kPageAhead);
  Ask(x + i, kAhead);
  Ask(x + i, kAhead + 64);
}

HVD_EXT_512 double Squares512(const float* x, int64_t elements) {
  __m512d sums[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
  int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    AskLanes(x, i);
#pragma GCC unroll 4
    for (int64_t part = 0; part < 4; ++part) {
      const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * part));
      sums[part] = _mm512_fmadd_pd(wide, wide, sums[part]);
    }
  }
  alignas(64) double lanes[kLanes];
  for (int64_t part = 0; part < 4; ++part) _mm512_store_pd(lanes + 8 * part, sums[part]);
  return Rest(x, i, elements, lanes);
}

HVD_EXT_256 double Squares256(const float* x, int64_t elements) {
  __m256d sums[8];
  for (__m256d& sum : sums) sum = _mm256_setzero_pd();
  int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    AskLanes(x, i);
#pragma GCC unroll 8
    for (int64_t part = 0; part < 8; ++part) {
      const __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * part));
      sums[part] = _mm256_fmadd_pd(wide, wide, sums[part]);
    }
  }
  alignas(32) double lanes[kLanes];
  for (int64_t part = 0; part < 8; ++part) _mm256_store_pd(lanes + 4 * part, sums[part]);
  return Rest(x, i, elements, lanes);
}

double Squares(topk::Path path, const float* x, int64_t elements) {
  if (path == topk::Path::kAvx512) return Squares512(x, elements);
  if (path == topk::Path::kAvx2 && __builtin_cpu_supports("fma")) return Squares256(x, elements);
  return Squares<float>(path, x, elements);
}
#endif

}  // namespace

void NormSquares(DType dtype, const NormBlock* blocks, int64_t n_blocks, const ParallelFor& parallel_for,
                 double* sums) {
  const topk::Path path = topk::CurrentPath();
  auto run = [&](int64_t begin, int64_t end) {
    const WithDenormals denormals;
    WithFloat("norms of dtype", dtype, [&](auto zero) {
      for (int64_t i = begin; i < end; ++i) {
        sums[i] = Squares(path, static_cast<const decltype(zero)*>(blocks[i].data), blocks[i].elements);
      }
    });
  };
  int64_t elements = 0;
  for (int64_t i = 0; i < n_blocks; ++i) elements += blocks[i].elements;
  if (parallel_for == nullptr || n_blocks < 2) return run(0, n_blocks);
  parallel_for(n_blocks, elements / n_blocks / 4, run);  // about 4 elements in a nanosecond
}

double NormSum(const double* sums, int64_t n_blocks) {
  double sum = 0;
  for (int64_t i = 0; i < n_blocks; ++i) sum += sums[i];
  return sum;
}

}  // namespace hvd_ext

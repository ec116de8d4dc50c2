#include "kernels/read_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/half.h"
#include "kernels/topk_scan.h"
#include "kernels/wide.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hvd_ext {
namespace {

// How far the prefetch runs ahead of the loads. Without it the same sum is 5 to 15 % slower, which would flatter
// everything that is compared with it.
constexpr int64_t kAhead = 2048;  // bytes
constexpr int64_t kBlock = 128;   // floats: 8 cache lines, and 8 sums of 16 lanes

inline float MagnitudeOf(float value) { return FloatOf(BitsOf(value) & 0x7fffffffu); }

double SumPlain(const float* x, int64_t elements) {
  double sum = 0;
  for (int64_t i = 0; i < elements; ++i) sum += MagnitudeOf(x[i]);
  return sum;
}

#if defined(__x86_64__)
// Prefetches a block and, earlier, one line of each page, so that the page's address is translated in time: another 10
// %.
HVD_EXT_ALWAYS void AskBlock(const float* x, int64_t i) {
  if (topk::BeginsPage<float>(i)) Ask(x + i, topk::kPageAhead);
  for (int64_t line = 0; line < 8; ++line) Ask(x + i, kAhead + 64 * line);
}

// float32 sums are enough: the sum only keeps the compiler from dropping the loads, and shows that they were made.
__attribute__((target("avx512f"))) double SumAvx512(const float* x, int64_t elements) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  __m512 sums[8];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + kBlock <= elements; i += kBlock) {
    AskBlock(x, i);
#pragma GCC unroll 8
    for (int lane = 0; lane < 8; ++lane) {
      __m512i bits = _mm512_and_epi32(_mm512_loadu_si512(x + i + 16 * lane), mask);
      sums[lane] = _mm512_add_ps(sums[lane], _mm512_castsi512_ps(bits));
    }
  }
  double sum = SumPlain(x + i, elements - i);
  for (const __m512& one : sums) {
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, one);
    for (float value : lanes) sum += value;
  }
  return sum;
}

__attribute__((target("avx2"))) double SumAvx2(const float* x, int64_t elements) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 sums[8];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kBlock <= elements; i += kBlock) {
    AskBlock(x, i);
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) {
      __m256 low = _mm256_and_ps(_mm256_loadu_ps(x + i + 16 * line), mask);
      __m256 high = _mm256_and_ps(_mm256_loadu_ps(x + i + 16 * line + 8), mask);
      sums[line] = _mm256_add_ps(sums[line], _mm256_add_ps(low, high));
    }
  }
  double sum = SumPlain(x + i, elements - i);
  for (const __m256& one : sums) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, one);
    for (float value : lanes) sum += value;
  }
  return sum;
}
#endif

double Sum(const float* x, int64_t elements) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return SumAvx512(x, elements);
  if (__builtin_cpu_supports("avx2")) return SumAvx2(x, elements);
#endif
  return SumPlain(x, elements);
}

struct Statistics {
  double sum;
  float largest;
};

// The loops of Algorithm 1, which the compiler vectorises for each of the instruction sets.
HVD_EXT_ALWAYS Statistics Magnitudes(const float* x, float* a, int64_t elements) {
  float sums[64] = {}, most[64] = {};  // float32, as in a framework's mean
  for (int64_t i = 0; i < elements; ++i) a[i] = MagnitudeOf(x[i]);
  int64_t whole = elements - elements % 64;
  for (int64_t i = 0; i < whole; i += 64)
    for (int lane = 0; lane < 64; ++lane) {
      sums[lane] += a[i + lane];
      most[lane] = most[lane] < a[i + lane] ? a[i + lane] : most[lane];
    }
  for (int64_t i = whole; i < elements; ++i) {
    sums[0] += a[i];
    most[0] = most[0] < a[i] ? a[i] : most[0];
  }
  Statistics found{0, 0};
  for (float sum : sums) found.sum += sum;
  for (float one : most) found.largest = std::max(found.largest, one);
  return found;
}

HVD_EXT_ALWAYS int64_t Count(const float* a, int64_t elements, float threshold) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < elements; begin += int64_t{1} << 30) {
    int32_t part = 0;  // 32 bits wide, as the elements are, so that one vector counts 16 at once
    int64_t end = std::min(begin + (int64_t{1} << 30), elements);
    for (int64_t i = begin; i < end; ++i) part += a[i] >= threshold;
    count += part;
  }
  return count;
}

}  // namespace

double ReadPass(const float* x, int64_t elements, int32_t threads) {
  // A part is a multiple of a cache line, so that no line is read twice.
  const int64_t parts = std::max<int32_t>(threads, 1), share = (elements / parts + 15) / 16 * 16;
  std::vector<double> sums(static_cast<size_t>(parts), 0.0);
  auto sum = [&](int64_t part) {
    int64_t begin = std::min(part * share, elements);
    int64_t end = part + 1 == parts ? elements : std::min(begin + share, elements);
    sums[static_cast<size_t>(part)] = Sum(x + begin, end - begin);
  };
  std::vector<std::thread> others;
  for (int64_t part = 1; part < parts; ++part) others.emplace_back(sum, part);
  sum(0);
  for (std::thread& other : others) other.join();
  double total = 0;
  for (double one : sums) total += one;
  return total;
}

int64_t Algorithm1(const float* x, int64_t elements, int64_t k, int32_t samplings, uint64_t seed, float* magnitudes,
                   int32_t* indices, float* values) {
  if (elements == 0) return 0;
  const topk::Path path = topk::CurrentPath();
  const Statistics found = topk::OnPath<Magnitudes>(path, x, magnitudes, elements);
  const float mean = static_cast<float>(found.sum / static_cast<double>(elements));
  float left = 0, right = 1, above = 0, below = 0;  // the paper's l, r, thres1, thres2
  int64_t fewer = 0, more = elements;               // the paper's k1, k2
  for (int32_t i = 0; i < samplings; ++i) {
    float ratio = left + (right - left) / 2;
    float threshold = mean + ratio * (found.largest - mean);
    int64_t count = topk::OnPath<Count>(path, magnitudes, elements, threshold);
    if (count <= k) {
      right = ratio;
      if (count > fewer) {
        fewer = count;
        above = threshold;
      }
    } else {
      left = ratio;
      if (count < more) {
        more = count;
        below = threshold;
      }
    }
  }
  int64_t picked = 0, window = 0;
  for (int64_t i = 0; i < elements; ++i) {
    indices[picked] = static_cast<int32_t>(i);
    picked += magnitudes[i] >= above;
    if (picked == elements) break;
  }
  // The second set is stored after the first in the same array: together they have at most `elements` members.
  int32_t* between = indices + picked;
  for (int64_t i = 0; i < elements && picked + window < elements; ++i) {
    between[window] = static_cast<int32_t>(i);
    window += magnitudes[i] < above && magnitudes[i] >= below;
  }
  const int64_t wanted = std::max<int64_t>(k - fewer, 0), choices = window - wanted + 1;
  const int64_t skipped = choices > 0 ? static_cast<int64_t>(seed % static_cast<uint64_t>(choices)) : 0;
  const int64_t filled = std::min(wanted, window);
  std::memmove(between, between + skipped, static_cast<size_t>(filled) * sizeof(int32_t));
  picked += filled;
  for (int64_t i = 0; i < picked; ++i) values[i] = x[indices[i]];
  return picked;
}

}  // namespace hvd_ext

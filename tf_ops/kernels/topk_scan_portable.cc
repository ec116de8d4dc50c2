// The loops of the selection for any processor, and the choice of loops for the processor at hand.
#include <algorithm>
#include <atomic>

#include "kernels/topk_loops.h"

namespace hvd_ext::topk {
namespace {

// A run is scanned element by element only if its greatest key reaches the bound: the search for that key vectorises.
template <typename Bits>
int64_t Scan(const Bits* x, int64_t elements, Bits bound, uint16_t* ids) {
  constexpr int64_t kRun = 64;
  int64_t count = 0, i = 0;
  for (; i + kRun <= elements; i += kRun) {
    Bits greatest = 0;
    for (int64_t j = i; j < i + kRun; ++j) greatest = std::max(greatest, KeyOf(x[j]));
    if (greatest >= bound) count = ScanRest(x, i, i + kRun, bound, ids, count);
  }
  return ScanRest(x, i, elements, bound, ids, count);
}

int64_t ScanFeedback(const ErrorFeedback& f, int64_t elements, uint32_t bound, uint32_t place,
                     Candidates<uint32_t> to) {
  return FeedbackRest(f, int64_t{0}, elements, bound, place, to, int64_t{0});
}

void AccumulateEach(const ErrorFeedback& f, int64_t elements, float* accumulated) {
  AccumulateRest(f, int64_t{0}, elements, accumulated);
}

template <typename Bits>
constexpr Loops<Bits> kLoops = {Scan<Bits>, AppendEach<Bits>, BetweenEach<Bits>, EmitEach<Bits>};
constexpr FeedbackLoops kFeedback = {ScanFeedback, AccumulateEach};

}  // namespace

#if defined(__x86_64__)
extern const Loops<uint16_t> kLoops16Avx512, kLoops16Avx2;
extern const Loops<uint32_t> kLoops32Avx512, kLoops32Avx2;
extern const Loops<uint64_t> kLoops64Avx512, kLoops64Avx2;
extern const FeedbackLoops kFeedbackAvx512, kFeedbackAvx2;

Path BestPath() {
  const bool bits = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(__SANITIZE_THREAD__)
  constexpr bool kMasksHold = false;  // GCC 12 spills masks wrongly around the calls that this sanitizer inserts
#else
  constexpr bool kMasksHold = true;
#endif
  if (kMasksHold && bits && wide && __builtin_cpu_supports("avx512vbmi2")) return Path::kAvx512;
  return bits && __builtin_cpu_supports("avx2") ? Path::kAvx2 : Path::kPortable;
}
#define HVD_EXT_LOOPS(path, portable, name) \
  (path == Path::kAvx512 ? name##Avx512 : path == Path::kAvx2 ? name##Avx2 : portable)
#else
Path BestPath() { return Path::kPortable; }
#define HVD_EXT_LOOPS(path, portable, name) (static_cast<void>(path), portable)
#endif

namespace {
std::atomic<int> forced{-1};
std::atomic<Misled> misled{Misled::kNot};
}  // namespace

Path CurrentPath() {
  static const Path best = BestPath();
  const int now = forced.load(std::memory_order_relaxed);
  return now < 0 ? best : static_cast<Path>(now);
}

bool UsePath(Path path) {
  if (path > BestPath()) return false;
  forced.store(static_cast<int>(path));
  return true;
}

void MisleadSampler(Misled how) { misled.store(how); }
Misled SamplerMisled() { return misled.load(std::memory_order_relaxed); }

template <>
const Loops<uint16_t>& LoopsOf(Path path) {
  return HVD_EXT_LOOPS(path, kLoops<uint16_t>, kLoops16);
}
template <>
const Loops<uint32_t>& LoopsOf(Path path) {
  return HVD_EXT_LOOPS(path, kLoops<uint32_t>, kLoops32);
}
template <>
const Loops<uint64_t>& LoopsOf(Path path) {
  return HVD_EXT_LOOPS(path, kLoops<uint64_t>, kLoops64);
}
const FeedbackLoops& FeedbackLoopsOf(Path path) { return HVD_EXT_LOOPS(path, kFeedback, kFeedback); }

}  // namespace hvd_ext::topk

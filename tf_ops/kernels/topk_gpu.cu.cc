// Exact top-k on a GPU in one pass over x. The steps are kernels in one stream, and the host does nothing between them:
//   Sample  finds, from 1024 lines of a segment, a bound that is very likely below T and not far from it
//   Scan    reads x once: keys > bound, and the first k that equal it, become candidates, in the order of their indices
//   Plan    decides on the device whether the candidates are enough; if they are not, the next kernels read x itself
//   Count   makes a histogram of the next 11 bits of the keys and finds the bin that T lies in; it runs three times for
//           float32
//   Emit    writes the keys > T, and the first that equal it, to the answer, in the order of their indices
// Segments that are small or have a large k have no candidates: Count and Emit read x (4 reads for float32, or 2 of a
// segment of one tile, for which the first Count does all).
//
// Pitfalls of top-k on a GPU, and how this file avoids them:
//  1 An atomic for each selected element is slow and gives an order that varies. Here places come from the counts of
//    tiles and a look-back; atomics only count, where the order does not matter.
//  2 Histograms in shared memory serialise where keys are alike (zeros, constants). Here bins count from the bound, so
//    that the sign and common exponents are gone, a warp whose keys share a bin adds once, and only candidates are
//    counted.
//  3 A grid-wide barrier needs all blocks on the device at once. Here each step is a launch of its own, and the last
//    block of a segment (known by a counter and __threadfence) closes the segment's histogram.
//  4 The host does not know the number of candidates. Here launches are sized for the most that there can be, and
//    blocks take tiles until there are none. If there are too many or too few candidates, Plan has x read again: that
//    costs reads, but never loses elements.
//  5 The answer must not vary. Here keys that equal T are counted apart from those above it, and the picks among them
//    are those of lowest index.
//  6 Comparisons of floats fail for NaN and for flushed denormals. Here only integers are compared.
//  7 A segment may begin at any element. Here tiles begin at a line boundary at or before it, and the vectors at its
//    ends are read element by element.
//  8 A launch for each segment would be slow for a model of 161 layers. Here each step is one launch for all segments,
//    and blocks find (segment, tile) in a list of first tiles.
//  9 Offsets can exceed 2^31. Here they have 64 bits across segments, and 32 inside a segment, whose length is checked.
// 10 If many keys equal the bound (all zeros), they would overflow any buffer. Here at most k of them are kept, so that
//    one pass is enough.
#include "kernels/topk_gpu.h"

#include <algorithm>

#include "kernels/reduce.h"
#include "kernels/topk_gpu_kernels.h"

namespace hvd_ext::gpu {
namespace {

constexpr int kTickets = 16;

bool Direct(const HvdExtTopKSegment& segment) {
  return segment.k == 0 || segment.elements <= kUnsampled || segment.k > segment.elements / 4;
}

// The sample's bound leaves 1.3 k to 3 k candidates. Where k is only a few elements of the sample it may leave more,
// and the other terms are for those.
int64_t Capacity(const HvdExtTopKSegment& segment) {
  if (Direct(segment)) return 0;
  return std::min(segment.elements, 3 * segment.k + segment.elements / 256 + 4096);
}

// The parts of the workspace. x may begin at any element, so each segment may reach into one more tile.
struct Layout {
  int64_t n = 0, tiles = 0, histograms = 0, candidates = 0, nbytes = 0, cleared = 0;
  uintptr_t begin = 0;
  Memory memory = {};

  template <typename Bits>
  void Add(const HvdExtTopKSegment& segment) {
    const int64_t mine = MostTiles<Bits>(segment);
    ++n;
    tiles += mine;
    histograms += mine > 1;
    candidates += RoundedUp(Capacity(segment), kAlignment);  // a multiple of 128 elements: each begins at a line
  }
  template <typename Bits>
  static int64_t MostTiles(const HvdExtTopKSegment& segment) {
    return segment.elements == 0 ? 0 : TilesOf<Bits>(segment.elements + kAlignment / sizeof(Bits) - 1);
  }
  template <typename Bits>
  void Place(void* workspace) {
    begin = reinterpret_cast<uintptr_t>(workspace);
    memory.n = n;
    Part(&memory.tickets, kTickets);
    Part(&memory.done, n);
    Part(&memory.histograms, histograms * kBins);
    Part(&memory.scanned, tiles);
    Part(&memory.emitted, tiles);
    cleared = nbytes;
    Part(&memory.segments, n);
    Part(&memory.states, n);
    Part(&memory.scan_starts, n + 1);
    Part(&memory.starts, n + 1);
    Bits* values = nullptr;
    Part(&values, candidates);
    memory.values = values;
    Part(&memory.positions, candidates);
  }
  template <typename Element>
  void Part(Element** part, int64_t elements) {
    *part = reinterpret_cast<Element*>(begin + nbytes);
    nbytes += RoundedUp(elements * sizeof(Element), 256);
  }
};

int Check(const HvdExtTopKSegment* segments, int64_t n) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (n < 0 || n > kMost || (n > 0 && segments == nullptr)) {
    return Fail(HVD_EXT_TOPK_GPU_INVALID, "segments (%lld): must be 0 to 2^31 - 1, with an array",
                static_cast<long long>(n));
  }
  int64_t end = 0;
  for (int64_t s = 0; s < n; ++s) {
    const HvdExtTopKSegment& segment = segments[s];
    const long long begin = segment.begin, elements = segment.elements, k = segment.k, number = s;
    if (begin < end || elements < 0 || elements > kMost) {
      return Fail(
          HVD_EXT_TOPK_GPU_INVALID,
          "segment %lld (begin %lld, %lld elements): must begin at %lld or after, and have 0 to 2^31 - 1 elements",
          number, begin, elements, static_cast<long long>(end));
    }
    if (k < 0 || k > elements) {
      return Fail(HVD_EXT_TOPK_GPU_INVALID, "k (%lld) of segment %lld: must be 0 to its %lld elements", k, number,
                  elements);
    }
    end = segment.begin + segment.elements;
  }
  return 0;
}

// Calls body(Bits(), key of infinity) for a dtype, and returns its result.
template <typename Body>
int64_t WithBits(int32_t dtype, const Body& body) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      return body(uint32_t(), 0x7f800000u);
    case DType::kFloat64:
      return body(uint64_t(), uint64_t{0x7ff} << 52);
    case DType::kFloat16:
      return body(uint16_t(), 0x7c00u);
    case DType::kBFloat16:
      return body(uint16_t(), 0x7f80u);
    default:
      return Fail(HVD_EXT_TOPK_GPU_INVALID, "dtype (%d): must be 0 float32, 1 float64, 2 float16 or 3 bfloat16", dtype);
  }
}

template <typename Bits>
Layout LayoutOf(const HvdExtTopKSegment* segments, int64_t n, void* workspace) {
  Layout layout;
  for (int64_t s = 0; s < n; ++s) layout.Add<Bits>(segments[s]);
  layout.Place<Bits>(workspace);
  return layout;
}

struct Call {
  const void* x;
  const HvdExtTopKSegment* segments;
  int64_t n;
  void *indices, *values;
  int32_t wide;
  int32_t* non_finite;
  char* workspace;
  int64_t workspace_nbytes;
  cudaStream_t stream;
};

// Sends the table of segments to the device as kernel arguments: a copy from host memory would wait, or need pinned
// memory.
template <typename Bits>
int SetUp(const Call& call, const Memory& memory, int64_t* scan_tiles) {
  Layout before;
  int64_t out = 0;
  *scan_tiles = 0;
  for (int64_t first = 0; first < call.n; first += kGroup) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, call.n - first));
    Group group = {};
    int64_t all = *scan_tiles;
    for (int i = 0; i < count; ++i) {
      const HvdExtTopKSegment& from = call.segments[first + i];
      Segment& to = group.segments[i];
      const uintptr_t address = reinterpret_cast<uintptr_t>(static_cast<const Bits*>(call.x) + from.begin);
      to.begin = from.begin;
      to.out = out;
      to.candidates = before.candidates;
      to.tile = before.tiles;
      to.scanned = all;
      to.elements = static_cast<uint32_t>(from.elements);
      to.k = static_cast<uint32_t>(from.k);
      to.capacity = static_cast<uint32_t>(Capacity(from));
      to.head = static_cast<uint32_t>(address % kAlignment / sizeof(Bits));
      to.histogram = Layout::MostTiles<Bits>(from) > 1 ? static_cast<int32_t>(before.histograms) : -1;
      to.direct = Direct(from);
      before.Add<Bits>(from);
      out += from.k;
      if (!to.direct) all += TilesOf<Bits>(static_cast<uint64_t>(to.head) + to.elements);
    }
    *scan_tiles = all;
    HVD_EXT_LAUNCH(Setup, 1, 64, call.stream, memory, group, first, count, all, call.non_finite);
  }
  return 0;
}

template <typename Bits>
int Run(const Call& call, KeyOf<Bits> infinity) {
  static_assert(sizeof(Group) + sizeof(Memory) + 64 <= 4096, "the limit of a kernel's arguments");
  const Layout layout = LayoutOf<Bits>(call.segments, call.n, call.workspace);
  if (call.workspace_nbytes < layout.nbytes || reinterpret_cast<uintptr_t>(call.workspace) % 256 != 0) {
    return Fail(HVD_EXT_TOPK_GPU_INVALID, "workspace (%lld bytes at %p): must have %lld bytes at a multiple of 256",
                static_cast<long long>(call.workspace_nbytes), static_cast<void*>(call.workspace),
                static_cast<long long>(layout.nbytes));
  }
  const int64_t end = call.n == 0 ? 0 : call.segments[call.n - 1].begin + call.segments[call.n - 1].elements;
  if (!call.wide && end > int64_t{1} << 31) {
    return Fail(HVD_EXT_TOPK_GPU_INVALID, "indices (int32): hold 2^31 - 1 at most, got %lld elements; ask for int64",
                static_cast<long long>(end));
  }
  if (reinterpret_cast<uintptr_t>(call.x) % sizeof(Bits) != 0) {
    return Fail(HVD_EXT_TOPK_GPU_INVALID, "x (%p): must begin at a multiple of an element's %zu bytes", call.x,
                sizeof(Bits));
  }
  const Memory& memory = layout.memory;
  int device = 0, processors = 0;
  HVD_EXT_CUDA(cudaGetDevice(&device));
  HVD_EXT_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t most = static_cast<int64_t>(processors) * kBlocksPerProcessor;
  const int64_t most_of_scan = static_cast<int64_t>(processors) * kScanBlocks;
  HVD_EXT_CUDA(cudaMemsetAsync(call.workspace, 0, layout.cleared, call.stream));
  if (layout.tiles == 0) {
    if (call.non_finite == nullptr) return 0;
    HVD_EXT_CUDA(cudaMemsetAsync(call.non_finite, 0, sizeof(int32_t), call.stream));
    return 0;
  }
  int64_t scan_tiles = 0;
  if (const int code = SetUp<Bits>(call, memory, &scan_tiles); code != 0) return code;
  int ticket = 0;
  if (scan_tiles > 0) {
    HVD_EXT_LAUNCH(Sample<Bits>, call.n, kSampleThreads, call.stream, memory, call.x);
    HVD_EXT_LAUNCH(Scan<Bits>, std::min(scan_tiles, most_of_scan), kThreads, call.stream, memory, call.x, ticket++);
  }
  HVD_EXT_LAUNCH(Plan<Bits>, 1, kLanes, call.stream, memory);
  constexpr int kLevels = (kKeyBits<Bits> + kBinBits - 1) / kBinBits;
  static_assert(kLevels + 2 <= kTickets);
  for (int level = 0; level < kLevels; ++level) {
    HVD_EXT_LAUNCH(Count<Bits>, std::min(layout.tiles, most), kThreads, call.stream, memory, call.x, ticket++);
  }
  HVD_EXT_LAUNCH(Emit<Bits>, std::min(layout.tiles, most), kThreads, call.stream, memory, call.x, ticket++, infinity,
                 call.indices, static_cast<int>(call.wide), call.values, call.non_finite);
  return 0;
}

}  // namespace
}  // namespace hvd_ext::gpu

int64_t hvd_ext_topk_gpu_workspace(int32_t dtype, const HvdExtTopKSegment* segments, int64_t n_segments) {
  using namespace hvd_ext::gpu;
  if (const int code = Check(segments, n_segments); code != 0) return code;
  return WithBits(dtype, [&](auto bits, auto) -> int64_t {
    return LayoutOf<decltype(bits)>(segments, n_segments, nullptr).nbytes;
  });
}

int hvd_ext_topk_gpu(int32_t dtype, const void* x, const HvdExtTopKSegment* segments, int64_t n_segments, void* indices,
                     int32_t wide, void* values, int32_t* non_finite, void* workspace, int64_t workspace_nbytes,
                     void* stream) {
  using namespace hvd_ext::gpu;
  if (const int code = Check(segments, n_segments); code != 0) return code;
  const Call call = {x,
                     segments,
                     n_segments,
                     indices,
                     values,
                     wide,
                     non_finite,
                     static_cast<char*>(workspace),
                     workspace_nbytes,
                     static_cast<cudaStream_t>(stream)};
  return static_cast<int>(
      WithBits(dtype, [&](auto bits, auto infinity) -> int64_t { return Run<decltype(bits)>(call, infinity); }));
}

const char* hvd_ext_topk_gpu_error(void) { return hvd_ext::gpu::error; }

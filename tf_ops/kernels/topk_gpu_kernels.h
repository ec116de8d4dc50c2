// The kernels of topk_gpu.cu.cc, which says how they work together.
#pragma once

#include "kernels/topk_gpu_device.h"

namespace hvd_ext::gpu {
namespace {

constexpr int64_t kUnsampled = 32768;  // elements; a segment of at most this length has no candidates
constexpr int kSampleThreads = 1024;   // each reads one line
constexpr int kLineVectors = 4;
constexpr int kBlocksPerProcessor = 3;  // a tile fits in registers without spilling, and enough bytes are in flight
constexpr int kScanBlocks = 2;          // the same for two tiles

__global__ void Setup(Memory memory, Group group, int64_t first, int count, int64_t scan_tiles, int32_t* non_finite) {
  const int i = threadIdx.x;
  if (i < count) {
    memory.segments[first + i] = group.segments[i];
    memory.scan_starts[first + i] = group.segments[i].scanned;
  }
  if (i == 0 && first == 0) {
    memory.scan_starts[memory.n] = scan_tiles;
    if (non_finite != nullptr) *non_finite = 0;
  }
}

// ---- Sample: one block for each segment

struct Sums {
  uint32_t sums[3];
};

// Returns which line of those that lie inside the segment this thread reads: a random one of its share, which is one of
// 1024 equal shares. The answer is right whatever the sample is, so a fixed seed will do. Tests rely on that seed to
// mislead the sample.
__host__ __device__ inline uint32_t SampledLine(uint32_t thread, uint32_t lines, uint32_t segment) {
  const uint32_t low = static_cast<uint64_t>(lines) * thread / kSampleThreads;
  const uint32_t high = static_cast<uint64_t>(lines) * (thread + 1) / kSampleThreads;
  if (high <= low) return low < lines ? low : lines - 1;
  uint32_t random = (thread + segment * kSampleThreads + 1) * 0x9e3779b9u;
  random = (random ^ random >> 16) * 0x85ebca6bu;
  random ^= random >> 13;
  return low + random % (high - low);
}

// Returns about the rank-th greatest key of the block's lines: at least `rank` keys are not below it, and only a few
// more if that is possible. Returns 0 if there are fewer than `rank` keys.
template <typename Bits>
__device__ KeyOf<Bits> Search(const Vector<Bits>* line, uint32_t rank, uint32_t* sums, int* round) {
  KeyOf<Bits> found = 0;
  for (int bit = kKeyBits<Bits> - 1; bit >= 0; --bit) {
    const KeyOf<Bits> trial = found | static_cast<KeyOf<Bits>>(1) << bit;
    uint32_t mine = 0;
#pragma unroll
    for (int v = 0; v < kLineVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kInVector<Bits>; ++e) mine += line[v].Key(e) >= trial;
    }
    const uint32_t all = BlockSum(mine, sums, (*round)++);
    if (all < rank) continue;
    found = trial;
    if (all <= rank + rank / 8 + 2) break;
  }
  return found;
}

template <typename Bits>
__global__ void __launch_bounds__(kSampleThreads) Sample(Memory memory, const void* x) {
  HVD_EXT_SHARED(Sums, shared);
  uint32_t* sums = shared.sums;
  const Segment& segment = memory.segments[blockIdx.x];
  if (segment.direct) return;
  if (threadIdx.x < 3) sums[threadIdx.x] = 0;
  const Source<Bits> source = OfX<Bits>(x, segment);
  constexpr uint32_t kLine = kLineVectors * kInVector<Bits>;
  const uint32_t begin = (source.head + kLine - 1) / kLine, lines = source.end / kLine - begin;
  const uint32_t at = begin + SampledLine(threadIdx.x, lines, blockIdx.x);
  Vector<Bits> line[kLineVectors];
#pragma unroll
  for (int v = 0; v < kLineVectors; ++v) line[v].Load(source, at * kLine + v * kInVector<Bits>);
  __syncthreads();

  int round = 0;
  const double share = static_cast<double>(segment.k) / segment.elements;
  const uint32_t rank = static_cast<uint32_t>(kSampleThreads * kLine * share) + 1;
  const KeyOf<Bits> middle = Search<Bits>(line, rank, sums, &round);
  // The margin is four standard errors of the number of hits. The elements of a line may be alike, so only lines count
  // as independent.
  uint32_t hits = 0;
#pragma unroll
  for (int v = 0; v < kLineVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kInVector<Bits>; ++e) hits += line[v].Key(e) >= middle;
  }
  const uint32_t squares = BlockSum(hits * hits, sums, round++);
  const uint32_t margin = static_cast<uint32_t>(4 * sqrtf(static_cast<float>(squares))) + 4;
  const KeyOf<Bits> bound = Search<Bits>(line, rank + margin, sums, &round);
  if (threadIdx.x == 0) memory.states[blockIdx.x].bound = bound;
}

// ---- Scan and Emit: the keys above a bound, and the first keys that equal it

struct Places {
  Counts warps[kWarps];
  Looked looked;
};
struct Compaction {
  Work work;
  Places places;
};

// How many keys of a tile are above a bound, and how many equal it.
struct Found {
  Counts warp;     // of this warp
  Counts earlier;  // of the warps before it
  Counts tile;
};

// Counts the keys of a tile, and publishes the counts.
template <typename Bits>
__device__ Found Find(const Tile<Bits>& tile, uint32_t number, KeyOf<Bits> bound, uint64_t* descriptors,
                      Places* shared) {
  Counts counts = {0, 0};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kInVector<Bits>; ++e) {
      const KeyOf<Bits> key = tile.vectors[v].Key(e);
      counts.above += key > bound && tile.Has(v, e);
      counts.equal += key == bound && tile.Has(v, e);
    }
  }
  const uint32_t both = WarpSum(counts.above | counts.equal << 16);  // each is at most 2048
  Found found = {{both & 0xffff, both >> 16}, {0, 0}, {0, 0}};
  if (Lane() == 0) shared->warps[Warp()] = found.warp;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    const Counts one = shared->warps[w];
    found.tile.above += one.above;
    found.tile.equal += one.equal;
    if (w < Warp()) found.earlier = found.tile;
  }
  if (threadIdx.x == 0) Publish(descriptors, number, found.tile);
  return found;
}

// Calls put(place, v, e) for each key > bound of the tile, and for its keys == bound that are among the first `limit`
// of the source; `place` counts them in the order of their indices. Returns the counts of the source up to and
// including this tile. A barrier must come between Find and what Find does for the next tile.
template <typename Bits, typename Put>
__device__ Counts Compact(const Tile<Bits>& tile, uint32_t number, KeyOf<Bits> bound, uint32_t limit,
                          const Found& found, uint64_t* descriptors, Places* shared, const Put& put) {
  Counts before = LookBack(descriptors, number, found.tile, &shared->looked);
  const Counts all = {before.above + found.tile.above, before.equal + found.tile.equal};
  before.above += found.earlier.above;
  before.equal += found.earlier.equal;
  if (found.warp.above == 0 && (found.warp.equal == 0 || before.equal >= limit)) return all;

  const unsigned lower = (1u << Lane()) - 1;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    bool any = false;
#pragma unroll
    for (int e = 0; e < kInVector<Bits>; ++e) any = any || (tile.vectors[v].Key(e) >= bound && tile.Has(v, e));
    if (!__any_sync(kAllLanes, any)) continue;
    Counts mine = before;
    unsigned mask[kInVector<Bits>];  // this lane's keys: bit 0 above, bit 1 equal
#pragma unroll
    for (int e = 0; e < kInVector<Bits>; ++e) {
      const KeyOf<Bits> key = tile.vectors[v].Key(e);
      const bool has = tile.Has(v, e);
      mask[e] = (key > bound && has) | (key == bound && has) << 1;
      const unsigned above = __ballot_sync(kAllLanes, mask[e] & 1);
      const unsigned equal = __ballot_sync(kAllLanes, mask[e] & 2);
      mine.above += __popc(above & lower);
      mine.equal += __popc(equal & lower);
      before.above += __popc(above);
      before.equal += __popc(equal);
    }
#pragma unroll
    for (int e = 0; e < kInVector<Bits>; ++e) {
      if (mask[e] == 1 || (mask[e] == 2 && mine.equal < limit)) {
        put(mine.above + (mine.equal < limit ? mine.equal : limit), v, e);
      }
      mine.above += mask[e] & 1;
      mine.equal += mask[e] >> 1;
    }
  }
  return all;
}

// The loads of the next tile are on their way while the counts of this one wait for those of the tiles before.
template <typename Bits>
__global__ void __launch_bounds__(kThreads, kScanBlocks) Scan(Memory memory, const void* x, int ticket) {
  HVD_EXT_SHARED(Compaction, shared);
  Tiles tiles(&memory.tickets[ticket], memory.scan_starts, memory.n);
  Tile<Bits> next;
  bool any = tiles.Next(&shared.work);
  if (any) next.Load(OfX<Bits>(x, memory.segments[shared.work.segment]), shared.work.tile);
  while (any) {
    const Work work = shared.work;
    const Tile<Bits> tile = next;
    const Segment& segment = memory.segments[work.segment];
    const KeyOf<Bits> bound = static_cast<KeyOf<Bits>>(memory.states[work.segment].bound);
    uint64_t* descriptors = memory.scanned + segment.tile;
    const Found found = Find<Bits>(tile, work.tile, bound, descriptors, &shared.places);
    any = tiles.Next(&shared.work);
    if (any) next.Load(OfX<Bits>(x, memory.segments[shared.work.segment]), shared.work.tile);
    Bits* values = static_cast<Bits*>(memory.values) + segment.candidates;
    uint32_t* positions = memory.positions + segment.candidates;
    const uint32_t capacity = segment.capacity, head = segment.head;
    const auto put = [&](uint32_t place, int v, int e) {
      if (place >= capacity) return;  // Plan sees that there are too many
      values[place] = tile.vectors[v].bits[e];
      positions[place] = tile.Place(v, e) - head;
    };
    const Counts all = Compact<Bits>(tile, work.tile, bound, segment.k, found, descriptors, &shared.places, put);
    if (work.tile + 1 == work.tiles && threadIdx.x == 0) memory.states[work.segment].scanned = all;
  }
}

// ---- Plan: one warp for all segments

// Returns the least shift with which kBins bins of 2^shift keys reach from `base` to the greatest key.
template <typename Bits>
__device__ uint32_t Shift(KeyOf<Bits> base) {
  uint32_t shift = 0;
  while ((kGreatestKey<Bits> - base) >> shift >= kBins) ++shift;
  return shift;
}

template <typename Bits>
__global__ void Plan(Memory memory) {
  int64_t tiles = 0;
  for (int64_t first = 0; first < memory.n; first += kLanes) {
    const int64_t s = first + Lane();
    uint32_t mine = 0;
    if (s < memory.n) {
      const Segment& segment = memory.segments[s];
      State& state = memory.states[s];
      const Counts seen = state.scanned;
      const uint32_t candidates = seen.above + (seen.equal < segment.k ? seen.equal : segment.k);
      const bool from_x = segment.direct || candidates < segment.k || candidates > segment.capacity;
      state.from_x = from_x;
      state.elements = from_x ? segment.elements : candidates;
      state.tiles = mine = TilesOf<Bits>(from_x ? static_cast<uint64_t>(segment.head) + segment.elements : candidates);
      if (segment.elements == 0) state.tiles = mine = 0;
      state.need = segment.k;
      state.resolved = segment.k == 0;
      const KeyOf<Bits> base = from_x ? 0 : static_cast<KeyOf<Bits>>(state.bound);
      state.base = segment.k == 0 ? kGreatestKey<Bits> : base;
      state.shift = Shift<Bits>(base);
      state.bins = kBins;
    }
    const uint32_t up_to = WarpSumUpTo(mine);
    if (s < memory.n) memory.starts[s] = tiles + up_to - mine;
    tiles += __shfl_sync(kAllLanes, up_to, kLanes - 1);
  }
  if (Lane() == 0) memory.starts[memory.n] = tiles;
}

// ---- Count: one level of the search for T

struct Histogram {
  Work work;
  uint32_t bins[kBins];
  uint32_t warps[kWarps];
  bool last;
};

template <typename Bits>
__device__ void CountTile(const Tile<Bits>& tile, KeyOf<Bits> base, uint32_t shift, uint32_t n_bins, uint32_t* bins) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kInVector<Bits>; ++e) {
      const KeyOf<Bits> key = tile.vectors[v].Key(e), offset = (key - base) >> shift;
      const bool in = key >= base && offset < n_bins && tile.Has(v, e);
      const unsigned lanes = __ballot_sync(kAllLanes, in);
      if (lanes == 0) continue;
      const uint32_t bin = static_cast<uint32_t>(offset);
      const int leader = __ffs(lanes) - 1;
      const uint32_t first = __shfl_sync(kAllLanes, bin, leader);
      if (__all_sync(kAllLanes, !in || bin == first)) {
        if (Lane() == leader) atomicAdd(&bins[bin], static_cast<uint32_t>(__popc(lanes)));
      } else if (in) {
        atomicAdd(&bins[bin], 1u);
      }
    }
  }
}

// Adds the block's histogram to the segment's. Returns true in the last block to do so, which then has the sum in its
// bins and has cleared the segment's histogram for the next level.
__device__ bool Gather(const Memory& memory, const Segment& segment, Histogram* shared) {
  uint32_t* all = memory.histograms + static_cast<int64_t>(segment.histogram) * kBins;
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    if (shared->bins[b] != 0) atomicAdd(&all[b], shared->bins[b]);
  }
  __threadfence();  // the additions must be visible before the count
  __syncthreads();
  if (threadIdx.x == 0) {
    shared->last = atomicAdd(&memory.done[shared->work.segment], 1u) + 1 == shared->work.tiles;
  }
  __syncthreads();
  if (!shared->last) return false;
  __threadfence();
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    shared->bins[b] = LoadNow(&all[b]);
    all[b] = 0;
  }
  if (threadIdx.x == 0) memory.done[shared->work.segment] = 0;
  __syncthreads();
  return true;
}

// Narrows the state's range to the bin with its need-th greatest key. Thread 0 has the greatest bins.
template <typename Bits>
__device__ void Narrow(State* state, Histogram* shared) {
  const uint32_t need = state->need, shift = state->shift;
  int bin = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
  uint32_t mine = 0;
#pragma unroll
  for (int b = 0; b < kBinsPerThread; ++b) mine += shared->bins[bin - b];
  uint32_t up_to = WarpSumUpTo(mine);
  if (Lane() == kLanes - 1) shared->warps[Warp()] = up_to;
  __syncthreads();
  for (int w = 0; w < Warp(); ++w) up_to += shared->warps[w];
  uint32_t above = up_to - mine;
  if (need <= above || need > up_to) return;
  for (; need - above > shared->bins[bin]; --bin) above += shared->bins[bin];
  state->base += static_cast<uint64_t>(bin) << shift;
  state->need = need - above;
  state->shift = shift > kBinBits ? shift - kBinBits : 0;
  state->bins = 1u << (shift - state->shift);
  state->resolved = shift == 0;
}

template <typename Bits>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) Count(Memory memory, const void* x, int ticket) {
  HVD_EXT_SHARED(Histogram, shared);
  Tiles tiles(&memory.tickets[ticket], memory.starts, memory.n);
  while (tiles.Next(&shared.work)) {
    const Work work = shared.work;
    const Segment& segment = memory.segments[work.segment];
    State& state = memory.states[work.segment];  // Narrow writes it when all tiles are counted
    if (state.resolved) continue;
    Tile<Bits> tile;
    tile.Load(OfState<Bits>(memory, x, segment, state), work.tile);
    const bool alone = work.tiles == 1;
    do {  // a block that has the whole segment needs no further launches
      for (int b = threadIdx.x; b < kBins; b += kThreads) shared.bins[b] = 0;
      __syncthreads();
      CountTile<Bits>(tile, static_cast<KeyOf<Bits>>(state.base), state.shift, state.bins, shared.bins);
      __syncthreads();
      if (alone || Gather(memory, segment, &shared)) Narrow<Bits>(&state, &shared);
      __syncthreads();
    } while (alone && !state.resolved);
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    Emit(Memory memory, const void* x, int ticket, KeyOf<Bits> infinity, void* indices, int wide, void* values,
         int32_t* non_finite) {
  HVD_EXT_SHARED(Compaction, shared);
  Tiles tiles(&memory.tickets[ticket], memory.starts, memory.n);
  while (tiles.Next(&shared.work)) {
    const Work work = shared.work;
    const Segment& segment = memory.segments[work.segment];
    const State& state = memory.states[work.segment];
    Tile<Bits> tile;
    tile.Load(OfState<Bits>(memory, x, segment, state), work.tile);
    if (non_finite != nullptr) {
      bool any = false;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kInVector<Bits>; ++e) any = any || (tile.vectors[v].Key(e) >= infinity && tile.Has(v, e));
      }
      if (any) *non_finite = 1;  // all writers write the same value
    }
    if (segment.k == 0) continue;
    // Keys that are not finite are the greatest: if the segment has any, they are among the candidates, and one is
    // picked.
    const uint32_t* positions = state.from_x ? nullptr : memory.positions + segment.candidates;
    const int64_t begin = segment.begin, out = segment.out;
    const uint32_t head = segment.head;
    const auto put = [&](uint32_t place, int v, int e) {
      const uint32_t at = tile.Place(v, e);
      const int64_t index = begin + (positions == nullptr ? at - head : positions[at]);
      if (wide) {
        static_cast<int64_t*>(indices)[out + place] = index;
      } else {
        static_cast<int32_t*>(indices)[out + place] = static_cast<int32_t>(index);
      }
      if (values != nullptr) static_cast<Bits*>(values)[out + place] = tile.vectors[v].bits[e];
    };
    const KeyOf<Bits> bound = static_cast<KeyOf<Bits>>(state.base);
    uint64_t* descriptors = memory.emitted + segment.tile;
    const Found found = Find<Bits>(tile, work.tile, bound, descriptors, &shared.places);
    Compact<Bits>(tile, work.tile, bound, state.need, found, descriptors, &shared.places, put);
  }
}

}  // namespace
}  // namespace hvd_ext::gpu

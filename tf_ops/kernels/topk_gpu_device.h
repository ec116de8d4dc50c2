// The building blocks of the kernels of topk_gpu.cu.cc: keys, tiles, sums over warps and blocks, the look-back. nvcc
// compiles this file, and so does g++ for the emulation in tests/native/gpu.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/gpu.h"

namespace hvd_ext::gpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kVectors = 8;      // of 16 bytes for each thread: with 2 blocks on a processor enough loads are in flight
constexpr int kAlignment = 128;  // tiles start at multiples of this, so that each warp reads whole lines
constexpr int kBins = 2048;      // of a histogram, for 11 bits of a key
constexpr int kBinBits = 11;
constexpr int kBinsPerThread = kBins / kThreads;

__device__ inline int Warp() { return threadIdx.x / kLanes; }

template <typename Bits>
struct Format {
  using Key = uint32_t;
};
template <>
struct Format<uint64_t> {
  using Key = uint64_t;
};
template <typename Bits>
using KeyOf = typename Format<Bits>::Key;

template <typename Bits>
constexpr int kKeyBits = 8 * sizeof(Bits) - 1;
template <typename Bits>
constexpr KeyOf<Bits> kGreatestKey = static_cast<KeyOf<Bits>>((static_cast<uint64_t>(1) << kKeyBits<Bits>)-1);
template <typename Bits>
constexpr int kInVector = 16 / sizeof(Bits);
template <typename Bits>
constexpr uint32_t kInSlab = kLanes * kInVector<Bits>;  // elements that a warp reads at once
template <typename Bits>
constexpr uint32_t kInTile = kWarps * kVectors * kInSlab<Bits>;

template <typename Bits>
__host__ __device__ constexpr uint32_t TilesOf(uint64_t elements) {
  return static_cast<uint32_t>((elements + kInTile<Bits> - 1) / kInTile<Bits>);
}

// An array that may begin at any element: its elements are origin[head .. end), and origin is at a multiple of
// kAlignment.
template <typename Bits>
struct Source {
  const Bits* origin;
  uint32_t head;
  uint32_t end;
};

template <typename Bits>
struct alignas(16) Vector {
  Bits bits[kInVector<Bits>];

  // Elements outside of the source are not touched: they may lie outside of the allocation.
  __device__ inline void Load(const Source<Bits>& source, uint32_t at) {
    if (at >= source.head && at + kInVector<Bits> <= source.end) {
      // x is read once, so it need not stay in the cache, which is better used for the candidates.
      const uint4 words = __ldcs(reinterpret_cast<const uint4*>(source.origin + at));
      memcpy(bits, &words, sizeof words);
      return;
    }
#pragma unroll
    for (int e = 0; e < kInVector<Bits>; ++e) {
      bits[e] = at + e >= source.head && at + e < source.end ? source.origin[at + e] : Bits(0);
    }
  }
  __device__ inline KeyOf<Bits> Key(int e) const { return bits[e] & kGreatestKey<Bits>; }
};

// The part of a source that a block holds in registers. Its elements are ordered by warp, vector, lane, and element of
// a vector.
template <typename Bits>
struct Tile {
  Vector<Bits> vectors[kVectors];
  uint32_t first;  // place of this lane's first element
  uint32_t head, end;
  bool whole;  // no element is outside of the source; the same in all threads

  __device__ inline void Load(const Source<Bits>& source, uint32_t tile) {
    head = source.head;
    end = source.end;
    const uint32_t begin = tile * kInTile<Bits>;
    whole = begin >= head && end >= kInTile<Bits> && begin <= end - kInTile<Bits>;
    first = begin + Warp() * (kVectors * kInSlab<Bits>)+Lane() * kInVector<Bits>;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v].Load(source, Place(v, 0));
  }
  __device__ inline uint32_t Place(int v, int e) const { return first + v * kInSlab<Bits> + e; }
  __device__ inline bool Has(int v, int e) const { return whole || (Place(v, e) >= head && Place(v, e) < end); }
};

__device__ inline uint32_t WarpSum(uint32_t value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Returns the sum over the lanes up to and including this one.
__device__ inline uint32_t WarpSumUpTo(uint32_t value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (Lane() >= step) value += other;
  }
  return value;
}

// Returns the sum over a block, with one barrier. `sums` are three shared numbers, 0 before round 0, which the rounds
// use in turn. Each round clears the number of the round before, which all threads have read by then; that number is
// used again two barriers later.
__device__ inline uint32_t BlockSum(uint32_t value, uint32_t* sums, int round) {
  value = WarpSum(value);
  if (Lane() == 0) atomicAdd(&sums[round % 3], value);
  __syncthreads();
  if (threadIdx.x == 0) sums[(round + 2) % 3] = 0;
  return sums[round % 3];
}

struct Counts {
  uint32_t above, equal;
};

// A descriptor holds the state and the counts of one tile in one 64-bit word, so that they are always seen together and
// no fence is needed: the state has 2 bits, `above` and `equal` have 31 bits each (a segment has fewer than 2^31
// elements).
constexpr uint64_t kUnknown = 0;   // a new descriptor
constexpr uint64_t kOfTile = 1;    // has the counts of the tile alone
constexpr uint64_t kUpToTile = 2;  // has the counts of the segment's tiles up to and including this one
__device__ inline uint64_t Descriptor(uint64_t state, Counts counts) {
  return state << 62 | static_cast<uint64_t>(counts.above) << 31 | counts.equal;
}
__device__ inline uint64_t StateOf(uint64_t descriptor) { return descriptor >> 62; }

// What the look-back of a block has in shared memory.
struct Looked {
  Counts warps[kWarps];
  bool ended[kWarps];
};

// Publishes the counts of a tile. One thread calls it.
__device__ inline void Publish(uint64_t* descriptors, uint32_t tile, Counts counts) {
  StoreNow(&descriptors[tile], Descriptor(tile == 0 ? kUpToTile : kOfTile, counts));
}

// Returns the sums of the counts of the earlier tiles of a segment (decoupled look-back, Merrill and Garland 2016), and
// publishes those up to this tile. All threads of the block call it after Publish; each looks at another tile, since
// the tiles of hundreds of blocks are under way, and one step of a warp after the other would take longer than reading
// the tile. Blocks take tiles in order, so every earlier tile belongs to a block that is running, and the wait ends.
__device__ inline Counts LookBack(uint64_t* descriptors, uint32_t tile, Counts counts, Looked* shared) {
  Counts before = {0, 0};
  if (tile == 0) return before;
  for (int64_t look = static_cast<int64_t>(tile) - 1 - static_cast<int64_t>(threadIdx.x);; look -= kThreads) {
    uint64_t seen = look >= 0 ? LoadNow(&descriptors[look]) : Descriptor(kUpToTile, {0, 0});
    while (StateOf(seen) == kUnknown) {
      Pause();
      seen = LoadNow(&descriptors[look]);
    }
    // Threads look at tiles from the nearest to the farthest. The first kUpToTile includes all tiles beyond it.
    const unsigned sums = __ballot_sync(kAllLanes, StateOf(seen) == kUpToTile);
    const bool counted = sums == 0 || Lane() < __ffs(sums);
    const Counts mine = {WarpSum(counted ? static_cast<uint32_t>(seen >> 31) & 0x7fffffffu : 0),
                         WarpSum(counted ? static_cast<uint32_t>(seen) & 0x7fffffffu : 0)};
    if (Lane() == 0) {
      shared->warps[Warp()] = mine;
      shared->ended[Warp()] = sums != 0;
    }
    __syncthreads();
    bool ended = false;
    for (int w = 0; w < kWarps && !ended; ++w) {
      before.above += shared->warps[w].above;
      before.equal += shared->warps[w].equal;
      ended = shared->ended[w];
    }
    if (ended && threadIdx.x == 0) {
      StoreNow(&descriptors[tile], Descriptor(kUpToTile, {before.above + counts.above, before.equal + counts.equal}));
    }
    __syncthreads();  // before `shared` is written again
    if (ended) return before;
  }
}

// What the host knows about a segment. A Group is an argument of Setup, and a kernel's arguments are limited to 4 KiB.
struct Segment {
  int64_t begin, out;  // its first element in x; its first pick in the answer
  int64_t candidates;  // its first place in the memory for candidates
  int64_t tile;        // its first descriptor
  int64_t scanned;     // tiles of earlier segments that Scan reads
  uint32_t elements, k, capacity, head;
  int32_t histogram;  // the index of its histogram; -1 if one tile holds all
  int32_t direct;     // has no candidates: Count and Emit read x
};
constexpr int kGroup = 56;
struct Group {
  Segment segments[kGroup];
};

// What the kernels find out about a segment.
struct State {
  uint64_t bound;  // set by Sample
  Counts scanned;  // set by Scan
  uint64_t base;   // set by Plan and Count: T is in [base, base + bins * 2^shift), and equals base in the end
  uint32_t shift, bins;
  uint32_t need;  // this many picks have a key in that range; the others are above it
  uint32_t elements, tiles, from_x, resolved;
};

// The workspace. Every call begins by setting the members from tickets to emitted to 0.
struct Memory {
  Segment* segments;
  State* states;
  int64_t *scan_starts, *starts;  // each segment's first tile, then the number of tiles: for Scan; for Count and Emit
  unsigned long long* tickets;    // one for each launch whose blocks take tiles
  uint32_t* done;                 // tiles of a segment whose histogram has been added
  uint32_t* histograms;
  uint64_t *scanned, *emitted;  // descriptors
  void* values;
  uint32_t* positions;  // of the candidates in their segments
  int64_t n;
};

template <typename Bits>
__device__ Source<Bits> OfX(const void* x, const Segment& segment) {
  return {static_cast<const Bits*>(x) + segment.begin - segment.head, segment.head, segment.head + segment.elements};
}

template <typename Bits>
__device__ Source<Bits> OfState(const Memory& memory, const void* x, const Segment& segment, const State& state) {
  if (state.from_x) return OfX<Bits>(x, segment);
  return {static_cast<const Bits*>(memory.values) + segment.candidates, 0, state.elements};
}

struct Work {
  int64_t segment;
  uint32_t tile, tiles;
};

// Hands a block one tile after the other. It takes each ticket a tile ahead, because an atomic takes as long as a read
// of x. That cannot deadlock: a block takes its tiles in order, so the block that has the first unfinished tile is
// working on it.
class Tiles {
 public:
  __device__ inline Tiles(unsigned long long* ticket, const int64_t* starts, int64_t n)
      : ticket_(ticket), starts_(starts), n_(n) {
    if (threadIdx.x == 0) taken_ = atomicAdd(ticket_, 1ull);
  }
  // Returns false if no tile is left. Its first barrier waits until the block has finished with the shared memory.
  __device__ inline bool Next(Work* shared) {
    __syncthreads();
    if (Warp() == 0) {
      const int64_t mine = static_cast<int64_t>(__shfl_sync(kAllLanes, taken_, 0));
      const bool any = mine < starts_[n_];
      if (threadIdx.x == 0 && any) taken_ = atomicAdd(ticket_, 1ull);
      const int64_t segment = any ? Locate(starts_, n_, mine) : -1;
      if (Lane() == 0) {
        shared->segment = segment;
        if (any) shared->tile = static_cast<uint32_t>(mine - starts_[segment]);
        if (any) shared->tiles = static_cast<uint32_t>(starts_[segment + 1] - starts_[segment]);
      }
    }
    __syncthreads();
    return shared->segment >= 0;
  }

 private:
  unsigned long long* ticket_;
  const int64_t* starts_;
  int64_t n_;
  unsigned long long taken_ = 0;  // in thread 0 only
};

}  // namespace hvd_ext::gpu

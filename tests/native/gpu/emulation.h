// Runs CUDA kernels on the host, compiled by an ordinary compiler from the same file. Each thread of a block is a fibre
// with its own stack. Fibres run in random order, now and then one far behind the others, from one meeting point
// (barrier, warp operation, atomic, word that other blocks write) to the next. The blocks of a launch run interleaved,
// shared memory starts as garbage, and what a kernel streams (__ldcs) may be read only from
// registered memory. So the emulation finds reads of
// data that is not there yet, barriers that are missing or that not all threads reach, and waits without an end. It
// does not find memory that becomes visible in another order than it was written (there is only one memory here), races
// between two meeting points, divergence of the lanes of a warp, or slowness.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "gpu/cuda_stand_in.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define HVD_EXT_SHARED(Type, name) Type& name = ::hvd_ext::gpu::emulated::Shared<Type>()

struct uint4 {
  uint32_t x, y, z, w;
};
struct Coordinate {
  unsigned x;
};
inline Coordinate threadIdx, blockIdx, gridDim;  // of the running fibre

namespace hvd_ext::gpu::emulated {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 128 * 1024, kSharedBytes = 48 * 1024;

// Fibres that wait for each other.
struct Meeting {
  int expected = 0;
  std::vector<int> waiting;
};

struct WarpState {
  Meeting meeting;
  uint64_t words[2][kWarpSize];  // of this operation and of the next: a lane may be one ahead
};

struct BlockState {
  Meeting meeting;
  std::vector<WarpState> warps;
  alignas(128) char shared[kSharedBytes];
  unsigned number = 0;
  int left = 0;  // fibres that have not ended
};

struct Fibre {
  std::unique_ptr<char[]> stack;
  jmp_buf at;
  bool started = false;
  int64_t wakes = 0;  // it does not run before the machine has picked a fibre this often
  BlockState* block = nullptr;
  unsigned thread = 0;
  unsigned operations = 0;  // of its warp so far
};

struct Machine {
  std::mt19937 random{1};
  int resident = 3;                                           // blocks that run at a time
  std::vector<std::pair<const void*, const void*>> readable;  // memory that may be streamed; all memory if empty
  int64_t picks = 0;
  int64_t strayed = 0;        // reads of other memory
  std::vector<Fibre> fibres;  // kept from launch to launch, for their stacks
  std::vector<std::unique_ptr<BlockState>> blocks;
  std::vector<int> ready;
  const std::function<void()>* body = nullptr;
  int current = -1;
  jmp_buf home;
  ucontext_t starter, entry;

  BlockState& block() { return *fibres[current].block; }
  WarpState& warp() { return block().warps[threadIdx.x / kWarpSize]; }
};
inline Machine machine;

inline void Enter() {
  (*machine.body)();
  --machine.block().left;
  _longjmp(machine.home, 2);
}

// Lets other fibres run; returns when somebody has made this fibre ready.
inline void Leave() {
  Fibre& fibre = machine.fibres[machine.current];
  if (_setjmp(fibre.at) == 0) _longjmp(machine.home, 1);
}

inline void Wait(Meeting* meeting) {
  if (static_cast<int>(meeting->waiting.size()) + 1 == meeting->expected) {
    machine.ready.insert(machine.ready.end(), meeting->waiting.begin(), meeting->waiting.end());
    meeting->waiting.clear();
    if (machine.random() % 2 == 0) return;
    machine.ready.push_back(machine.current);
  } else {
    meeting->waiting.push_back(machine.current);
  }
  Leave();
}

// A point at which any other fibre may run.
inline void MayLeave(unsigned one_in) {
  if (machine.random() % one_in != 0) return;
  machine.ready.push_back(machine.current);
  Leave();
}

template <typename Type>
Type& Shared() {
  static_assert(std::is_trivially_copyable_v<Type> && sizeof(Type) <= kSharedBytes);
  return *reinterpret_cast<Type*>(machine.block().shared);
}

// Every lane gives a word, and gets the words of all lanes.
inline const uint64_t* Exchange(uint64_t word) {
  Fibre& fibre = machine.fibres[machine.current];
  uint64_t* words = machine.warp().words[fibre.operations++ % 2];
  words[threadIdx.x % kWarpSize] = word;
  Wait(&machine.warp().meeting);
  return words;
}

inline void Resume(int number) {
  Fibre& fibre = machine.fibres[number];
  machine.current = number;
  threadIdx.x = fibre.thread;
  blockIdx.x = fibre.block->number;
  if (_setjmp(machine.home) != 0) return;
  if (fibre.started) _longjmp(fibre.at, 1);
  fibre.started = true;
  getcontext(&machine.entry);
  machine.entry.uc_stack.ss_sp = fibre.stack.get();
  machine.entry.uc_stack.ss_size = kStackBytes;
  machine.entry.uc_link = nullptr;
  makecontext(&machine.entry, Enter, 0);
  setcontext(&machine.entry);
}

// One launch: `blocks` blocks of `threads` threads run body().
inline void Run(int64_t blocks, int threads, const std::function<void()>& body) {
  const int resident = static_cast<int>(std::min<int64_t>(machine.resident, blocks));
  machine.body = &body;
  machine.ready.clear();
  while (static_cast<int>(machine.fibres.size()) < resident * threads) {
    machine.fibres.emplace_back();
    machine.fibres.back().stack.reset(new char[kStackBytes]);
  }
  machine.blocks.resize(std::max<size_t>(machine.blocks.size(), resident));
  int64_t next = 0;
  const auto start = [&](int slot) {
    if (machine.blocks[slot] == nullptr) machine.blocks[slot] = std::make_unique<BlockState>();
    BlockState& block = *machine.blocks[slot];
    std::memset(block.shared, 0xa5, sizeof block.shared);
    block.number = static_cast<unsigned>(next++);
    block.left = threads;
    block.meeting = {threads, {}};
    block.warps.assign(threads / kWarpSize, WarpState{{kWarpSize, {}}, {}});
    for (int t = 0; t < threads; ++t) {
      Fibre& fibre = machine.fibres[slot * threads + t];
      fibre.started = false;
      fibre.wakes = 0;
      fibre.block = &block;
      fibre.thread = static_cast<unsigned>(t);
      fibre.operations = 0;
      machine.ready.push_back(slot * threads + t);
    }
  };
  for (int slot = 0; slot < resident; ++slot) start(slot);
  while (!machine.ready.empty()) {
    std::swap(machine.ready[machine.random() % machine.ready.size()], machine.ready.back());
    const int number = machine.ready.back();
    if (++machine.picks < machine.fibres[number].wakes) continue;
    if (machine.random() % 2048 == 0) machine.fibres[number].wakes = machine.picks + machine.random() % 16384;
    machine.ready.pop_back();
    Resume(number);
    if (machine.fibres[number].block->left == 0) {
      machine.fibres[number].block->left = -1;
      if (next < blocks) start(number / threads);
    }
  }
  for (int slot = 0; slot < resident; ++slot) {
    if (machine.blocks[slot]->left > 0) throw std::runtime_error("a kernel waits for threads that do not come");
  }
}

template <typename Type>
uint64_t WordOf(Type value) {
  static_assert(sizeof(Type) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <typename Type>
Type FromWord(uint64_t word) {
  Type value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace hvd_ext::gpu::emulated

// ---- the names that kernels use

inline void __syncthreads() { hvd_ext::gpu::emulated::Wait(&hvd_ext::gpu::emulated::machine.block().meeting); }
inline void __threadfence() { hvd_ext::gpu::emulated::MayLeave(2); }

inline unsigned __ballot_sync(unsigned, bool mine) {
  const uint64_t* words = hvd_ext::gpu::emulated::Exchange(mine);
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(words[lane]) << lane;
  return all;
}
inline bool __any_sync(unsigned lanes, bool mine) { return __ballot_sync(lanes, mine) != 0; }
inline bool __all_sync(unsigned lanes, bool mine) { return __ballot_sync(lanes, !mine) == 0; }
template <typename Type>
Type __shfl_sync(unsigned, Type mine, int from) {
  return hvd_ext::gpu::emulated::FromWord<Type>(
      hvd_ext::gpu::emulated::Exchange(hvd_ext::gpu::emulated::WordOf(mine))[from]);
}
template <typename Type>
Type __shfl_xor_sync(unsigned lanes, Type mine, int bits) {
  return __shfl_sync(lanes, mine, static_cast<int>(threadIdx.x % 32) ^ bits);
}
template <typename Type>
Type __shfl_up_sync(unsigned lanes, Type mine, int distance) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(lanes, mine, lane >= distance ? lane - distance : lane);
}
template <typename Number>
Number atomicAdd(Number* to, Number value) {
  hvd_ext::gpu::emulated::MayLeave(4);
  const Number before = *to;
  *to = before + value;
  return before;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(unsigned bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
template <typename Word>
Word __ldcs(const Word* at) {
  bool known = hvd_ext::gpu::emulated::machine.readable.empty();
  for (const auto& [begin, end] : hvd_ext::gpu::emulated::machine.readable) known |= at >= begin && at + 1 <= end;
  hvd_ext::gpu::emulated::machine.strayed += !known;
  return *at;
}
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

namespace hvd_ext::gpu {

template <typename Word>
Word LoadNow(const Word* word) {
  emulated::MayLeave(2);
  return *word;
}
inline void StoreNow(uint64_t* word, uint64_t value) {
  emulated::MayLeave(2);
  *word = value;
}
inline void Pause() { emulated::MayLeave(1); }

// The words of a kernel's arguments, some of which are pointers. An argument needs to be without gaps, whose garbage
// may look like a pointer.
template <typename... Arguments>
std::vector<const void*> WordsOf(const Arguments&... arguments) {
  std::vector<const void*> words;
  const auto add = [&](const auto& argument) {
    const char* begin = reinterpret_cast<const char*>(&argument);
    for (size_t at = 0; at + sizeof(void*) <= sizeof argument; at += sizeof(void*)) {
      const void* word = nullptr;
      std::memcpy(&word, begin + at, sizeof word);
      words.push_back(word);
    }
  };
  (add(arguments), ...);
  return words;
}

template <typename... Parameters, typename... Arguments>
void Launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
  const auto run = [=] { emulated::Run(blocks, threads, [&] { kernel(arguments...); }); };
  stand_in::Enqueue(stream, run, WordsOf(arguments...));
}

// Of kernels whose threads do not meet: one thread after the other, the last block first.
template <typename... Parameters, typename... Arguments>
void LaunchApart(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                 const Arguments&... arguments) {
  const auto run = [=] {
    gridDim.x = static_cast<unsigned>(blocks);
    for (blockIdx.x = gridDim.x; blockIdx.x-- > 0;) {
      for (threadIdx.x = 0; threadIdx.x < static_cast<unsigned>(threads); ++threadIdx.x) kernel(arguments...);
    }
  };
  stand_in::Enqueue(stream, run, WordsOf(arguments...));
}

}  // namespace hvd_ext::gpu

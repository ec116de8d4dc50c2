// How a selection updates the residual of error feedback: candidates are cleared from it while they are in cache, and
// those that are not picked are put back at the end. Usually these are fewer than the picks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/half.h"
#include "kernels/topk_memory.h"

namespace hvd_ext::topk {

// Clears the residual at the candidates of the block at `offset`. FeedbackLoops::scan does this itself.
template <typename Bits>
void Clear(const ErrorFeedback& f, const Piece<Bits>& piece, int64_t offset, const uint16_t* ids, int64_t found) {
  float* block = f.next_residual + piece.begin + offset;
  for (int64_t i = 0; i < found; ++i) block[ids[i]] = 0;
}

template <typename Bits>
void PutBack(const ErrorFeedback& f, const Piece<Bits>& piece, int64_t candidate) {
  if constexpr (sizeof(Bits) == 4) {
    f.next_residual[piece.begin + piece.places.data()[candidate]] = FloatOf(piece.bits.data()[candidate]);
  }
}

template <typename Bits>
void PutAllBack(const ErrorFeedback& f, const Piece<Bits>& piece) {
  for (int64_t i = 0; i < piece.count; ++i) PutBack(f, piece, i);
}

// Puts back the candidates that are not picked, and masks the velocity at the others. `last` is T.
template <typename Bits>
void Restore(const ErrorFeedback& f, const Piece<Bits>& piece, Bits last) {
  constexpr int64_t kPart = 1024, kEarly = 32;
  const bool masks = f.velocity != nullptr && f.correction.masks;
  const Candidates<Bits> all = piece.candidates();
  float* residual = f.next_residual + piece.begin;
  int64_t ties = piece.ties;
  uint32_t left[kPart];  // candidates that are put back; their residuals are prefetched kEarly steps before
  for (int64_t begin = 0; begin < piece.count; begin += kPart) {
    const int64_t end = std::min(piece.count, begin + kPart);
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Bits key = KeyOf(all.bits[i]);
      const bool tie = key == last && ties > 0, picked = key > last || tie;
      ties -= tie;
      left[count] = static_cast<uint32_t>(i);
      count += !picked;
      if (masks && picked) f.next_velocity[piece.begin + all.places[i]] = 0;
    }
    for (int64_t i = -kEarly; i < count; ++i) {
      if (i + kEarly < count) __builtin_prefetch(residual + all.places[left[i + kEarly]], 1);
      if (i >= 0) PutBack(f, piece, left[i]);
    }
  }
}

}  // namespace hvd_ext::topk

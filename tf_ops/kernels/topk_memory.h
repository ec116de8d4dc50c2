// The memory of a selection, kept from call to call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/topk.h"
#include "kernels/topk_scan.h"

namespace hvd_ext::topk {

// An array that grows and is not initialised.
template <typename T>
class Buffer {
 public:
  // Makes room for `count` elements and keeps the first `kept` of the present ones.
  T* Reserve(int64_t count, int64_t kept) {
    if (count > capacity_) {
      const int64_t capacity = std::max(count, capacity_ + capacity_ / 2);
      std::unique_ptr<T[]> grown(new T[static_cast<size_t>(capacity)]);
      if (kept > 0) std::memcpy(grown.get(), data_.get(), static_cast<size_t>(kept) * sizeof(T));
      data_ = std::move(grown);
      capacity_ = capacity;
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }
  int64_t bytes() const { return capacity_ * static_cast<int64_t>(sizeof(T)); }
  int64_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t capacity_ = 0;
};

// A part of one segment that one lane scans, with the candidates found in it.
template <typename Bits>
struct Piece {
  int64_t segment = 0;
  int64_t begin = 0;  // in x
  int64_t elements = 0;
  Buffer<Bits> bits;
  Buffer<uint32_t> places;
  int64_t count = 0;    // candidates
  int64_t greater = 0;  // elements above T
  int64_t ties = 0;     // elements equal to T; after Place only those of them that are picked
  int64_t at = 0;       // where its picks begin
  int64_t end = 0;

  Candidates<Bits> candidates() const { return {bits.data(), places.data()}; }
  Candidates<Bits> behind() const { return {bits.data() + count, places.data() + count}; }  // where the next one goes
};

// A share of the work, which one thread at a time works on.
template <typename Bits>
struct Lane {
  int64_t first_piece = 0, last_piece = 0;
  Buffer<Bits> work;
  Buffer<Bits> bits;  // candidates of those pieces that are a whole segment
  Buffer<uint32_t> places;
  uint16_t ids[kBlock + kSpare];
  bool non_finite = false;
};

template <typename Bits>
void SwapRoom(Piece<Bits>* piece, Lane<Bits>* lane) {
  std::swap(piece->bits, lane->bits);
  std::swap(piece->places, lane->places);
}

template <typename Bits>
struct Lanes {
  std::vector<Piece<Bits>> pieces;  // the first n_pieces are in use
  int64_t n_pieces = 0;
  std::vector<Lane<Bits>> lanes;

  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& piece : pieces) sum += piece.bits.bytes() + piece.places.bytes();
    for (const auto& lane : lanes) sum += lane.work.bytes() + lane.bits.bytes() + lane.places.bytes() + sizeof(lane);
    return sum;
  }
};

// A piece with more candidates than this is pruned to its best k.
inline int64_t Limit(int64_t k) { return k * 5 / 2 + 8192; }

// Makes room for the candidates of one block, and keeps none of the present ones.
template <typename Bits>
void EmptyRoom(Piece<Bits>* piece) {
  piece->bits.Reserve(kBlock + kSpare, 0);
  piece->places.Reserve(kBlock + kSpare, 0);
}

// Makes room for `more` candidates; the first time for as many as a piece usually has.
template <typename Bits>
void MakeRoom(Piece<Bits>* piece, int64_t more, const TopKSegment& segment) {
  const int64_t needed = piece->count + more + kSpare;
  if (needed <= piece->bits.capacity()) return;
  const double share = static_cast<double>(piece->elements) / static_cast<double>(segment.elements);
  const int64_t usual = static_cast<int64_t>(share * static_cast<double>(segment.k) * 1.3) + kBlock / 4;
  piece->bits.Reserve(std::max(needed, std::min(usual, piece->elements) + kSpare), piece->count);
  piece->places.Reserve(piece->bits.capacity(), piece->count);
}

// Divides the segments, which have `total` elements, among `lanes` lanes of about equal length.
template <typename Bits>
void Divide(const TopKSegment* segments, int64_t n_segments, int64_t total, int64_t lanes, Lanes<Bits>* to) {
  constexpr int64_t kMost = int64_t{1} << 31;  // places have 32 bits
  to->lanes.resize(static_cast<size_t>(lanes));
  for (auto& lane : to->lanes) lane.non_finite = false;
  int64_t lane = 0, seen = 0, pieces = 0;
  auto last_of = [&] { return lane + 1 == lanes ? total : total / lanes * (lane + 1); };
  to->lanes[0].first_piece = 0;
  for (int64_t s = 0; s < n_segments; ++s) {
    for (int64_t done = 0; done < segments[s].elements;) {
      const int64_t elements = std::min({segments[s].elements - done, last_of() - seen, kMost});
      if (pieces == static_cast<int64_t>(to->pieces.size())) to->pieces.emplace_back();
      Piece<Bits>& piece = to->pieces[static_cast<size_t>(pieces++)];
      piece.segment = s;
      piece.begin = segments[s].begin + done;
      piece.elements = elements;
      piece.count = 0;
      done += elements;
      seen += elements;
      if (seen < last_of() || lane + 1 == lanes) continue;
      to->lanes[lane].last_piece = pieces;
      to->lanes[++lane].first_piece = pieces;
    }
  }
  to->lanes[lane].last_piece = pieces;
  to->n_pieces = pieces;
}

}  // namespace hvd_ext::topk

namespace hvd_ext {

struct TopKScratch::Memory {
  topk::Lanes<uint16_t> lanes16;
  topk::Lanes<uint32_t> lanes32;
  topk::Lanes<uint64_t> lanes64;
  topk::Buffer<uint64_t> words;  // for the selectors other than kExact

  template <typename Bits>
  topk::Lanes<Bits>* lanes() {
    if constexpr (sizeof(Bits) == 2) return &lanes16;
    if constexpr (sizeof(Bits) == 4) return &lanes32;
    if constexpr (sizeof(Bits) == 8) return &lanes64;
  }
};

}  // namespace hvd_ext

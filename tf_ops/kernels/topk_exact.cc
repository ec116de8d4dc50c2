#include "kernels/topk_exact.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "kernels/half.h"
#include "kernels/topk_sample.h"

namespace hvd_ext::topk {
namespace {

constexpr int64_t kMostLanes = 32;
constexpr int64_t kSmall = 4096;               // a shorter segment stays in cache: all of it may be candidates
constexpr int64_t kLaneElements = 256 * 1024;  // a smaller lane is not worth a thread

// How a selection updates the residual of error feedback: candidates are cleared from it while they are in cache, and
// those that are not picked are put back at the end. Usually these are fewer than the picks.

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

template <typename Bits>
class Selection {
 public:
  explicit Selection(const Request<Bits>& request)
      : r_(request),
        loops_(LoopsOf<Bits>(CurrentPath())),
        feeding_(FeedbackLoopsOf(CurrentPath())),
        m_(*request.memory) {}

  bool Run() {
    MakeTargets();
    MakePieces();
    OverSegments([this](auto& lane, int64_t s) { Sample(&lane, s); });
    OverPieces([this](auto& lane, auto& piece) {
      if (Alone(piece)) return ScanToEnd(&lane, &piece);
      Scan(&lane, &piece, false);
    });
    OverSegments([this](auto& lane, int64_t s) {
      if (!targets_[s].alone) Select(&lane, s);
    });
    OverShort();
    OverLarge();
    OverPieces([this](auto&, auto& piece) { Count(&piece); });
    Place();
    OverPieces([this](auto& lane, auto& piece) {
      if (!Alone(piece)) Emit(&lane, &piece);
    });
    bool non_finite = false;
    for (const auto& lane : m_.lanes) non_finite |= lane.non_finite;
    return non_finite;
  }

 private:
  struct Target {
    Bounds<Bits> bounds{0, kAbove<Bits>};
    Bits key = 0;      // T
    int64_t ties = 0;  // picks equal to T
    int64_t first_piece = 0, last_piece = 0;
    int64_t at = 0;        // where its picks begin
    bool alone = false;    // one lane has the whole segment, and emits the picks while the candidates are in cache
    bool large = false;    // k is so large that T is found from histograms of x
    bool missing = false;  // fewer candidates than k
    Bits pruned = 0;       // the greatest T of a pruned piece, and the first piece that has it
    int64_t pruned_piece = -1;
    int64_t rank = 0;  // of T among the keys that share its known upper bits, while OverLarge runs
  };

  const TopKSegment& SegmentOf(const Piece<Bits>& piece) const { return r_.segments[piece.segment]; }
  bool Alone(const Piece<Bits>& piece) const { return targets_[piece.segment].alone; }

  void MakeTargets() {
    targets_.resize(static_cast<size_t>(r_.n_segments));
    int64_t at = 0;
    for (int64_t s = 0; s < r_.n_segments; ++s) {
      const TopKSegment& segment = r_.segments[s];
      targets_[s].at = at;
      at += segment.k;
      targets_[s].large = segment.elements > kSmall && segment.k > segment.elements / 4;
      any_large_ |= targets_[s].large;
    }
  }

  void MakePieces() {
    int64_t total = 0, sampled = 0, picks = 0;
    for (int64_t s = 0; s < r_.n_segments; ++s) {
      total += r_.segments[s].elements;
      if (targets_[s].large) continue;
      sampled += r_.segments[s].elements;
      picks += r_.segments[s].k;
    }
    int64_t lanes = 1;
    if (*r_.parallel_for != nullptr) {
      lanes = std::min(kMostLanes, total / kLaneElements);
      // A lane can be pruned only where it has many more elements than picks.
      if (sampled > 0) lanes = std::min(lanes, sampled / (4 * picks + 1));
      lanes = std::max<int64_t>(1, lanes);
    }
    cost_ = total / lanes / 3;
    Divide(r_.segments, r_.n_segments, total, lanes, &m_);
    for (int64_t p = 0; p < m_.n_pieces; ++p) {
      Target& target = targets_[m_.pieces[p].segment];
      if (target.last_piece == 0) target.first_piece = p;
      target.last_piece = p + 1;
      target.alone = p == target.first_piece && !target.large;
    }
  }

  // Runs body for the first `count` lanes, on all threads.
  template <typename Body>
  void OverLanes(int64_t count, const Body& body) {
    if (count < 2) return body(0);
    (*r_.parallel_for)(count, cost_, [&body](int64_t begin, int64_t end) {
      for (int64_t lane = begin; lane < end; ++lane) body(lane);
    });
  }

  template <typename Body>
  void OverPieces(const Body& body) {
    OverLanes(static_cast<int64_t>(m_.lanes.size()), [&](int64_t index) {
      Lane<Bits>& lane = m_.lanes[index];
      for (int64_t p = lane.first_piece; p < lane.last_piece; ++p) body(lane, m_.pieces[p]);
    });
  }

  template <typename Body>
  void OverSegments(const Body& body) {
    const int64_t lanes = static_cast<int64_t>(m_.lanes.size());
    OverLanes(std::min(lanes, r_.n_segments), [&](int64_t index) {
      for (int64_t s = index; s < r_.n_segments; s += lanes) body(m_.lanes[index], s);
    });
  }

  void Sample(Lane<Bits>* lane, int64_t s) {
    const TopKSegment& segment = r_.segments[s];
    Bounds<Bits>* bounds = &targets_[s].bounds;
    if (segment.k == 0) {
      bounds->low = r_.infinity;
    } else if (targets_[s].large) {
      bounds->low = kAbove<Bits>;
    } else if (segment.elements > kUnsampled && segment.k <= segment.elements / 4) {
      *bounds = Sampled(r_.x, r_.feedback, segment, static_cast<uint64_t>(s) << 32, &lane->work);
      if (SamplerMisled() == Misled::kHigh) bounds->low = kAbove<Bits>;
      if (SamplerMisled() == Misled::kLow) bounds->low = 0;
    }
  }

  void Scan(Lane<Bits>* lane, Piece<Bits>* piece, bool again) {
    const int64_t k = SegmentOf(*piece).k;
    const Target& target = targets_[piece->segment];
    const bool feeds = r_.feedback != nullptr && !again;
    piece->count = 0;
    if (target.large && !feeds) return;
    Bits bound = std::max(again ? Bits{0} : target.bounds.low, PrunedBound(*piece));
    if (target.large) EmptyRoom(piece);
    for (int64_t offset = 0; offset < piece->elements; offset += kBlock) {
      const int64_t elements = std::min(kBlock, piece->elements - offset);
      const Bits* block = r_.x + piece->begin + offset;
      const uint32_t place = static_cast<uint32_t>(offset);
      if (feeds) {
        MakeRoom(piece, elements, SegmentOf(*piece));
        piece->count += ScanFeedback(*piece, elements, bound, place);
      } else {
        const int64_t found = loops_.scan(block, elements, bound, lane->ids);
        if (found == 0) continue;
        MakeRoom(piece, found, SegmentOf(*piece));
        loops_.append(block, lane->ids, found, place, piece->behind());
        piece->count += found;
        if (r_.feedback != nullptr) Clear(*r_.feedback, *piece, offset, lane->ids, found);
      }
      if (k == 0) {
        lane->non_finite |= piece->count > 0;
        if (feeds) PutAllBack(*r_.feedback, *piece);
        piece->count = 0;
      }
      if (piece->count > Limit(k)) bound = std::max(bound, Prune(lane, piece));
    }
  }

  // Handles a segment that one lane has alone. All such segments of a lane use the lane's own memory, one after the
  // other.
  void ScanToEnd(Lane<Bits>* lane, Piece<Bits>* piece) {
    Target* target = &targets_[piece->segment];
    SwapRoom(piece, lane);
    Scan(lane, piece, false);
    Select(lane, piece->segment);
    if (target->missing) {
      ScanAgain(lane, piece);
      Select(lane, piece->segment);
    }
    piece->ties = target->ties;
    piece->at = target->at;
    piece->end = target->at + SegmentOf(*piece).k;
    Emit(lane, piece);
    SwapRoom(piece, lane);
  }

  // The bound from the sample was too high: now every element is a candidate, until pruning gives a bound.
  void ScanAgain(Lane<Bits>* lane, Piece<Bits>* piece) {
    if (r_.feedback != nullptr) PutAllBack(*r_.feedback, *piece);
    Scan(lane, piece, true);
  }

  int64_t ScanFeedback(const Piece<Bits>& piece, int64_t elements, Bits bound, uint32_t place) {
    if constexpr (sizeof(Bits) == 4) {
      return feeding_.scan(From(*r_.feedback, piece.begin + place), elements, bound, place, piece.behind());
    }
    return 0;
  }

  // Keeps the k greatest candidates and, of equal ones, the first. Returns a bound for the rest of the piece: elements
  // that equal the last of the kept ones and come later cannot be picks.
  Bits Prune(Lane<Bits>* lane, Piece<Bits>* piece) {
    const int64_t k = SegmentOf(*piece).k;
    if (piece->count < k) return 0;
    Bits* keys = lane->work.Reserve(2 * piece->count + kSpare, 0);
    int64_t above = 0;
    loops_.between(piece->bits.data(), piece->count, 0, kAbove<Bits>, keys, &above);
    const Kth<Bits> last = SelectKth(loops_, keys, piece->count, k);
    int64_t ties = k - last.greater, kept = 0;
    const Candidates<Bits> all = piece->candidates();
    for (int64_t i = 0; i < piece->count; ++i) {
      const Bits bits = all.bits[i], key = KeyOf(bits);
      const bool tie = key == last.key && ties > 0, stays = key > last.key || tie;
      ties -= tie;
      if (!stays && r_.feedback != nullptr) PutBack(*r_.feedback, *piece, i);
      all.places[kept] = all.places[i];
      all.bits[kept] = bits;
      kept += stays;
    }
    piece->count = kept;
    Target& target = targets_[piece->segment];
    const int64_t index = piece - m_.pieces.data();
    std::lock_guard<std::mutex> lock(mutex_);
    const bool first = last.key == target.pruned && index < target.pruned_piece;
    if (target.pruned_piece < 0 || last.key > target.pruned || first) {
      target.pruned = last.key;
      target.pruned_piece = index;
    }
    return static_cast<Bits>(last.key + 1);
  }

  // The bound for this piece that follows from pruned pieces of the same segment.
  Bits PrunedBound(const Piece<Bits>& piece) {
    const Target& target = targets_[piece.segment];
    std::lock_guard<std::mutex> lock(mutex_);
    if (target.pruned_piece < 0) return 0;
    return static_cast<Bits>(target.pruned + (&piece - m_.pieces.data() > target.pruned_piece));
  }

  // Finds T among the candidates. Only those below the upper bound are searched, unless the sample was misleading.
  void Select(Lane<Bits>* lane, int64_t s) {
    Target* target = &targets_[s];
    const int64_t k = r_.segments[s].k;
    if (target->large || k == 0) return;
    int64_t total = 0, near = 0, above = 0;
    for (int64_t p = target->first_piece; p < target->last_piece; ++p) total += m_.pieces[p].count;
    target->missing = total < k;
    if (target->missing) return;
    Bits* keys = lane->work.Reserve(2 * total + kSpare, 0);
    auto gather = [&](Bits high) {
      near = above = 0;
      for (int64_t p = target->first_piece; p < target->last_piece; ++p) {
        near += loops_.between(m_.pieces[p].bits.data(), m_.pieces[p].count, 0, high, keys + near, &above);
      }
    };
    gather(target->bounds.high);
    if (above >= k) gather(kAbove<Bits>);
    const Kth<Bits> last = SelectKth(loops_, keys, near, k - above);
    target->key = last.key;
    target->ties = k - above - last.greater;
  }

  void OverShort() {
    bool any = false;
    for (Target& target : targets_) any |= target.missing;
    if (!any) return;
    OverPieces([this](auto& lane, auto& piece) {
      if (targets_[piece.segment].missing) ScanAgain(&lane, &piece);
    });
    OverSegments([this](auto& lane, int64_t s) {
      if (targets_[s].missing) Select(&lane, s);
    });
  }

  // Finds T for large k digit by digit, from histograms of all elements that share the digits found so far.
  void OverLarge() {
    if (!any_large_) return;
    for (Target& target : targets_) {
      if (target.large) target.rank = r_.segments[&target - targets_.data()].k;
    }
    for (int shift = static_cast<int>(sizeof(Bits)) * 8 - 1; shift > 0;) {
      const int next = std::max(0, shift - kCounterBits);
      OverPieces([&](auto&, auto& piece) {
        if (targets_[piece.segment].large) Histogram(&piece, shift, next);
      });
      for (Target& target : targets_) {
        if (target.large) Refine(&target, next);
      }
      shift = next;
    }
  }

  void Histogram(Piece<Bits>* piece, int above, int below) {
    piece->places.Reserve(kTables * kCounters, 0);
    const Bits prefix = static_cast<Bits>(targets_[piece->segment].key >> above);
    CountDigits(r_.x + piece->begin, piece->elements, prefix, above, below, piece->places.data());
  }

  void Refine(Target* target, int below) {
    std::vector<uint64_t> sum(kCounters);
    for (int64_t p = target->first_piece; p < target->last_piece; ++p) {
      for (int64_t i = 0; i < kCounters; ++i) sum[i] += m_.pieces[p].places.data()[i];
    }
    int64_t greater = 0;
    const int64_t digit = BucketOf(sum.data(), target->rank, &greater);
    target->rank -= greater;
    target->key = static_cast<Bits>(target->key | static_cast<Bits>(digit) << below);
    target->ties = target->rank;
  }

  void Count(Piece<Bits>* piece) {
    const Target& target = targets_[piece->segment];
    piece->greater = piece->ties = 0;
    if (target.last_piece - target.first_piece == 1) return;
    const Bits* bits = target.large ? r_.x + piece->begin : piece->bits.data();
    const int64_t count = target.large ? piece->elements : piece->count;
    for (int64_t i = 0; i < count; ++i) {
      piece->greater += KeyOf(bits[i]) > target.key;
      piece->ties += KeyOf(bits[i]) == target.key;
    }
  }

  void Place() {
    for (int64_t s = 0; s < r_.n_segments; ++s) {
      const Target& target = targets_[s];
      int64_t at = target.at, ties = target.ties;
      const int64_t end = at + r_.segments[s].k;
      const bool alone = target.last_piece - target.first_piece == 1;
      for (int64_t p = target.first_piece; p < target.last_piece; ++p) {
        Piece<Bits>& piece = m_.pieces[p];
        piece.ties = alone ? ties : std::min(piece.ties, ties);
        ties -= piece.ties;
        piece.at = at;
        at = piece.end = alone ? end : at + piece.greater + piece.ties;
      }
    }
  }

  void Emit(Lane<Bits>* lane, Piece<Bits>* piece) {
    const Target& target = targets_[piece->segment];
    if (piece->at == piece->end && piece->count == 0) return;
    int64_t ties = piece->ties;
    Bits greatest = 0;
    if (target.large) {
      EmitLarge(lane, piece, &greatest);
    } else {
      loops_.emit(piece->candidates(), piece->count, target.key, &ties, piece->begin, r_.picks, piece->at, piece->end,
                  &greatest);
      if (r_.feedback != nullptr) Restore(*r_.feedback, *piece, target.key);
    }
    lane->non_finite |= greatest >= r_.infinity;
  }

  void EmitLarge(Lane<Bits>* lane, Piece<Bits>* piece, Bits* greatest) {
    const Target& target = targets_[piece->segment];
    int64_t at = piece->at, ties = piece->ties;
    EmptyRoom(piece);
    for (int64_t offset = 0; offset < piece->elements && at < piece->end; offset += kBlock) {
      const int64_t elements = std::min(kBlock, piece->elements - offset);
      const Bits* block = r_.x + piece->begin + offset;
      const int64_t found = loops_.scan(block, elements, target.key, lane->ids);
      loops_.append(block, lane->ids, found, static_cast<uint32_t>(offset), piece->candidates());
      const int64_t before = ties;
      at = loops_.emit(piece->candidates(), found, target.key, &ties, piece->begin, r_.picks, at, piece->end, greatest);
      if (r_.feedback == nullptr) continue;
      Clear(*r_.feedback, *piece, offset, lane->ids, found);
      piece->count = found;
      piece->ties = before;
      Restore(*r_.feedback, *piece, target.key);
    }
  }

  const Request<Bits>& r_;
  const Loops<Bits>& loops_;
  const FeedbackLoops& feeding_;
  Lanes<Bits>& m_;
  std::vector<Target> targets_;
  std::mutex mutex_;
  int64_t cost_ = 0;  // nanoseconds that a lane takes
  bool any_large_ = false;
};

}  // namespace

template <typename Bits>
bool SelectExact(const Request<Bits>& request) {
  return Selection<Bits>(request).Run();
}

template bool SelectExact(const Request<uint16_t>&);
template bool SelectExact(const Request<uint32_t>&);
template bool SelectExact(const Request<uint64_t>&);

}  // namespace hvd_ext::topk

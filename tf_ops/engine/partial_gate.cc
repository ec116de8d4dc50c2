#include "engine/partial_gate.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvd_ext {
namespace {

constexpr size_t kRoundsKept = 10000;

// A float is not finite where all bits of its exponent are set.
template <typename Bits>
bool AllFinite(const void* data, int64_t elements, Bits exponent) {
  const Bits* bits = static_cast<const Bits*>(data);
  bool found = false;
  for (int64_t i = 0; i < elements; ++i) found |= (bits[i] & exponent) == exponent;
  return !found;
}

bool AllFinite(DType dtype, const void* data, int64_t elements) {
  switch (dtype) {
    case DType::kFloat32:
      return AllFinite<uint32_t>(data, elements, 0x7F800000u);
    case DType::kFloat64:
      return AllFinite<uint64_t>(data, elements, 0x7FF0000000000000u);
    case DType::kFloat16:
      return AllFinite<uint16_t>(data, elements, 0x7C00u);
    case DType::kBFloat16:
      return AllFinite<uint16_t>(data, elements, 0x7F80u);
    default:
      return true;
  }
}

}  // namespace

PartialGate::PartialGate(std::string channel, std::shared_ptr<const Layout> layout, const PartialSpec& spec, int rank,
                         int size, BufferPool* pool)
    : name_(std::move(channel)),
      layout_(std::move(layout)),
      spec_(spec),
      rank_(rank),
      size_(size),
      pool_(pool),
      rounds_(spec.staleness),
      held_(layout_->buckets.size() - 1) {}

PartialGate::Gradients PartialGate::Zeros(int64_t bucket) const {
  const int64_t nbytes = layout_->bucket(bucket).nbytes();
  Gradients zeros = std::make_shared<Buffer>(pool_->Take(nbytes));
  std::memset(zeros->data(), 0, static_cast<size_t>(nbytes));
  return zeros;
}

Status PartialGate::BeginStep(int64_t step, bool skips) {
  MutexLock lock(&mutex_);
  const std::string what = "step " + std::to_string(step) + " of " + Quoted(name_);
  if (rounds_.begun() < rounds_.arrived()) {
    return Invalid(what + " begins before the round of the step before it; collect that step first");
  }
  if (skips && over_ < step) return Invalid(what + " cannot be skipped: its round is not over");
  step_ = step;
  if (skips) rounds_.Arrive(step);
  return Status::Ok();
}

// No gradient of the step has been given to a round. The step before stays the newest one, so that this rank's steps
// keep the numbers of their rounds.
bool PartialGate::AbandonStep(const ChannelStep& step, int64_t* newest) {
  MutexLock lock(&mutex_);
  step_ = *newest = step.number - 1;
  return false;
}

bool PartialGate::Arrive(ChannelStep* step) {
  MutexLock lock(&mutex_);
  if (flush_ > 0 && step->number >= flush_) {
    full_ = step->number;
    flush_ = 0;
  }
  for (int64_t i = 0; i < buckets() && rounds_.begun() >= step->number; ++i) {
    Gradients& held = held_[static_cast<size_t>(i)];
    held = Sum(i, std::move(held), std::move(step->bucket(i).input));
  }
  rounds_.Arrive(step->number);
  return true;
}

// Sums in the order of the steps: the older gradients first.
PartialGate::Gradients PartialGate::Sum(int64_t bucket, Gradients older, Gradients newer) const {
  if (older == nullptr || newer == nullptr) return older == nullptr ? newer : older;
  const Layout::Bucket& summed = layout_->bucket(bucket);
  Add(summed.spec.dtype, older->data(), newer->data(), summed.elements);
  return older;
}

bool PartialGate::BeginRound(int64_t* step) {
  MutexLock lock(&mutex_);
  Round round;
  if (!rounds_.Begin(step, &round.on_time)) return false;
  round.begin_s = NowSeconds();
  running_[*step] = round;
  return true;
}

std::shared_ptr<Buffer> PartialGate::Contribution(ChannelStep* step, int64_t bucket) {
  MutexLock lock(&mutex_);
  if (bucket == buckets()) return Table();
  ChannelStep::Bucket& entry = step->bucket(bucket);
  Gradients newest = running_[step->number].on_time ? std::exchange(entry.input, nullptr) : nullptr;
  Gradients given = Sum(bucket, std::exchange(held_[static_cast<size_t>(bucket)], nullptr), std::move(newest));
  if (given == nullptr) return Zeros(bucket);
  if (spec_.holds_again) {
    const int64_t nbytes = given->nbytes();
    entry.kept = std::make_shared<Buffer>(pool_->Take(nbytes));
    std::memcpy(entry.kept->data(), given->data(), static_cast<size_t>(nbytes));
  }
  return given;
}

PartialGate::Gradients PartialGate::Table() const {
  Gradients table = Zeros(buckets());
  int32_t* numbers = reinterpret_cast<int32_t*>(table->data());
  numbers[rank_] = static_cast<int32_t>(rounds_.arrived());
  numbers[size_ + rank_] = static_cast<int32_t>(flags_);
  return table;
}

std::pair<int64_t, int64_t> PartialGate::EndRun(ChannelStep* step, int64_t, std::vector<Delivery>* ended) {
  if (step->ended < step->NumBuckets()) return {0, 0};
  MutexLock lock(&mutex_);
  const auto running = running_.find(step->number);
  const auto failed = std::find_if(step->buckets.begin(), step->buckets.end(),
                                   [](const ChannelStep::Bucket& bucket) { return !bucket.status.ok(); });
  if (failed == step->buckets.end()) {
    over_ = std::max(over_, step->number);  // of two rounds under way the later one may end first
    NoteRound(*step, running->second.begin_s);
    Requeue(step);
  }
  const Status status = failed == step->buckets.end() ? Status::Ok() : failed->status;
  for (ChannelStep::Bucket& bucket : step->buckets) {
    bucket.status = status;
    bucket.kept = nullptr;
  }
  step->buckets.back().buffer = nullptr;
  running_.erase(running);
  Answer(ended);
  return {0, step->NumBuckets()};
}

void PartialGate::NoteRound(const ChannelStep& step, double begin_s) {
  const double now_s = NowSeconds();
  const int32_t* table = reinterpret_cast<const int32_t*>(step.buckets.back().buffer->data());
  if (infos_.size() == kRoundsKept) infos_.pop_front();
  infos_.insert(InfoFrom(step.number),
                {step.number, begin_s, now_s, step.wait_s < 0 ? 0 : now_s - step.wait_s,
                 std::vector<int64_t>(table, table + size_),
                 std::vector<int64_t>(table + size_, table + TableElements(size_)), std::move(came_[step.number])});
  came_.erase(step.number);
}

// Holds again what this rank gave to a round whose sum is not finite, if that was finite.
void PartialGate::Requeue(ChannelStep* step) {
  const auto is_finite = [&](Gradients ChannelStep::Bucket::* gradients) {
    for (int64_t i = 0; i < buckets(); ++i) {
      const Gradients& memory = step->bucket(i).*gradients;
      const Layout::Bucket& bucket = layout_->bucket(i);
      if (memory != nullptr && !AllFinite(bucket.spec.dtype, memory->data(), bucket.elements)) return false;
    }
    return true;
  };
  const auto is_kept = [](const ChannelStep::Bucket& bucket) { return bucket.kept != nullptr; };
  if (std::none_of(step->buckets.begin(), step->buckets.end(), is_kept)) return;
  if (is_finite(&ChannelStep::Bucket::buffer) || !is_finite(&ChannelStep::Bucket::kept)) return;
  for (int64_t i = 0; i < buckets(); ++i) {
    Gradients& held = held_[static_cast<size_t>(i)];
    held = Sum(i, std::move(step->bucket(i).kept), std::move(held));
  }
}

void PartialGate::Fail(const Status& status, std::vector<Delivery>* ended) {
  MutexLock lock(&mutex_);
  failure_ = status;
  Answer(ended);
}

LaneReport::State PartialGate::StateOf(bool) const {
  MutexLock lock(&mutex_);
  return rounds_.AtBound() ? LaneReport::kAtBound : LaneReport::kNotBegun;
}

void PartialGate::Progress(int64_t* step, int64_t* over) const {
  MutexLock lock(&mutex_);
  *step = step_;
  *over = over_;
}

Status PartialGate::CheckSwitch(const std::string& channel) const {
  return Invalid("another layout of " + Quoted(channel) +
                 ": its rounds begin when a whole gradient is there, and keep their layout");
}

Status PartialGate::CheckJoin(const std::string& channel) const {
  return Invalid("join: the rounds of channel " + Quoted(channel) +
                 " are partial and wait for no rank; a rank without more data leaves them instead");
}

Status PartialGate::CheckGiveResult(const std::string& channel) const {
  return Invalid(Quoted(channel) + ": partial rounds have no delay");
}

Status PartialGate::FindPartial(const std::string&, PartialGate** gate) {
  *gate = this;
  return Status::Ok();
}

void PartialGate::Flush(int64_t ahead) {
  MutexLock lock(&mutex_);
  flush_ = step_ + ahead;
}

void PartialGate::SetFlags(int64_t flags) {
  MutexLock lock(&mutex_);
  flags_ = flags;
}

void PartialGate::AwaitRound(NextRound done) {
  std::vector<Delivery> ended;
  {
    MutexLock lock(&mutex_);
    awaiting_ = std::move(done);
    Answer(&ended);
  }
  DeliverAll(ended);
}

void PartialGate::Answer(std::vector<Delivery>* ended) {
  if (awaiting_ == nullptr) return;
  const bool ends = last_ >= 0 && step_ >= last_;
  const bool more = over_ > step_ && !ends;  // rounds behind the last one are of the next epoch
  if (failure_.ok() && !more && !ends) return;
  if (failure_.ok() && ends) {
    last_ = -1;
    rounds_.Return();
  }
  auto answer = [done = std::exchange(awaiting_, nullptr), more](const Status& status, const void*, const Memory&) {
    done(status, status.ok() && more);
  };
  ended->push_back({std::move(answer), failure_, nullptr, nullptr});
}

std::vector<RoundInfo> PartialGate::Rounds(int64_t first, int64_t most) const {
  MutexLock lock(&mutex_);
  std::vector<RoundInfo> found;
  for (const RoundInfo& info : infos_) {
    if (info.round >= first && static_cast<int64_t>(found.size()) < most) found.push_back(info);
  }
  return found;
}

void PartialGate::ReadHeld(int64_t tensor, void* to, bool* held) const {
  MutexLock lock(&mutex_);
  *held = std::any_of(held_.begin(), held_.end(), [](const Gradients& gradients) { return gradients != nullptr; });
  if (to == nullptr) return;
  const Layout::Place& place = layout_->place(tensor);
  const Gradients& gradients = held_[static_cast<size_t>(place.bucket)];
  if (gradients != nullptr) {
    std::memcpy(to, gradients->data() + place.offset_nbytes, static_cast<size_t>(place.nbytes));
  } else {
    std::memset(to, 0, static_cast<size_t>(place.nbytes));
  }
}

void PartialGate::WriteHeld(int64_t tensor, const void* from) {
  MutexLock lock(&mutex_);
  const Layout::Place& place = layout_->place(tensor);
  Gradients& gradients = held_[static_cast<size_t>(place.bucket)];
  if (gradients == nullptr) gradients = Zeros(place.bucket);
  if (place.nbytes > 0) std::memcpy(gradients->data() + place.offset_nbytes, from, static_cast<size_t>(place.nbytes));
}

bool PartialGate::TakeArrival(int64_t* step, bool* full) {
  MutexLock lock(&mutex_);
  if (rounds_.arrived() <= announced_) return false;
  *step = announced_ = rounds_.arrived();
  *full = full_ == announced_;
  return true;
}

void PartialGate::Open(int64_t round) {
  MutexLock lock(&mutex_);
  rounds_.Open(round);
}

void PartialGate::Came(int rank, int64_t step) {
  MutexLock lock(&mutex_);
  std::vector<double>* came = nullptr;
  const auto info = InfoFrom(step);
  if (info != infos_.end() && info->round == step) {
    came = &info->announced_s;
  } else if (step > rounds_.begun() || running_.count(step) > 0) {
    came = &came_[step];
  }
  if (came == nullptr) return;
  came->resize(static_cast<size_t>(size_));
  (*came)[static_cast<size_t>(rank)] = NowSeconds();
}

std::deque<RoundInfo>::iterator PartialGate::InfoFrom(int64_t round) {
  return std::lower_bound(infos_.begin(), infos_.end(), round,
                          [](const RoundInfo& info, int64_t number) { return info.round < number; });
}

void PartialGate::Leave() {
  MutexLock lock(&mutex_);
  rounds_.Leave();
}

void PartialGate::End(int64_t last, std::vector<Delivery>* ended) {
  MutexLock lock(&mutex_);
  rounds_.End(last);
  last_ = last;
  Answer(ended);
}

int64_t PartialGate::WaitsFor() const {
  MutexLock lock(&mutex_);
  const bool waits = rounds_.arrived() > rounds_.begun() || awaiting_ != nullptr;
  return failure_.ok() && waits && running_.empty() ? rounds_.begun() + 1 : 0;
}

}  // namespace hvd_ext

#include "engine/partial_steps.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/stall.h"

namespace hvd_ext {
namespace {

constexpr size_t kRoundsKept = 10000;
constexpr int64_t kAlignNbytes = 64;

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

PartialSteps::PartialSteps(std::string name, std::vector<Tensor> tensors, const PartialSpec& spec, int rank, int size)
    : name_(std::move(name)),
      tensors_(std::move(tensors)),
      spec_(spec),
      rank_(rank),
      size_(size),
      gate_(spec.rules.staleness),
      here_(tensors_.size()) {
  int64_t at = 0;
  for (const Tensor& tensor : tensors_) {
    begins_.push_back(at);
    at += (tensor.nbytes() + kAlignNbytes - 1) / kAlignNbytes * kAlignNbytes;
  }
  begins_.push_back(at);
}

std::string PartialSteps::Named(int64_t tensor) const {
  return "tensor " + Quoted(this->tensor(tensor).name) + " of " + Quoted(name_);
}

Status PartialSteps::CheckTensor(int64_t tensor) const {
  if (tensor >= 0 && tensor < tensors()) return Status::Ok();
  return Invalid("tensor (" + std::to_string(tensor) + ") of " + Quoted(name_) + " must be in [0, " +
                 std::to_string(tensors()) + ")");
}

PartialSteps::Gradients PartialSteps::TakeMemory() {
  if (spare_.empty()) return std::make_shared<std::vector<char>>(static_cast<size_t>(begins_.back()));
  Gradients memory = std::move(spare_.back());
  spare_.pop_back();
  return memory;
}

Status PartialSteps::BeginStep() {
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  if (whole_ == step_ && gate_.begun() < step_) {
    return Invalid("step " + std::to_string(step_ + 1) + " of " + Quoted(name_) +
                   " begins before the round of the step before it; collect that step first");
  }
  if (whole_ < step_) {  // nothing of it has been given to a round: it begins afresh
    const int64_t step = step_--;
    std::vector<std::string> missing;
    for (int64_t i = 0; i < tensors(); ++i) {
      if (!here_[static_cast<size_t>(i)]) missing.push_back(tensor(i).name);
    }
    if (static_cast<int64_t>(missing.size()) < tensors()) {
      std::fill(here_.begin(), here_.end(), false);
      copied_ = 0;
      return Invalid("step " + std::to_string(step) + " of " + Quoted(name_) +
                     " was left half-way: " + NameList(missing, static_cast<int64_t>(missing.size())) +
                     (missing.size() == 1 ? " was" : " were") + " not submitted; the next step starts afresh");
    }
  }
  ++step_;
  std::fill(here_.begin(), here_.end(), false);
  copied_ = 0;
  if (staged_ == nullptr) staged_ = TakeMemory();
  if (tensors_.empty()) gate_.Arrive(whole_ = step_);
  // results that were not collected are dropped, as those of a channel are
  for (auto it = rounds_.begin(); it != rounds_.end() && it->first < step_ - 1;) {
    const std::vector<Deliver>& waiting = it->second.waiting;
    const bool waits = std::any_of(waiting.begin(), waiting.end(), [](const Deliver& one) { return one != nullptr; });
    it = waits || !it->second.over ? std::next(it) : rounds_.erase(it);
  }
  return Status::Ok();
}

Status PartialSteps::Reserve(int64_t tensor, int64_t nbytes, int64_t* step, char** to) {
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  HVD_EXT_RETURN_IF_ERROR(CheckTensor(tensor));
  if (nbytes != this->tensor(tensor).nbytes()) {
    return Invalid(Named(tensor) + " must have " + std::to_string(this->tensor(tensor).nbytes()) +
                   " bytes, as registered, it has " + std::to_string(nbytes));
  }
  if (step_ == 0) return Invalid(Named(tensor) + " was submitted before the first step; begin a step first");
  if (here_[static_cast<size_t>(tensor)]) {
    return Invalid(Named(tensor) + " was submitted twice in step " + std::to_string(step_) +
                   "; each step must submit each tensor once");
  }
  here_[static_cast<size_t>(tensor)] = true;
  *step = step_;
  *to = PartOf(staged_, tensor);
  return Status::Ok();
}

Status PartialSteps::Arrive(int64_t step, int64_t tensor, bool* whole) {
  *whole = false;
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  if (step != step_) {
    return Invalid(Named(tensor) + ": its step ended while it was submitted; a step must end before the next begins");
  }
  if (++copied_ < tensors()) return Status::Ok();
  *whole = true;
  whole_ = step;
  if (flush_ > 0 && step >= flush_) {
    full_ = step;
    flush_ = 0;
  }
  if (gate_.begun() >= step) Hold(std::exchange(held_, nullptr), std::exchange(staged_, nullptr));
  gate_.Arrive(step);
  return Status::Ok();
}

// Sums in the order of the steps: the older gradients first.
void PartialSteps::Hold(Gradients older, Gradients newer) {
  if (older == nullptr || newer == nullptr) {
    held_ = older == nullptr ? std::move(newer) : std::move(older);
    return;
  }
  for (int64_t i = 0; i < tensors(); ++i) Add(tensor(i).dtype, PartOf(older, i), PartOf(newer, i), tensor(i).elements);
  held_ = std::move(older);
  spare_.push_back(std::move(newer));
}

Status PartialSteps::SkipStep(int64_t* step) {
  HVD_EXT_RETURN_IF_ERROR(BeginStep());
  MutexLock lock(&mutex_);
  if (over_ < step_) {
    const int64_t begun = step_--;
    return Invalid("step " + std::to_string(begun) + " of " + Quoted(name_) +
                   " cannot be skipped: its round is not over");
  }
  gate_.Arrive(step_);
  whole_ = step_;
  *step = step_;
  return Status::Ok();
}

void PartialSteps::Flush(int64_t ahead) {
  MutexLock lock(&mutex_);
  flush_ = step_ + ahead;
}

void PartialSteps::SetFlags(int64_t flags) {
  MutexLock lock(&mutex_);
  flags_ = flags;
}

PartialSteps::Round& PartialSteps::At(int64_t round) {
  Round& found = rounds_[round];
  if (found.data.empty()) {
    const size_t count = tensors_.size() + 1;
    found.waiting.resize(count);
    found.data.resize(count);
    found.memory.resize(count);
    found.collected.resize(count);
  }
  return found;
}

bool PartialSteps::Collect(int64_t tensor, int64_t step, Deliver deliver, Delivery* delivery) {
  MutexLock lock(&mutex_);
  delivery->status = CheckTensor(tensor);
  const bool known = step >= 1 && step <= step_ && (step > over_ || rounds_.count(step) > 0);
  if (delivery->status.ok() && !known) {
    delivery->status = !failure_.ok() ? failure_
                                      : Invalid("collect of " + Named(tensor) + ": step " + std::to_string(step) +
                                                " is not under way; collect a step before the next but one begins");
  }
  if (delivery->status.ok()) {
    Round& round = At(step);
    Deliver& waiting = round.waiting[static_cast<size_t>(tensor)];
    if (round.collected[static_cast<size_t>(tensor)] || waiting != nullptr) {
      delivery->status = Invalid(Named(tensor) + " was collected twice in step " + std::to_string(step));
    } else if (!round.over && failure_.ok()) {
      if (round.wait_s < 0) round.wait_s = NowSeconds();
      waiting = std::move(deliver);
      return false;
    } else {
      GiveOne(&round, tensor, std::move(deliver), delivery);
      if (round.taken == tensors()) rounds_.erase(step);
      return true;
    }
  }
  delivery->deliver = std::move(deliver);
  return true;
}

void PartialSteps::GiveOne(Round* round, int64_t tensor, Deliver deliver, Delivery* delivery) {
  const size_t i = static_cast<size_t>(tensor);
  delivery->deliver = std::move(deliver);
  delivery->status = round->over ? round->status : failure_;
  if (delivery->status.ok()) {
    delivery->data = round->data[i];
    delivery->memory = std::move(round->memory[i]);
  }
  round->collected[i] = true;
  ++round->taken;
}

NextRound PartialSteps::Answer(bool* more) {
  if (awaiting_ == nullptr) return nullptr;
  *more = over_ > step_ && (last_ < 0 || step_ < last_);  // rounds behind the last one are of the next epoch
  if (*more) return std::exchange(awaiting_, nullptr);
  if (last_ < 0 || step_ < last_) return nullptr;
  last_ = -1;
  gate_.Return();
  return std::exchange(awaiting_, nullptr);
}

void PartialSteps::AwaitRound(NextRound done) {
  bool more = false;
  NextRound answered;
  Status failure;
  {
    MutexLock lock(&mutex_);
    awaiting_ = std::move(done);
    failure = failure_;
    answered = failure.ok() ? Answer(&more) : std::exchange(awaiting_, nullptr);
  }
  if (answered != nullptr) answered(failure, more);
}

void PartialSteps::Progress(int64_t* step, int64_t* over) const {
  MutexLock lock(&mutex_);
  *step = step_;
  *over = over_;
}

bool PartialSteps::TakeArrival(int64_t* step, bool* full) {
  MutexLock lock(&mutex_);
  if (whole_ <= told_) return false;
  *step = told_ = whole_;
  *full = full_ == whole_;
  return true;
}

void PartialSteps::Open(int64_t round) {
  MutexLock lock(&mutex_);
  gate_.Open(round);
}

void PartialSteps::Came(int rank, int64_t step) {
  MutexLock lock(&mutex_);
  std::vector<double>* came = nullptr;
  const auto info = InfoFrom(step);
  if (info != infos_.end() && info->round == step) {
    came = &info->announced_s;
  } else if (step > over_ || rounds_.count(step) > 0) {
    came = &came_[step];
  }
  if (came == nullptr) return;
  came->resize(static_cast<size_t>(size_));
  (*came)[static_cast<size_t>(rank)] = NowSeconds();
}

std::deque<RoundInfo>::iterator PartialSteps::InfoFrom(int64_t round) {
  return std::lower_bound(infos_.begin(), infos_.end(), round,
                          [](const RoundInfo& info, int64_t number) { return info.round < number; });
}

int64_t PartialSteps::WaitsFor() const {
  MutexLock lock(&mutex_);
  const int64_t begun = gate_.begun();
  if (!failure_.ok() || (whole_ <= begun && awaiting_ == nullptr)) return 0;
  const bool runs = std::any_of(rounds_.begin(), rounds_.end(),
                                [begun](const auto& one) { return one.first <= begun && !one.second.over; });
  return runs ? 0 : begun + 1;
}

void PartialSteps::Leave() {
  MutexLock lock(&mutex_);
  gate_.Leave();
}

void PartialSteps::End(int64_t last, std::vector<std::function<void()>>* ended) {
  MutexLock lock(&mutex_);
  gate_.End(last);
  last_ = last;
  bool more = false;
  if (NextRound answered = Answer(&more)) ended->push_back([=] { answered(Status::Ok(), more); });
}

bool PartialSteps::AtBound() const {
  MutexLock lock(&mutex_);
  return gate_.AtBound();
}

bool PartialSteps::BeginRound(Contribution* given) {
  MutexLock lock(&mutex_);
  bool on_time = false;
  if (!failure_.ok() || !gate_.Begin(&given->round, &on_time)) return false;
  given->arrived = gate_.arrived();
  given->flags = flags_;
  // a step that was skipped has arrived without a gradient, and so has staged nothing
  Gradients newest = on_time && copied_ == tensors() ? std::exchange(staged_, nullptr) : nullptr;
  Hold(std::exchange(held_, nullptr), std::move(newest));
  given->gradients = std::exchange(held_, nullptr);
  Round& round = At(given->round);
  round.begin_s = NowSeconds();
  round.given = given->gradients;
  return true;
}

void PartialSteps::Write(const Contribution& given, int64_t tensor, char* to) const {
  if (tensor == tensors()) {
    const int64_t elements = TableElements(size_);
    std::vector<int32_t> table(static_cast<size_t>(elements));
    table[static_cast<size_t>(rank_)] = static_cast<int32_t>(given.arrived);
    table[static_cast<size_t>(size_ + rank_)] = static_cast<int32_t>(given.flags);
    std::memcpy(to, table.data(), table.size() * sizeof(int32_t));
    return;
  }
  const size_t nbytes = static_cast<size_t>(this->tensor(tensor).nbytes());
  if (given.gradients == nullptr) {
    std::memset(to, 0, nbytes);
  } else {
    std::memcpy(to, PartOf(given.gradients, tensor), nbytes);
  }
}

void PartialSteps::EndTensor(int64_t round, int64_t tensor, const Status& status, const void* data,
                             const Memory& memory, std::vector<std::function<void()>>* ended) {
  MutexLock lock(&mutex_);
  Round& found = At(round);
  found.data[static_cast<size_t>(tensor)] = data;
  found.memory[static_cast<size_t>(tensor)] = memory;
  if (!status.ok() && found.status.ok()) found.status = status;
  if (++found.ended <= tensors()) return;
  EndRound(round, &found);
  for (int64_t i = 0; i < tensors(); ++i) {
    Deliver& waiting = found.waiting[static_cast<size_t>(i)];
    if (waiting == nullptr) continue;
    Delivery delivery;
    GiveOne(&found, i, std::exchange(waiting, nullptr), &delivery);
    ended->push_back([delivery] { delivery.deliver(delivery.status, delivery.data, delivery.memory); });
  }
  if (found.taken == tensors() && step_ >= round) rounds_.erase(round);
  bool more = false;
  if (NextRound answered = Answer(&more)) ended->push_back([=] { answered(Status::Ok(), more); });
}

void PartialSteps::EndRound(int64_t number, Round* round) {
  round->over = true;
  Gradients given = std::exchange(round->given, nullptr);
  if (!round->status.ok()) return;
  over_ = std::max(over_, number);  // of two rounds under way the later one may end first
  const double now_s = NowSeconds();
  const int32_t* table = static_cast<const int32_t*>(round->data[tensors_.size()]);
  if (infos_.size() == kRoundsKept) infos_.pop_front();
  infos_.insert(InfoFrom(number),
                {number, round->begin_s, now_s, round->wait_s < 0 ? 0 : now_s - round->wait_s,
                 std::vector<int64_t>(table, table + size_),
                 std::vector<int64_t>(table + size_, table + TableElements(size_)), std::move(came_[number])});
  came_.erase(number);
  round->memory[tensors_.size()] = nullptr;
  if (given == nullptr) return;
  if (spec_.holds_again && !IsFinite(round->data)) {
    std::vector<const void*> own;
    for (int64_t i = 0; i < tensors(); ++i) own.push_back(PartOf(given, i));
    if (IsFinite(own)) {
      Hold(std::move(given), std::exchange(held_, nullptr));
      return;
    }
  }
  spare_.push_back(std::move(given));
}

bool PartialSteps::IsFinite(const std::vector<const void*>& data) const {
  for (int64_t i = 0; i < tensors(); ++i) {
    if (!AllFinite(tensor(i).dtype, data[static_cast<size_t>(i)], tensor(i).elements)) return false;
  }
  return true;
}

void PartialSteps::Fail(const Status& status, std::vector<Delivery>* ended) {
  MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = status;
  for (auto& [number, round] : rounds_) {
    for (Deliver& waiting : round.waiting) {
      if (waiting != nullptr) ended->push_back({std::exchange(waiting, nullptr), failure_, nullptr, nullptr});
    }
  }
  if (awaiting_ != nullptr) {
    ended->push_back(
        {[done = std::exchange(awaiting_, nullptr)](const Status& s, const void*, const Memory&) { done(s, false); },
         failure_, nullptr, nullptr});
  }
}

std::vector<RoundInfo> PartialSteps::Rounds(int64_t first, int64_t most) const {
  MutexLock lock(&mutex_);
  std::vector<RoundInfo> found;
  for (const RoundInfo& info : infos_) {
    if (info.round >= first && static_cast<int64_t>(found.size()) < most) found.push_back(info);
  }
  return found;
}

Status PartialSteps::ReadHeld(int64_t tensor, void* to, bool* held) const {
  HVD_EXT_RETURN_IF_ERROR(CheckTensor(tensor));
  MutexLock lock(&mutex_);
  *held = held_ != nullptr;
  const size_t nbytes = static_cast<size_t>(this->tensor(tensor).nbytes());
  if (to == nullptr) return Status::Ok();
  if (*held) {
    std::memcpy(to, PartOf(held_, tensor), nbytes);
  } else {
    std::memset(to, 0, nbytes);
  }
  return Status::Ok();
}

Status PartialSteps::WriteHeld(int64_t tensor, const void* from) {
  HVD_EXT_RETURN_IF_ERROR(CheckTensor(tensor));
  MutexLock lock(&mutex_);
  if (held_ == nullptr) {
    held_ = TakeMemory();
    std::fill(held_->begin(), held_->end(), 0);
  }
  const size_t nbytes = static_cast<size_t>(this->tensor(tensor).nbytes());
  if (nbytes > 0) std::memcpy(PartOf(held_, tensor), from, nbytes);
  return Status::Ok();
}

}  // namespace hvd_ext

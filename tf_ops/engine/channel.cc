#include "engine/channel.h"

#include <algorithm>
#include <utility>

namespace hvd_ext {
namespace {

constexpr int64_t kEarlyNbytes = 512 << 10;  // a smaller tensor is copied before a thread could begin to send it
constexpr size_t kTimesKept = 99;            // steps, besides the newest

StepTimes TimesOf(const ChannelStep& step) { return {step.number, step.begin_s, step.end_s, step.arrival_offset_s}; }

}  // namespace

Channel::Channel(std::string name, std::vector<std::string> tensor_names, std::shared_ptr<const Layout> layout,
                 int64_t lane, std::shared_ptr<StepGate> gate, Trace* trace, std::shared_ptr<Device> device,
                 bool on_device)
    : name_(std::move(name)),
      tensor_names_(std::move(tensor_names)),
      lane_(lane),
      gate_(std::move(gate)),
      trace_(trace),
      device_(std::move(device)),
      has_density_(layout->has_sparse),
      on_device_(on_device) {
  auto states = std::make_shared<BucketStates>(StatesOf(*layout));
  MutexLock lock(&mutex_);
  layout_ = std::move(layout);
  states_ = std::move(states);
}

BucketStates Channel::StatesOf(const Layout& layout) const {
  BucketStates states;
  for (int64_t i = 0; i < static_cast<int64_t>(layout.buckets.size()); ++i) {
    const Layout::Bucket& bucket = layout.bucket(i);
    std::shared_ptr<Feedback> feedback;
    if (bucket.spec.sparse) {
      const SparseSpec& spec = *bucket.spec.sparse;
      feedback = std::make_shared<Feedback>(spec, ShardOf(*bucket.plan, bucket.elements), layout.TensorBegins(i),
                                            KeepsFeedback(*device_, spec, *bucket.plan) ? device_ : HostDevice());
    }
    states.push_back({std::move(feedback)});
  }
  return states;
}

Status Channel::Switch(const std::vector<std::string>& tensor_names, std::shared_ptr<const Layout> layout) {
  auto states = std::make_shared<BucketStates>(StatesOf(*layout));
  MutexLock state_lock(&state_mutex_);
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  const std::string where = "another layout of " + Quoted(name_) + ": ";
  if (tensor_names != tensor_names_) return Invalid(where + "it must have the channel's tensors, in their order");
  for (int64_t i = 0; i < tensors(); ++i) {
    if (layout->place(i).nbytes == layout_->place(i).nbytes) continue;
    return Invalid(where + "tensor " + Quoted(NameOf(i)) + " has " + std::to_string(layout_->place(i).nbytes) +
                   " bytes, not " + std::to_string(layout->place(i).nbytes));
  }
  if (layout->has_sparse && !has_density_) {
    return Invalid(where + "it must have no sparse bucket, because the steps of this channel have no density");
  }
  if (topk_step_) return Invalid(where + "a top-k step is under way; end it first");
  layout_ = std::move(layout);
  states_ = std::move(states);
  return Status::Ok();
}

void Channel::AtStep(int64_t step, std::function<void(int64_t step)> call) {
  MutexLock lock(&mutex_);
  call_at_ = step;
  call_ = std::move(call);
}

bool Channel::HasCallBeforeStep() const {
  MutexLock lock(&mutex_);
  return call_ != nullptr && begun_ + 1 >= call_at_;
}

std::function<void(int64_t step)> Channel::TakeCallBeforeStep(int64_t* step) {
  MutexLock lock(&mutex_);
  *step = begun_ + 1;
  return begun_ + 1 >= call_at_ ? std::exchange(call_, nullptr) : nullptr;
}

std::vector<StepTimes> Channel::Times(int64_t most) const {
  MutexLock lock(&mutex_);
  std::vector<StepTimes> times(times_.begin(), times_.end());
  if (current_ != nullptr && IsComplete(*current_)) times.push_back(TimesOf(*current_));
  const int64_t kept = static_cast<int64_t>(times.size());
  times.erase(times.begin(), times.end() - std::min(kept, std::max<int64_t>(most, 0)));
  return times;
}

void Channel::Progress(int64_t* step, int64_t* over) const {
  MutexLock lock(&mutex_);
  const int64_t noted = times_.empty() ? 0 : times_.back().step;
  *step = current_ == nullptr ? noted : current_->number;
  *over = current_ != nullptr && IsComplete(*current_) ? *step : noted;
  gate_->Progress(step, over);
}

std::optional<StepPlace> Channel::Place() const {
  MutexLock lock(&mutex_);
  if (current_ == nullptr) return std::nullopt;
  StepPlace place = place_;
  place.ended = has_density_ && !topk_step_;
  return place;
}

int64_t Channel::runs() const {
  MutexLock lock(&mutex_);
  return queued_;
}

bool Channel::IsQuiet() const {
  MutexLock lock(&mutex_);
  return !failure_.ok() || std::all_of(steps_.begin(), steps_.end(),
                                       [](const auto& step) { return step.second->ended == step.second->queued; });
}

int64_t Channel::NbytesOf(int64_t tensor) const {
  MutexLock lock(&mutex_);
  return layout_->place(tensor).nbytes;
}

bool Channel::IsComplete(const ChannelStep& step) const {
  return step.here == tensors() && std::all_of(step.buckets.begin(), step.buckets.end(),
                                               [](const ChannelStep::Bucket& b) { return b.ended && b.status.ok(); });
}

bool Channel::Uses(const Plan* plan) const {
  MutexLock lock(&mutex_);
  return layout_->Uses(plan) || std::any_of(steps_.begin(), steps_.end(),
                                            [plan](const auto& step) { return step.second->layout->Uses(plan); });
}

std::string Channel::NameOfBucket(int64_t bucket, const ChannelStep& step) const {
  return "bucket " + std::to_string(bucket) + " of " + Quoted(name_) + " (step " + std::to_string(step.number) + ")";
}

std::vector<std::string> Channel::Missing(const ChannelStep& step, int64_t bucket) const {
  std::vector<std::string> names;
  for (int64_t i = 0; i < tensors(); ++i) {
    if (bucket >= 0 && step.layout->place(i).bucket != bucket) continue;
    if (step.tensors[static_cast<size_t>(i)].state != ChannelStep::Tensor::kHere) names.push_back(NameOf(i));
  }
  return names;
}

Status Channel::AbandonStep(Begun* begun) {
  const std::shared_ptr<ChannelStep> step = current_;
  begun->lost = gate_->AbandonStep(*step, &begun_);
  Status status = Invalid("a step of " + Quoted(name_) + " ended before a tensor was submitted");
  if (step->reserved > 0) {
    const std::vector<std::string> missing = Missing(*step, -1);
    status = Invalid(
        "step " + std::to_string(step->number) + " of " + Quoted(name_) + " was left half-way: " +
        std::to_string(step->here) + " of " + std::to_string(tensors()) + " tensors were submitted (" +
        NameList(missing, static_cast<int64_t>(missing.size())) + (missing.size() == 1 ? " was" : " were") + " not); " +
        (begun->lost ? "parts of it have been sent, so the ranks no longer agree: shutdown() and init() start afresh"
                     : "nothing of it has been sent, the next step starts afresh"));
  }
  if (begun->lost) {
    FailNow(Communication(status.message), &begun->ended);
    return status;
  }
  current_ = nullptr;
  EndWaiting(step.get(), status, &begun->ended);
  if (step->queued == 0) steps_.erase(step->number);
  return step->reserved > 0 ? status : Status::Ok();
}

std::shared_ptr<ChannelStep> Channel::StepOf(int64_t number, const TopKStep& topk) {
  auto found = steps_.find(number);
  if (found == steps_.end()) {
    auto step = std::make_shared<ChannelStep>(number, topk, layout_, states_, tensors());
    found = steps_.emplace(number, std::move(step)).first;
  }
  return found->second;
}

Status Channel::BeginStep(const std::optional<TopKStep>& topk, bool skips, Begun* begun) {
  MutexLock state_lock(&state_mutex_);
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  HVD_EXT_RETURN_IF_ERROR(CheckTopK(topk));
  DropOpenStep();
  if (current_ != nullptr && current_->here < tensors()) HVD_EXT_RETURN_IF_ERROR(AbandonStep(begun));
  HVD_EXT_RETURN_IF_ERROR(gate_->BeginStep(begun_ + 1, skips));
  if (current_ != nullptr && IsComplete(*current_)) {
    if (times_.size() == kTimesKept) times_.pop_front();
    times_.push_back(TimesOf(*current_));
  }
  // The last step stays, for collects that come late; older ones stay while a collect waits for them.
  auto last = steps_.upper_bound(begun_);
  if (last != steps_.begin()) --last;
  for (auto it = steps_.begin(); it != last;) {
    const auto& t = it->second->tensors;
    bool waits = std::any_of(t.begin(), t.end(), [](const ChannelStep::Tensor& x) { return x.waiting != nullptr; });
    it = waits ? std::next(it) : steps_.erase(it);
  }
  begun->step = ++begun_;
  current_ = StepOf(begun_, topk.value_or(TopKStep{}));
  current_->Begin();
  if (skips) {
    current_->reserved = current_->here = tensors();
    for (ChannelStep::Tensor& tensor : current_->tensors) tensor.state = ChannelStep::Tensor::kHere;
  }
  topk_step_ = has_density_;
  // A step that was given up before anything of it was sent begins again in the same place.
  const bool again = begun_ > 1 && place_.runs == queued_;
  StepPlace place;
  place.runs = queued_;
  place.density = current_->topk.density;
  if (current_->topk.momentum) place.momentum = *current_->topk.momentum;
  place.committed_before = again ? place_.committed_before : place_.committed;
  place_ = place;
  return Status::Ok();
}

Status Channel::CheckTensor(int64_t tensor) const {
  if (tensor >= 0 && tensor < tensors()) return Status::Ok();
  return Invalid("tensor (" + std::to_string(tensor) + ") of " + Quoted(name_) + " must be in [0, " +
                 std::to_string(tensors()) + ")");
}

Status Channel::Reserve(int64_t tensor, int64_t nbytes, BufferPool* pool, std::shared_ptr<ChannelStep>* step,
                        std::shared_ptr<Buffer>* buffer, std::shared_ptr<Arriving>* arriving) {
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  HVD_EXT_RETURN_IF_ERROR(CheckTensor(tensor));
  // A channel's tensors have one size in all its layouts.
  const Layout::Place& place = (current_ == nullptr ? layout_ : current_->layout)->place(tensor);
  const auto name = [&] { return Quoted(NameOf(tensor)) + " of " + Quoted(name_); };
  if (nbytes != place.nbytes) {
    return Invalid("tensor " + name() + " must have " + std::to_string(place.nbytes) +
                   " bytes, as registered, it has " + std::to_string(nbytes));
  }
  if (current_ == nullptr)
    return Invalid("tensor " + name() + " was submitted before the first step; begin a step first");
  if (current_->tensor(tensor).state != ChannelStep::Tensor::kMissing) {
    return Invalid("tensor " + name() + " was submitted twice in step " + std::to_string(current_->number) +
                   "; each step must submit each tensor once");
  }
  ChannelStep::Bucket& bucket = current_->bucket(place.bucket);
  const Layout::Bucket& layout = current_->layout->bucket(place.bucket);
  if (bucket.input == nullptr) {
    bucket.input = std::make_shared<Buffer>(gate_->PoolOfInputs(pool)->Take(layout.nbytes()));
    if (IsOn(trace_)) bucket.first_s = NowSeconds();
  }
  current_->tensor(tensor).state = ChannelStep::Tensor::kCopying;
  ++current_->reserved;
  *buffer = bucket.input;
  *step = current_;
  const bool last = current_->queued == place.bucket && gate_->MayStart(*current_, place.bucket, bucket.here + 1);
  if (last && nbytes >= kEarlyNbytes && !layout.spec.sparse && bucket.input->OnHost()) {
    *arriving = std::make_shared<Arriving>(bucket.input, place.offset_nbytes, place.offset_nbytes + nbytes);
    QueueNext(current_, *arriving);
  }
  return Status::Ok();
}

void Channel::QueueNext(const std::shared_ptr<ChannelStep>& step, std::shared_ptr<const Arriving> arriving) {
  const int64_t next = step->queued;
  step->bucket(next).buffer = gate_->Contribution(step.get(), next);
  ++step->queued;
  ++queued_;
  ++(*step->states)[static_cast<size_t>(next)].running;
  ready_.push_back({step, next, step->bucket(next).buffer, std::move(arriving)});
}

bool Channel::BeginRound() {
  MutexLock lock(&mutex_);
  int64_t round = 0;
  if (!failure_.ok() || !gate_->BeginRound(&round)) return false;
  const std::shared_ptr<ChannelStep> step = StepOf(round, {});
  if (step->here < tensors() && IsOn(trace_)) {  // the gate fills the buckets in place of this rank
    const double now_s = NowSeconds();
    for (int64_t i = 0; i < step->NumBuckets(); ++i) {
      const bool is_full = step->bucket(i).here == layout_->bucket(i).tensors();
      if (!is_full) trace_->Add(TraceKind::kFill, lane_, round, i, now_s, now_s);
    }
    trace_->Add(TraceKind::kSubmitted, lane_, round, 0, now_s, now_s);
  }
  while (step->queued < step->NumBuckets()) QueueNext(step, nullptr);
  return true;
}

Status Channel::Arrive(const std::shared_ptr<ChannelStep>& step, int64_t tensor, bool* ready) {
  *ready = false;
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  if (current_ != step) {
    return Invalid("tensor " + Quoted(NameOf(tensor)) + " of " + Quoted(name_) +
                   ": its step ended while it was submitted; a step must end before the next begins");
  }
  step->tensor(tensor).state = ChannelStep::Tensor::kHere;
  const double now_s = NowSeconds();
  step->arrival_offset_s[static_cast<size_t>(tensor)] = now_s - step->begin_s;
  ++step->here;
  const Layout& layout = *step->layout;
  int64_t filled = layout.place(tensor).bucket;
  ChannelStep::Bucket& bucket = step->bucket(filled);
  ++bucket.here;
  const bool late = step->queued > filled && bucket.input != nullptr;  // the step's round is recorded without it
  if (IsOn(trace_) && !late) {
    bool is_full = bucket.here == layout.bucket(filled).tensors();
    if (is_full && bucket.first_s >= 0)
      trace_->Add(TraceKind::kFill, lane_, step->number, filled, bucket.first_s, now_s);
    if (step->here == tensors()) {
      trace_->Add(TraceKind::kSubmitted, lane_, step->number, 0, now_s, now_s);
    }
  }
  if (step->here == tensors()) *ready = gate_->Arrive(step.get());
  while (step->queued < step->NumBuckets() && gate_->MayStart(*step, step->queued, step->bucket(step->queued).here)) {
    QueueNext(step, nullptr);
    *ready = true;
  }
  return Status::Ok();
}

bool Channel::TakeReady(Ready* ready) {
  MutexLock lock(&mutex_);
  if (ready_.empty()) return false;
  *ready = std::move(ready_.front());
  ready_.pop_front();
  return true;
}

bool Channel::Collect(int64_t tensor, int64_t ticket, Deliver deliver, Delivery* delivery) {
  MutexLock lock(&mutex_);
  delivery->status = CheckTensor(tensor);
  if (auto given = given_.find(tensor); given != given_.end()) {
    *delivery = {std::move(deliver), Status::Ok(), given->second->data(), given->second};
    given_.erase(given);
    return true;
  }
  const auto found = steps_.find(ticket);
  if (delivery->status.ok() && found == steps_.end()) {
    delivery->status = !failure_.ok() ? failure_
                                      : Invalid("collect of " + Quoted(NameOf(tensor)) + " of " + Quoted(name_) +
                                                ": step " + std::to_string(ticket) +
                                                " is not under way; collect a step before the next but one begins");
  }
  if (!delivery->status.ok()) {
    delivery->deliver = std::move(deliver);
    return true;
  }
  ChannelStep* step = found->second.get();
  ChannelStep::Tensor& entry = step->tensor(tensor);
  const ChannelStep::Bucket& bucket = step->bucket(step->layout->place(tensor).bucket);
  if (entry.collected || entry.waiting != nullptr) {
    delivery->status = Invalid("tensor " + Quoted(NameOf(tensor)) + " of " + Quoted(name_) +
                               " was collected twice in step " + std::to_string(ticket));
    delivery->deliver = std::move(deliver);
    return true;
  }
  if (!bucket.ended && failure_.ok()) {
    entry.waiting = std::move(deliver);
    if (step->waiting++ == 0) step->wait_s = NowSeconds();
    return false;
  }
  EndOne(step, tensor, std::move(deliver), delivery);
  return true;
}

Status Channel::GiveResult(int64_t tensor, const void* data, int64_t nbytes) {
  MutexLock lock(&mutex_);
  HVD_EXT_RETURN_IF_ERROR(CheckTensor(tensor));
  const int64_t wanted = layout_->place(tensor).nbytes;
  if (nbytes != wanted) {
    return Invalid("result of " + Quoted(NameOf(tensor)) + " of " + Quoted(name_) + " must have " +
                   std::to_string(wanted) + " bytes, it has " + std::to_string(nbytes));
  }
  const char* bytes = static_cast<const char*>(data);
  given_[tensor] = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
  return Status::Ok();
}

void Channel::EndOne(ChannelStep* step, int64_t tensor, Deliver deliver, Delivery* delivery) {
  const Layout::Place& place = step->layout->place(tensor);
  ChannelStep::Bucket& bucket = step->bucket(place.bucket);
  delivery->deliver = std::move(deliver);
  delivery->status = bucket.ended ? bucket.status : failure_;
  step->tensor(tensor).collected = true;
  ++bucket.collected;
  if (delivery->status.ok()) {
    delivery->memory = bucket.buffer;
    delivery->data = bucket.buffer->data() + place.offset_nbytes;
  }
  if (bucket.ended && bucket.collected == step->layout->bucket(place.bucket).tensors()) bucket.buffer.reset();
}

int64_t Channel::EndRun(ChannelStep* step, int64_t bucket, const Status& status, std::shared_ptr<Buffer> result,
                        std::vector<Delivery>* ended) {
  MutexLock lock(&mutex_);
  step->bucket(bucket).buffer = std::move(result);
  step->bucket(bucket).status = status;
  ++step->ended;
  step->end_s = NowSeconds();
  --(*step->states)[static_cast<size_t>(bucket)].running;
  auto [next, last] = gate_->EndRun(step, bucket, ended);
  int64_t count = 0;
  for (; next < last; ++next) {
    step->bucket(next).ended = true;
    for (int64_t tensor : step->layout->bucket(next).spec.tensors) {
      Deliver& waiting = step->tensor(tensor).waiting;
      if (waiting == nullptr) continue;
      Delivery delivery;
      EndOne(step, tensor, std::exchange(waiting, nullptr), &delivery);
      ended->push_back(std::move(delivery));
      ++count;
    }
  }
  return count;
}

void Channel::Delivered(ChannelStep* step, int64_t count) {
  MutexLock lock(&mutex_);
  NoteDelivered(step, count);
}

void Channel::NoteDelivered(ChannelStep* step, int64_t count) {
  step->waiting -= count;
  if (step->waiting > 0 || step->wait_s < 0) return;
  if (IsOn(trace_)) trace_->Add(TraceKind::kWait, lane_, step->number, 0, step->wait_s, NowSeconds());
  step->wait_s = -1;
}

void Channel::EndWaiting(ChannelStep* step, const Status& status, std::vector<Delivery>* ended) {
  for (ChannelStep::Tensor& tensor : step->tensors) {
    if (tensor.waiting == nullptr) continue;
    ended->push_back({std::exchange(tensor.waiting, nullptr), status, nullptr, nullptr});
    NoteDelivered(step, 1);
  }
}

void Channel::Fail(const Status& status, std::vector<Delivery>* ended) {
  MutexLock lock(&mutex_);
  FailNow(status, ended);
}

void Channel::FailNow(const Status& status, std::vector<Delivery>* ended) {
  if (failure_.ok()) failure_ = status;
  for (const auto& [number, step] : steps_) EndWaiting(step.get(), failure_, ended);
  gate_->Fail(failure_, ended);
}

LaneReport Channel::Report() const {
  LaneReport report;
  MutexLock lock(&mutex_);
  report.runs = queued_;
  report.state = gate_->StateOf(current_ != nullptr && current_->here < tensors());
  if (report.state != LaneReport::kOpen) return report;
  report.names = Missing(*current_, current_->queued);
  report.missing = static_cast<int64_t>(report.names.size());
  if (report.names.size() > kNamesShown) report.names.resize(kNamesShown);
  return report;
}

}  // namespace hvd_ext

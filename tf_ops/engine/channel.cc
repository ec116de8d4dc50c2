#include "engine/channel.h"

#include <algorithm>
#include <utility>

namespace hvd_ext {
namespace {

constexpr int64_t kEarlyNbytes = 512 << 10;  // a smaller tensor is copied before a thread could begin to send it
constexpr size_t kTimesKept = 99;            // steps, besides the newest

}  // namespace

Channel::Channel(std::string name, std::vector<std::string> tensor_names, std::shared_ptr<const Layout> layout,
                 int64_t lane, Trace* trace, std::shared_ptr<PartialSteps> partial)
    : name_(std::move(name)),
      tensor_names_(std::move(tensor_names)),
      lane_(lane),
      trace_(trace),
      partial_(std::move(partial)),
      has_density_(layout->has_sparse) {
  auto states = std::make_shared<BucketStates>(StatesOf(*layout));
  MutexLock lock(&mutex_);
  layout_ = std::move(layout);
  states_ = std::move(states);
}

Channel::BucketStates Channel::StatesOf(const Layout& layout) {
  BucketStates states;
  for (int64_t i = 0; i < static_cast<int64_t>(layout.buckets.size()); ++i) {
    const Layout::Bucket& bucket = layout.bucket(i);
    std::shared_ptr<Feedback> feedback;
    if (bucket.spec.sparse) {
      feedback = std::make_shared<Feedback>(*bucket.spec.sparse, ShardOf(*bucket.plan, bucket.elements),
                                            layout.TensorBegins(i));
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
  return call_ != nullptr && next_step_ >= call_at_;
}

std::function<void(int64_t step)> Channel::TakeCallBeforeStep(int64_t* step) {
  MutexLock lock(&mutex_);
  *step = next_step_;
  return next_step_ >= call_at_ ? std::exchange(call_, nullptr) : nullptr;
}

std::vector<StepTimes> Channel::Times(int64_t most) const {
  MutexLock lock(&mutex_);
  std::vector<StepTimes> times(times_.begin(), times_.end());
  if (!steps_.empty() && IsComplete(*steps_.back())) {
    const ChannelStep& last = *steps_.back();
    times.push_back({last.number, last.begin_s, last.end_s, last.arrival_offset_s});
  }
  const int64_t kept = static_cast<int64_t>(times.size());
  times.erase(times.begin(), times.end() - std::min(kept, std::max<int64_t>(most, 0)));
  return times;
}

void Channel::Progress(int64_t* step, int64_t* over) const {
  MutexLock lock(&mutex_);
  *step = steps_.empty() ? 0 : steps_.back()->number;
  *over = !steps_.empty() && IsComplete(*steps_.back()) ? *step : times_.empty() ? 0 : times_.back().step;
}

bool Channel::IsComplete(const ChannelStep& step) const {
  return step.here == tensors() && std::all_of(step.buckets.begin(), step.buckets.end(),
                                               [](const ChannelStep::Bucket& b) { return b.ended && b.status.ok(); });
}

bool Channel::Uses(const Plan* plan) const {
  MutexLock lock(&mutex_);
  return layout_->Uses(plan) ||
         std::any_of(steps_.begin(), steps_.end(), [plan](const auto& step) { return step->layout->Uses(plan); });
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

Status Channel::HalfWay(const ChannelStep& step) const {
  std::vector<std::string> missing = Missing(step, -1);
  return Invalid("step " + std::to_string(step.number) + " of " + Quoted(name_) +
                 " was left half-way: " + std::to_string(step.here) + " of " + std::to_string(tensors()) +
                 " tensors were submitted (" + NameList(missing, static_cast<int64_t>(missing.size())) +
                 (missing.size() == 1 ? " was" : " were") + " not)");
}

Status Channel::BeginStep(const std::optional<TopKStep>& topk, std::vector<Delivery>* ended, bool* lost) {
  *lost = false;
  MutexLock state_lock(&state_mutex_);
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  HVD_EXT_RETURN_IF_ERROR(CheckTopK(topk));
  DropOpenStep();
  if (!steps_.empty() && steps_.back()->reserved == 0 && tensors() > 0) {
    EndWaiting(steps_.back().get(), Invalid("a step of " + Quoted(name_) + " ended before a tensor was submitted"),
               ended);
    steps_.pop_back();
  } else if (!steps_.empty() && steps_.back()->here < tensors()) {
    Status status = HalfWay(*steps_.back());
    *lost = steps_.back()->queued > 0;
    status.message +=
        *lost ? "; parts of it have been sent, so the ranks no longer agree: shutdown() and init() start afresh"
              : "; nothing of it has been sent, the next step starts afresh";
    if (*lost) {
      FailNow(Communication(status.message), ended);
      return status;
    }
    EndWaiting(steps_.back().get(), status, ended);
    steps_.pop_back();
    return status;
  }
  if (!steps_.empty() && IsComplete(*steps_.back())) {
    const ChannelStep& last = *steps_.back();
    if (times_.size() == kTimesKept) times_.pop_front();
    times_.push_back({last.number, last.begin_s, last.end_s, last.arrival_offset_s});
  }
  // The last step stays, for collects that come late; older ones stay while a collect waits for them.
  for (size_t i = 0; i + 1 < steps_.size();) {
    const auto& t = steps_[i]->tensors;
    bool waits = std::any_of(t.begin(), t.end(), [](const ChannelStep::Tensor& x) { return x.waiting != nullptr; });
    if (waits) {
      ++i;
    } else {
      steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  steps_.push_back(std::make_shared<ChannelStep>(next_step_++, topk.value_or(TopKStep{}), layout_, states_));
  topk_step_ = has_density_;
  return Status::Ok();
}

Status Channel::CheckTensor(int64_t tensor) const {
  if (tensor >= 0 && tensor < tensors()) return Status::Ok();
  return Invalid("tensor (" + std::to_string(tensor) + ") of " + Quoted(name_) + " must be in [0, " +
                 std::to_string(tensors()) + ")");
}

Status Channel::Reserve(int64_t tensor, int64_t nbytes, BufferPool* pool, std::shared_ptr<ChannelStep>* step, char** to,
                        std::shared_ptr<Arriving>* arriving) {
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  HVD_EXT_RETURN_IF_ERROR(CheckTensor(tensor));
  // A channel's tensors have one size in all its layouts.
  const Layout::Place& place = (steps_.empty() ? layout_ : steps_.back()->layout)->place(tensor);
  const auto name = [&] { return Quoted(NameOf(tensor)) + " of " + Quoted(name_); };
  if (nbytes != place.nbytes) {
    return Invalid("tensor " + name() + " must have " + std::to_string(place.nbytes) +
                   " bytes, as registered, it has " + std::to_string(nbytes));
  }
  if (steps_.empty()) return Invalid("tensor " + name() + " was submitted before the first step; begin a step first");
  ChannelStep* current = steps_.back().get();
  if (current->tensor(tensor).state != ChannelStep::Tensor::kMissing) {
    return Invalid("tensor " + name() + " was submitted twice in step " + std::to_string(current->number) +
                   "; each step must submit each tensor once");
  }
  ChannelStep::Bucket& bucket = current->bucket(place.bucket);
  if (bucket.buffer == nullptr) {
    const Layout::Bucket& layout = current->layout->bucket(place.bucket);
    const int64_t nbytes_each = static_cast<int64_t>(SizeOf(layout.spec.dtype));
    bucket.buffer = std::make_shared<Buffer>(pool->Take(layout.elements * nbytes_each));
    if (IsOn(trace_)) bucket.first_s = NowSeconds();
  }
  current->tensor(tensor).state = ChannelStep::Tensor::kCopying;
  ++current->reserved;
  *to = bucket.buffer->data() + place.offset_nbytes;
  *step = steps_.back();
  const Layout::Bucket& layout = current->layout->bucket(place.bucket);
  const bool last = current->queued == place.bucket && bucket.here + 1 == layout.tensors();
  if (last && nbytes >= kEarlyNbytes && !layout.spec.sparse && pool->OnHost()) {
    *arriving = std::make_shared<Arriving>(bucket.buffer, place.offset_nbytes, place.offset_nbytes + nbytes);
    QueueNext(*step, *arriving);
  }
  return Status::Ok();
}

void Channel::QueueNext(const std::shared_ptr<ChannelStep>& step, std::shared_ptr<const Arriving> arriving) {
  const int64_t next = step->queued++;
  ++queued_;
  ++(*step->states)[static_cast<size_t>(next)].running;
  full_.push_back({step, next, step->bucket(next).buffer, std::move(arriving), step->bucket(next).input});
}

Status Channel::Arrive(const std::shared_ptr<ChannelStep>& step, int64_t tensor, int64_t input, int64_t* full) {
  *full = 0;
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  if (steps_.empty() || steps_.back() != step) {
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
  bucket.input = std::max(bucket.input, input);
  if (IsOn(trace_)) {
    bool is_full = bucket.here == layout.bucket(filled).tensors();
    if (is_full && bucket.first_s >= 0)
      trace_->Add(TraceKind::kFill, lane_, step->number, filled, bucket.first_s, now_s);
    if (step->here == tensors()) {
      trace_->Add(TraceKind::kSubmitted, lane_, step->number, 0, now_s, now_s);
    }
  }
  while (step->queued < static_cast<int64_t>(step->buckets.size())) {
    const int64_t next = step->queued;
    if (step->bucket(next).here < layout.bucket(next).tensors()) break;
    QueueNext(step, nullptr);
    ++*full;
  }
  return Status::Ok();
}

Channel::FullBucket Channel::TakeFull() {
  MutexLock lock(&mutex_);
  FullBucket first = std::move(full_.front());
  full_.pop_front();
  return first;
}

ChannelStep* Channel::Find(int64_t ticket) const {
  for (const auto& step : steps_) {
    if (step->number == ticket) return step.get();
  }
  return nullptr;
}

bool Channel::Collect(int64_t tensor, int64_t ticket, Deliver deliver, Delivery* delivery) {
  MutexLock lock(&mutex_);
  delivery->status = CheckTensor(tensor);
  if (auto given = given_.find(tensor); given != given_.end()) {
    *delivery = {std::move(deliver), Status::Ok(), given->second->data(), given->second};
    given_.erase(given);
    return true;
  }
  ChannelStep* step = delivery->status.ok() ? Find(ticket) : nullptr;
  if (delivery->status.ok() && step == nullptr) {
    delivery->status = !failure_.ok() ? failure_
                                      : Invalid("collect of " + Quoted(NameOf(tensor)) + " of " + Quoted(name_) +
                                                ": step " + std::to_string(ticket) +
                                                " is not under way; collect a step before the next but one begins");
  }
  if (!delivery->status.ok()) {
    delivery->deliver = std::move(deliver);
    return true;
  }
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
    if (step->waiting++ == 0 && IsOn(trace_)) step->wait_s = NowSeconds();
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

void Channel::EndBucket(ChannelStep* step, int64_t bucket, const Status& status, std::shared_ptr<Buffer> result,
                        std::vector<Delivery>* ended) {
  MutexLock lock(&mutex_);
  ChannelStep::Bucket& entry = step->bucket(bucket);
  entry.buffer = std::move(result);
  entry.ended = true;
  entry.status = status;
  step->end_s = NowSeconds();
  --(*step->states)[static_cast<size_t>(bucket)].running;
  for (int64_t tensor : step->layout->bucket(bucket).spec.tensors) {
    Deliver& waiting = step->tensor(tensor).waiting;
    if (waiting == nullptr) continue;
    Delivery delivery;
    EndOne(step, tensor, std::exchange(waiting, nullptr), &delivery);
    ended->push_back(std::move(delivery));
  }
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
  if (partial_ != nullptr) partial_->Fail(status, ended);
  MutexLock lock(&mutex_);
  FailNow(status, ended);
}

void Channel::FailNow(const Status& status, std::vector<Delivery>* ended) {
  if (failure_.ok()) failure_ = status;
  for (const auto& step : steps_) EndWaiting(step.get(), failure_, ended);
}

LaneReport Channel::Report() const {
  LaneReport report;
  MutexLock lock(&mutex_);
  report.runs = queued_;
  bool under_way = !steps_.empty() && steps_.back()->here < tensors();
  report.state = under_way ? LaneReport::kOpen : LaneReport::kNotBegun;
  if (!under_way && partial_ != nullptr && partial_->AtBound()) report.state = LaneReport::kAtBound;
  if (!under_way) return report;
  report.names = Missing(*steps_.back(), steps_.back()->queued);
  report.missing = static_cast<int64_t>(report.names.size());
  if (report.names.size() > kNamesShown) report.names.resize(kNamesShown);
  return report;
}

}  // namespace hvd_ext

#include "engine/channel.h"

#include <algorithm>
#include <utility>

namespace hvd_ext {
namespace {

std::string Quoted(const std::string& text) { return "'" + text + "'"; }

}  // namespace

Status Channel::Check(const ChannelSpec& spec) {
  std::string name = "channel " + Quoted(spec.name) + ": ";
  if (spec.tensor_names.size() != spec.elements.size()) {
    return Invalid(name + "it must have as many tensor names (" + std::to_string(spec.tensor_names.size()) +
                   ") as tensor sizes (" + std::to_string(spec.elements.size()) + ")");
  }
  std::vector<int> uses(spec.elements.size());
  for (size_t i = 0; i < spec.buckets.size(); ++i) {
    const BucketSpec& bucket = spec.buckets[i];
    std::string where = name + "bucket " + std::to_string(i);
    if (SizeOf(bucket.dtype) == 0 || bucket.dtype == DType::kBytes) {
      return Invalid(where + ": dtype (" + std::to_string(static_cast<int>(bucket.dtype)) +
                     ") must be one that can be summed");
    }
    if (bucket.op != ReduceOp::kSum && bucket.op != ReduceOp::kAverage) {
      return Invalid(where + ": op (" + std::to_string(static_cast<int>(bucket.op)) +
                     ") must be sum (0) or average (1)");
    }
    HVD_EXT_RETURN_IF_ERROR(CheckWire(where + ": ", bucket.dtype, bucket.wire));
    if (bucket.tensors.empty()) return Invalid(where + ": it must hold a tensor");
    int64_t elements = 0;
    for (int64_t tensor : bucket.tensors) {
      if (tensor < 0 || tensor >= static_cast<int64_t>(uses.size())) {
        return Invalid(where + ": tensor (" + std::to_string(tensor) + ") must be in [0, " +
                       std::to_string(uses.size()) + ")");
      }
      ++uses[static_cast<size_t>(tensor)];
      elements += std::max<int64_t>(0, spec.elements[static_cast<size_t>(tensor)]);
    }
    if (bucket.sparse) HVD_EXT_RETURN_IF_ERROR(CheckSparse(where, bucket, elements));
  }
  for (size_t i = 0; i < uses.size(); ++i) {
    std::string tensor = name + "tensor " + Quoted(spec.tensor_names[i]);
    if (uses[i] != 1) return Invalid(tensor + " must be in exactly one bucket, it is in " + std::to_string(uses[i]));
    if (spec.elements[i] < 0)
      return Invalid(tensor + ": elements (" + std::to_string(spec.elements[i]) + ") must not be negative");
  }
  return Status::Ok();
}

Channel::Channel(ChannelSpec spec, int64_t lane, std::vector<std::shared_ptr<const Plan>> plans,
                 std::vector<std::shared_ptr<const Plan>> dense_plans, Trace* trace)
    : spec_(std::move(spec)),
      lane_(lane),
      trace_(trace),
      plans_(std::move(plans)),
      dense_plans_(std::move(dense_plans)),
      feedback_(spec_.buckets.size()),
      running_(spec_.buckets.size()) {
  places_.resize(spec_.elements.size());
  for (size_t i = 0; i < spec_.buckets.size(); ++i) {
    int64_t nbytes_each = static_cast<int64_t>(SizeOf(spec_.buckets[i].dtype));
    int64_t elements = 0;
    std::vector<int64_t> begins;
    for (int64_t tensor : spec_.buckets[i].tensors) {
      int64_t tensor_elements = spec_.elements[static_cast<size_t>(tensor)];
      places_[static_cast<size_t>(tensor)] = {static_cast<int64_t>(i), elements * nbytes_each,
                                              tensor_elements * nbytes_each};
      begins.push_back(elements);
      elements += tensor_elements;
    }
    bucket_elements_.push_back(elements);
    if (!spec_.buckets[i].sparse) continue;
    has_sparse_ = true;
    feedback_[i] = std::make_shared<Feedback>(*spec_.buckets[i].sparse, ShardOf(*plans_[i], elements), begins);
  }
}

bool Channel::uses(const Plan* plan) const {
  auto is_it = [plan](const auto& p) { return p.get() == plan; };
  return std::any_of(plans_.begin(), plans_.end(), is_it) ||
         std::any_of(dense_plans_.begin(), dense_plans_.end(), is_it);
}

std::string Channel::NameOfBucket(int64_t bucket, const ChannelStep& step) const {
  return "bucket " + std::to_string(bucket) + " of " + Quoted(spec_.name) + " (step " + std::to_string(step.number) +
         ")";
}

std::vector<std::string> Channel::Missing(const ChannelStep& step, int64_t bucket) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (bucket >= 0 && places_[i].bucket != bucket) continue;
    if (step.tensors[i].state != ChannelStep::Tensor::kHere) names.push_back(spec_.tensor_names[i]);
  }
  return names;
}

Status Channel::HalfWay(const ChannelStep& step) const {
  std::vector<std::string> missing = Missing(step, -1);
  return Invalid("step " + std::to_string(step.number) + " of " + Quoted(spec_.name) +
                 " was left half-way: " + std::to_string(step.here) + " of " + std::to_string(places_.size()) +
                 " tensors were submitted (" + NameList(missing, static_cast<int64_t>(missing.size())) +
                 (missing.size() == 1 ? " was" : " were") + " not)");
}

Status Channel::BeginStep(std::optional<double> density, std::vector<Delivery>* ended, bool* lost) {
  *lost = false;
  if (!failure_.ok()) return failure_;
  HVD_EXT_RETURN_IF_ERROR(CheckDensity(density));
  DropOpenStep();
  int64_t tensors = static_cast<int64_t>(places_.size());
  if (!steps_.empty() && steps_.back()->reserved == 0 && tensors > 0) {
    EndWaiting(steps_.back().get(), Invalid("a step of " + Quoted(spec_.name) + " ended before a tensor was submitted"),
               ended);
    steps_.pop_back();
  } else if (!steps_.empty() && steps_.back()->here < tensors) {
    Status status = HalfWay(*steps_.back());
    *lost = steps_.back()->queued > 0;
    status.message +=
        *lost ? "; parts of it have been sent, so the ranks no longer agree: shutdown() and init() start afresh"
              : "; nothing of it has been sent, the next step starts afresh";
    if (*lost) return status;  // the lane's failure ends the collects
    EndWaiting(steps_.back().get(), status, ended);
    steps_.pop_back();
    return status;
  }
  // The last step stays until the next one is complete, for collects that come late; older ones while somebody waits.
  for (size_t i = 0; i + 1 < steps_.size();) {
    const auto& t = steps_[i]->tensors;
    bool waits = std::any_of(t.begin(), t.end(), [](const ChannelStep::Tensor& x) { return x.waiting != nullptr; });
    if (waits) {
      ++i;
    } else {
      steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  auto step = std::make_shared<ChannelStep>();
  step->number = next_step_++;
  step->density = density.value_or(1);
  sparse_step_ = has_sparse_;
  step->tensors.resize(places_.size());
  step->buckets.resize(spec_.buckets.size());
  steps_.push_back(std::move(step));
  return Status::Ok();
}

Status Channel::CheckTensor(int64_t tensor) const {
  if (tensor >= 0 && tensor < static_cast<int64_t>(places_.size())) return Status::Ok();
  return Invalid("tensor (" + std::to_string(tensor) + ") of " + Quoted(spec_.name) + " must be in [0, " +
                 std::to_string(places_.size()) + ")");
}

Status Channel::Reserve(int64_t tensor, int64_t nbytes, BufferPool* pool, std::shared_ptr<ChannelStep>* step,
                        char** to) {
  if (!failure_.ok()) return failure_;
  HVD_EXT_RETURN_IF_ERROR(CheckTensor(tensor));
  const Place& place = places_[static_cast<size_t>(tensor)];
  std::string name = Quoted(spec_.tensor_names[static_cast<size_t>(tensor)]) + " of " + Quoted(spec_.name);
  if (nbytes != place.nbytes) {
    return Invalid("tensor " + name + " must have " + std::to_string(place.nbytes) + " bytes, as registered, it has " +
                   std::to_string(nbytes));
  }
  if (steps_.empty()) return Invalid("tensor " + name + " was submitted before the first step; begin a step first");
  ChannelStep* current = steps_.back().get();
  if (current->tensors[static_cast<size_t>(tensor)].state != ChannelStep::Tensor::kMissing) {
    return Invalid("tensor " + name + " was submitted twice in step " + std::to_string(current->number) +
                   "; each step must submit each tensor once");
  }
  ChannelStep::Bucket& bucket = current->buckets[static_cast<size_t>(place.bucket)];
  if (bucket.buffer == nullptr) {
    int64_t nbytes_each = static_cast<int64_t>(SizeOf(spec_.buckets[static_cast<size_t>(place.bucket)].dtype));
    bucket.buffer = std::make_shared<Buffer>(pool->Take(bucket_elements(place.bucket) * nbytes_each));
    if (IsOn(trace_)) bucket.first_s = NowSeconds();
  }
  current->tensors[static_cast<size_t>(tensor)].state = ChannelStep::Tensor::kCopying;
  ++current->reserved;
  *to = bucket.buffer->data() + place.offset_nbytes;
  *step = steps_.back();
  return Status::Ok();
}

Status Channel::Arrive(const std::shared_ptr<ChannelStep>& step, int64_t tensor, std::vector<int64_t>* full) {
  if (!failure_.ok()) return failure_;
  if (steps_.empty() || steps_.back() != step) {
    return Invalid("tensor " + Quoted(spec_.tensor_names[static_cast<size_t>(tensor)]) + " of " + Quoted(spec_.name) +
                   ": its step ended while it was submitted; a step must end before the next begins");
  }
  step->tensors[static_cast<size_t>(tensor)].state = ChannelStep::Tensor::kHere;
  ++step->here;
  int64_t filled = places_[static_cast<size_t>(tensor)].bucket;
  ChannelStep::Bucket& bucket = step->buckets[static_cast<size_t>(filled)];
  ++bucket.here;
  if (IsOn(trace_)) {
    double now_s = NowSeconds();
    bool is_full = bucket.here == static_cast<int64_t>(spec_.buckets[static_cast<size_t>(filled)].tensors.size());
    if (is_full && bucket.first_s >= 0)
      trace_->Add(TraceKind::kFill, lane_, step->number, filled, bucket.first_s, now_s);
    if (step->here == static_cast<int64_t>(places_.size())) {
      trace_->Add(TraceKind::kSubmitted, lane_, step->number, 0, now_s, now_s);
    }
  }
  while (step->queued < static_cast<int64_t>(step->buckets.size())) {
    size_t next = static_cast<size_t>(step->queued);
    if (step->buckets[next].here < static_cast<int64_t>(spec_.buckets[next].tensors.size())) break;
    full->push_back(step->queued);
    ++running_[next];
    ++step->queued;
    ++queued_;
  }
  return Status::Ok();
}

ChannelStep* Channel::Find(int64_t ticket) const {
  for (const auto& step : steps_) {
    if (step->number == ticket) return step.get();
  }
  return nullptr;
}

bool Channel::Collect(int64_t tensor, int64_t ticket, Deliver deliver, Delivery* delivery) {
  delivery->status = CheckTensor(tensor);
  ChannelStep* step = delivery->status.ok() ? Find(ticket) : nullptr;
  if (delivery->status.ok() && step == nullptr) {
    delivery->status = !failure_.ok()
                           ? failure_
                           : Invalid("collect of " + Quoted(spec_.tensor_names[static_cast<size_t>(tensor)]) + " of " +
                                     Quoted(spec_.name) + ": step " + std::to_string(ticket) +
                                     " is not under way; collect a step before the next but one begins");
  }
  if (!delivery->status.ok()) {
    delivery->deliver = std::move(deliver);
    return true;
  }
  ChannelStep::Tensor& entry = step->tensors[static_cast<size_t>(tensor)];
  const ChannelStep::Bucket& bucket = step->buckets[static_cast<size_t>(places_[static_cast<size_t>(tensor)].bucket)];
  if (entry.collected || entry.waiting != nullptr) {
    delivery->status = Invalid("tensor " + Quoted(spec_.tensor_names[static_cast<size_t>(tensor)]) + " of " +
                               Quoted(spec_.name) + " was collected twice in step " + std::to_string(ticket));
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

void Channel::EndOne(ChannelStep* step, int64_t tensor, Deliver deliver, Delivery* delivery) {
  const Place& place = places_[static_cast<size_t>(tensor)];
  ChannelStep::Bucket& bucket = step->buckets[static_cast<size_t>(place.bucket)];
  delivery->deliver = std::move(deliver);
  delivery->status = bucket.ended ? bucket.status : failure_;
  step->tensors[static_cast<size_t>(tensor)].collected = true;
  ++bucket.collected;
  if (delivery->status.ok()) {
    delivery->buffer = bucket.buffer;
    delivery->data = bucket.buffer->data() + place.offset_nbytes;
  }
  int64_t all = static_cast<int64_t>(spec_.buckets[static_cast<size_t>(place.bucket)].tensors.size());
  if (bucket.ended && bucket.collected == all) bucket.buffer.reset();
}

void Channel::EndBucket(ChannelStep* step, int64_t bucket, const Status& status, std::vector<Delivery>* ended) {
  ChannelStep::Bucket& entry = step->buckets[static_cast<size_t>(bucket)];
  entry.ended = true;
  entry.status = status;
  --running_[static_cast<size_t>(bucket)];
  for (int64_t tensor : spec_.buckets[static_cast<size_t>(bucket)].tensors) {
    Deliver& waiting = step->tensors[static_cast<size_t>(tensor)].waiting;
    if (waiting == nullptr) continue;
    Delivery delivery;
    EndOne(step, tensor, std::exchange(waiting, nullptr), &delivery);
    ended->push_back(std::move(delivery));
  }
}

void Channel::Delivered(ChannelStep* step, int64_t count) {
  step->waiting -= count;
  if (step->waiting > 0 || step->wait_s < 0) return;
  if (IsOn(trace_)) trace_->Add(TraceKind::kWait, lane_, step->number, 0, step->wait_s, NowSeconds());
  step->wait_s = -1;
}

void Channel::EndWaiting(ChannelStep* step, const Status& status, std::vector<Delivery>* ended) {
  for (ChannelStep::Tensor& tensor : step->tensors) {
    if (tensor.waiting == nullptr) continue;
    ended->push_back({std::exchange(tensor.waiting, nullptr), status, nullptr, nullptr});
    Delivered(step, 1);
  }
}

void Channel::Fail(const Status& status, std::vector<Delivery>* ended) {
  if (failure_.ok()) failure_ = status;
  for (const auto& step : steps_) EndWaiting(step.get(), failure_, ended);
}

LaneReport Channel::Report() const {
  LaneReport report;
  report.answered = true;
  report.runs = queued_;
  bool under_way = !steps_.empty() && steps_.back()->here < static_cast<int64_t>(places_.size());
  report.state = under_way ? LaneReport::kOpen : LaneReport::kNotBegun;
  if (!under_way) return report;
  report.names = Missing(*steps_.back(), steps_.back()->queued);
  report.missing = static_cast<int64_t>(report.names.size());
  if (report.names.size() > kNamesShown) report.names.resize(kNamesShown);
  return report;
}

}  // namespace hvd_ext

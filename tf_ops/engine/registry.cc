#include "engine/registry.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "engine/coordinator.h"
#include "engine/executor.h"
#include "engine/partial_gate.h"

namespace hvd_ext {

Status Registry::UsableNow() const {
  if (inbox_->stopping()) return Stopped("the engine has been shut down; call init() first");
  return failure_;
}

Status Registry::Usable() const {
  MutexLock lock(&mutex_);
  return UsableNow();
}

Status Registry::UsableForCall(const CallTerms& call) const {
  MutexLock lock(&mutex_);
  HVD_EXT_RETURN_IF_ERROR(UsableNow());
  return left_ < 0 ? Status::Ok() : Communication(NameOfCall(call) + ": " + core_->HasLeft(left_));
}

Status Registry::PlanOf(int64_t handle, std::shared_ptr<const Plan>* plan) const {
  int64_t index = handle - HandleOf(0);
  if (handle >> 32 != core_->generation) return OfStopped("plan", handle);
  if (index >= static_cast<int64_t>(plans_.size()) || plans_[static_cast<size_t>(index)] == nullptr) {
    return Invalid("plan (" + std::to_string(handle) + ") was never added, or has been removed");
  }
  *plan = plans_[static_cast<size_t>(index)];
  return Status::Ok();
}

Status Registry::ChannelOf(int64_t handle, std::shared_ptr<Channel>* channel) const {
  int64_t index = handle - HandleOf(0);
  if (handle >> 32 != core_->generation) return OfStopped("channel", handle);
  if (index >= static_cast<int64_t>(channels_.size())) {
    return Invalid("channel (" + std::to_string(handle) + ") was never opened");
  }
  *channel = channels_[static_cast<size_t>(index)];
  return *channel != nullptr ? Status::Ok() : Stopped("channel (" + std::to_string(handle) + ") has been closed");
}

std::shared_ptr<Channel> Registry::OfLane(int64_t lane) const {
  bool open = lane > kCallsLane && lane <= static_cast<int64_t>(channels_.size());
  return open ? channels_[static_cast<size_t>(lane - 1)] : nullptr;
}

Status Registry::AddPlan(std::shared_ptr<const Plan> plan, int64_t* handle) {
  MutexLock lock(&mutex_);
  HVD_EXT_RETURN_IF_ERROR(UsableNow());
  *handle = HandleOf(plans_.size());
  plans_.push_back(std::move(plan));
  return Status::Ok();
}

Status Registry::RemovePlan(int64_t handle) {
  MutexLock lock(&mutex_);
  std::shared_ptr<const Plan> found;
  HVD_EXT_RETURN_IF_ERROR(PlanOf(handle, &found));
  for (const std::shared_ptr<Channel>& channel : channels_) {
    if (channel != nullptr && channel->Uses(found.get())) {
      return Invalid("plan (" + std::to_string(handle) + ") is used by channel '" + channel->name() +
                     "'; close it first");
    }
  }
  plans_[static_cast<size_t>(handle - HandleOf(0))] = nullptr;
  return Status::Ok();
}

Status Registry::FindPlan(int64_t handle, std::shared_ptr<const Plan>* plan) const {
  MutexLock lock(&mutex_);
  return PlanOf(handle, plan);
}

Status CheckQuorum(const std::string& where, int64_t quorum, int size) {
  return Require(quorum >= 1 && quorum <= size, where + "quorum", quorum,
                 "must be in [1, " + std::to_string(size) + "]");
}

Status Registry::CheckPartial(const ChannelSpec& spec) const {
  const PartialSpec& partial = *spec.partial;
  const std::string where = "channel '" + spec.name + "': ";
  if (static_cast<int>(partial.hosts.size()) != core_->size) {
    return Invalid(where + "it must have a host for each of the " + std::to_string(core_->size) + " ranks, it has " +
                   std::to_string(partial.hosts.size()));
  }
  HVD_EXT_RETURN_IF_ERROR(Require(partial.sync >= Sync::kFull && partial.sync <= Sync::kQuorum, where + "sync",
                                  partial.sync, "must be in [0, 3]"));
  HVD_EXT_RETURN_IF_ERROR(CheckQuorum(where, partial.quorum, core_->size));
  HVD_EXT_RETURN_IF_ERROR(
      Require(partial.staleness >= 0, where + "staleness", partial.staleness, "must not be negative"));
  for (const BucketSpec& bucket : spec.buckets) {
    if (bucket.sparse) return Invalid(where + "a round that does not wait for all ranks can have no sparse bucket");
  }
  if (spec.on_device) return Invalid(where + "a round that does not wait for all ranks keeps its results on the host");
  return Status::Ok();
}

Status Registry::LayoutOf(const ChannelSpec& spec, std::shared_ptr<const Layout>* layout) const {
  std::vector<std::shared_ptr<const Plan>> plans(spec.buckets.size());
  std::vector<std::shared_ptr<const Plan>> dense_plans(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    const BucketSpec& bucket = spec.buckets[i];
    HVD_EXT_RETURN_IF_ERROR(PlanOf(bucket.plan, &plans[i]));
    if (bucket.sparse) HVD_EXT_RETURN_IF_ERROR(PlanOf(bucket.sparse->dense_plan, &dense_plans[i]));
  }
  return Layout::Make(spec, std::move(plans), std::move(dense_plans), layout);
}

Status Registry::OpenChannel(const ChannelSpec& given, int64_t* handle) {
  HVD_EXT_RETURN_IF_ERROR(Layout::Check(given));
  ChannelSpec spec = given;
  if (given.partial) {
    HVD_EXT_RETURN_IF_ERROR(CheckPartial(given));
    // the table of who takes part is one more tensor, in a bucket of its own
    const PartialSpec& of = *given.partial;
    const int64_t table = static_cast<int64_t>(spec.tensor_names.size());
    spec.tensor_names.push_back("who takes part");
    spec.elements.push_back(PartialGate::TableElements(core_->size));
    spec.buckets.push_back({DType::kInt32, {}, ReduceOp::kSum, of.plan, of.segment_nbytes, {table}});
  }
  MutexLock lock(&mutex_);
  HVD_EXT_RETURN_IF_ERROR(UsableNow());
  std::shared_ptr<const Layout> layout;
  HVD_EXT_RETURN_IF_ERROR(LayoutOf(spec, &layout));
  int64_t lane = 1 + static_cast<int64_t>(channels_.size());
  HVD_EXT_RETURN_IF_ERROR(CheckLane(lane, core_->config.window, core_->transport->largest_tag()));
  std::shared_ptr<Channel> opened;
  std::shared_ptr<StepGate> gate = std::make_shared<SynchronousGate>();
  if (given.partial) {
    gate =
        std::make_shared<PartialGate>(given.name, layout, *given.partial, core_->rank, core_->size, &core_->messages);
  }
  try {
    opened = std::make_shared<Channel>(given.name, given.tensor_names, std::move(layout), lane, std::move(gate),
                                       &core_->trace, core_->device, given.on_device);
  } catch (const std::bad_alloc&) {
    return Internal("open of a channel: no memory for the residuals of its sparse buckets");
  }
  auto failed = lane_failures_.find(lane);
  std::vector<Delivery> none;
  if (failed != lane_failures_.end()) opened->Fail(failed->second, &none);
  *handle = HandleOf(channels_.size());
  channels_.push_back(std::move(opened));
  return Status::Ok();
}

Status Registry::SwitchLayout(int64_t channel, const ChannelSpec& spec) {
  HVD_EXT_RETURN_IF_ERROR(Layout::Check(spec));
  std::shared_ptr<Channel> found;
  std::shared_ptr<const Layout> layout;
  {
    MutexLock lock(&mutex_);
    HVD_EXT_RETURN_IF_ERROR(UsableNow());
    HVD_EXT_RETURN_IF_ERROR(ChannelOf(channel, &found));
    HVD_EXT_RETURN_IF_ERROR(found->gate()->CheckSwitch(found->name()));
    HVD_EXT_RETURN_IF_ERROR(LayoutOf(spec, &layout));
  }
  try {
    return found->Switch(spec.tensor_names, std::move(layout));
  } catch (const std::bad_alloc&) {
    return Internal("another layout of '" + found->name() + "': no memory for the residuals of its sparse buckets");
  }
}

Status Registry::FindChannel(int64_t handle, std::shared_ptr<Channel>* channel) const {
  MutexLock lock(&mutex_);
  return ChannelOf(handle, channel);
}

Status Registry::UseChannel(int64_t handle, std::shared_ptr<Channel>* channel) const {
  MutexLock lock(&mutex_);
  HVD_EXT_RETURN_IF_ERROR(UsableNow());
  return ChannelOf(handle, channel);
}

std::vector<std::shared_ptr<Channel>> Registry::Channels() const {
  std::vector<std::shared_ptr<Channel>> open;
  MutexLock lock(&mutex_);
  std::copy_if(channels_.begin(), channels_.end(), std::back_inserter(open),
               [](const std::shared_ptr<Channel>& channel) { return channel != nullptr; });
  return open;
}

std::shared_ptr<Channel> Registry::ChannelOfLane(int64_t lane) const {
  MutexLock lock(&mutex_);
  return OfLane(lane);
}

Status Registry::TakeChannel(int64_t handle, std::shared_ptr<Channel>* channel) {
  MutexLock lock(&mutex_);
  HVD_EXT_RETURN_IF_ERROR(ChannelOf(handle, channel));
  channels_[static_cast<size_t>(handle - HandleOf(0))] = nullptr;
  return Status::Ok();
}

LaneReport Registry::Report(int64_t lane) const {
  std::shared_ptr<Channel> channel;
  {
    MutexLock lock(&mutex_);
    channel = OfLane(lane);
    if (channel == nullptr) {
      LaneReport report;
      bool opened = lane <= static_cast<int64_t>(channels_.size());
      report.state = opened ? LaneReport::kClosed : LaneReport::kNotOpened;
      return report;
    }
  }
  return channel->Report();
}

std::vector<Delivery> Registry::Fail(const Status& status) {
  std::vector<Delivery> ended;
  std::vector<std::shared_ptr<Channel>> channels;
  {
    MutexLock lock(&mutex_);
    failure_ = status;  // no channel is opened from here on
    channels = channels_;
  }
  for (const std::shared_ptr<Channel>& channel : channels) {
    if (channel != nullptr) channel->Fail(status, &ended);
  }
  return ended;
}

bool Registry::FailLane(int64_t lane, const Status& status, std::vector<Delivery>* ended) {
  std::shared_ptr<Channel> channel;
  {
    MutexLock lock(&mutex_);
    if (!lane_failures_.try_emplace(lane, status).second) return false;
    channel = OfLane(lane);
  }
  if (channel != nullptr) channel->Fail(status, ended);
  return true;
}

bool Registry::AnyLaneFailed() const {
  MutexLock lock(&mutex_);
  return !lane_failures_.empty();
}

void Registry::NoteLeft(int peer) {
  MutexLock lock(&mutex_);
  if (left_ < 0) left_ = peer;
}

}  // namespace hvd_ext

#include "engine/joining.h"

#include <algorithm>
#include <cstring>

namespace hvd_ext {

Joining::Joining(Core* core, Control* control, Registry* registry, Executor* executor, Calls* calls, Lanes* lanes)
    : core_(core),
      control_(control),
      registry_(registry),
      executor_(executor),
      calls_(calls),
      lanes_(lanes),
      joined_(static_cast<size_t>(core->size)),
      payloads_(static_cast<size_t>(core->size)) {}

Status Joining::Check(const std::string& what) const {
  if (mode_ != kJoined) return Status::Ok();
  return Invalid(what + ": this rank has joined (hvd_ext.join), and takes part with zeros until all ranks have");
}

void Joining::Join(std::map<int64_t, std::shared_ptr<const Plan>> plans, std::string payload, JoinEnded done) {
  Status status = core_->failure;
  for (int peer = 0; status.ok() && peer < core_->size; ++peer) {
    if (control_->HasLeft(peer)) status = Communication("join: " + core_->HasLeft(peer));
  }
  if (status.ok() && waiting()) status = Invalid("join: another thread of this rank has joined, and still waits");
  if (!status.ok()) return done(status, -1, {});
  done_ = std::move(done);
  all_ = false;
  mode_ = kJoined;
  AnnounceAll();
  RankJoined joined;
  for (const auto& [digest, plan] : plans) joined.digests.push_back(digest);
  joined.payload = std::move(payload);
  calls_->Join(std::move(plans));
  control_->Send(0, std::move(joined));
}

void Joining::AnnounceAll() {
  for (const std::shared_ptr<Channel>& channel : registry_->Channels()) Announce(*channel);
}

void Joining::Announce(const Channel& channel) {
  const std::optional<StepPlace> place = channel.Place();
  if (!place) return;
  StepReached reached;
  static_cast<StepPlace&>(reached) = *place;
  reached.lane = channel.lane();
  control_->Send(0, reached);
}

void Joining::Handle(int peer, RankJoined joined) {
  const size_t p = static_cast<size_t>(peer);
  if (core_->rank != 0 || joined_[p]) return;
  joined_[p] = 1;
  payloads_[p] = std::move(joined.payload);
  for (const auto& [lane, reached] : newest_) {  // what was passed on before this rank joined
    if (peer == 0) {
      due_[lane].due.push_back(reached);
    } else {
      control_->Send(peer, reached);
    }
  }
  calls_->HandleJoined(peer, joined.digests);
  const bool all = std::find(joined_.begin(), joined_.end(), 0) == joined_.end();
  const ControlMessage message = all ? ControlMessage(AllJoined{peer, payloads_}) : ControlMessage(OthersJoined{});
  for (int other = 0; other < core_->size; ++other) {
    if (all || !joined_[static_cast<size_t>(other)]) control_->Send(other, message);
  }
  if (!all) return;
  calls_->HandleAllJoined();
  std::fill(joined_.begin(), joined_.end(), 0);
}

// Rank 0 tells of a join before it tells that all have joined, and of the next join after it.
void Joining::Handle(const OthersJoined&) {
  if (waiting() && !all_) return;
  others_ = true;
  if (waiting()) return;
  mode_ = kAnnounces;  // before the channels are looked at: a step that begins meanwhile is announced or seen
  AnnounceAll();
}

void Joining::Handle(const StepReached& reached) {
  if (core_->rank == 0) {
    auto [newest, fresh] = newest_.try_emplace(reached.lane, reached);
    auto order = [](const StepReached& r) { return std::make_pair(r.runs, r.ended); };
    if (!fresh && order(reached) <= order(newest->second)) return;
    newest->second = reached;
    for (int peer = 1; peer < core_->size; ++peer) {
      if (joined_[static_cast<size_t>(peer)]) control_->Send(peer, reached);
    }
    if (!joined_[0]) return;
  }
  if (waiting()) due_[reached.lane].due.push_back(reached);
}

void Joining::Handle(AllJoined all) {
  others_ = false;
  all_ = true;
  end_ = std::move(all);
}

bool Joining::Progress() {
  if (!waiting()) return false;
  bool moved = false, idle = true;
  for (auto& [number, lane] : due_) {
    const std::shared_ptr<Channel> channel = registry_->ChannelOfLane(number);
    while (!lane.due.empty() && (channel == nullptr || Follow(channel, lane.due.front(), &lane))) {
      lane.due.pop_front();
      moved = true;
    }
    idle &= lane.due.empty();
  }
  if (!all_ || !idle || executor_->busy()) return moved;
  End(Status::Ok());
  return true;
}

bool Joining::Follow(const std::shared_ptr<Channel>& channel, const StepReached& reached, Lane* lane) {
  while (true) {
    if (lane->open >= 0 && (lane->open < reached.runs || reached.ended)) {
      if (!channel->IsQuiet()) return false;
      // A failed channel refuses; its next step has the words.
      channel->EndStep(lane->open < reached.runs ? reached.committed_before : reached.committed);
      lane->open = -1;
    }
    const int64_t runs = channel->runs();
    if (runs > reached.runs) return true;
    if (!GiveZeros(channel, reached).ok() || channel->runs() == runs) return true;
    if (channel->has_density()) lane->open = runs;
  }
}

Status Joining::GiveZeros(const std::shared_ptr<Channel>& channel, const StepReached& reached) {
  std::optional<TopKStep> topk;
  if (channel->has_density()) {
    topk.emplace();
    topk->density = reached.density;
    if (reached.momentum) topk->momentum = static_cast<float>(*reached.momentum);
  }
  // Where this rank has left a step half-way and nothing of it was sent, the first attempt gives that step up.
  Status status;
  for (int attempt = 0; attempt < 2; ++attempt) {
    Channel::Begun begun;
    status = channel->BeginStep(topk, /*skips=*/false, &begun);
    DeliverAll(begun.ended);
    if (begun.lost) lanes_->Fail(channel->lane(), Communication(status.message), true);
    if (status.ok() || begun.lost) break;
  }
  HVD_EXT_RETURN_IF_ERROR(status);
  for (int64_t tensor = 0; tensor < channel->tensors(); ++tensor) {
    const int64_t nbytes = channel->NbytesOf(tensor);
    std::shared_ptr<ChannelStep> step;
    std::shared_ptr<Buffer> buffer;
    std::shared_ptr<Arriving> arriving;
    bool ready = false;
    HVD_EXT_RETURN_IF_ERROR(channel->Reserve(tensor, nbytes, &core_->pool, &step, &buffer, &arriving));
    core_->Fill(buffer.get(), step->layout->place(tensor).offset_nbytes, nbytes,
                [&](char* at) { std::memset(at, 0, static_cast<size_t>(nbytes)); });
    if (arriving != nullptr) arriving->copied.fetch_add(nbytes, std::memory_order_release);
    HVD_EXT_RETURN_IF_ERROR(channel->Arrive(step, tensor, &ready));
  }
  lanes_->StartRuns(channel);
  return Status::Ok();
}

void Joining::End(const Status& status) {
  if (!waiting()) return;
  const JoinEnded done = std::exchange(done_, nullptr);
  const AllJoined all = std::exchange(end_, AllJoined{});
  due_.clear();
  all_ = false;
  calls_->Join({});
  mode_ = others_ ? kAnnounces : kAlone;
  if (others_) AnnounceAll();
  done(status, static_cast<int>(all.last), all.payloads);
}

void Joining::HandleLeave(int peer) {
  if (!all_) End(Communication("join: " + core_->HasLeft(peer)));
}

}  // namespace hvd_ext

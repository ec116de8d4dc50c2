// The public calls. They check, and hand the rest to the parts of the engine: what any thread may do is done at once,
// the rest is posted to the inbox.
#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <map>
#include <new>
#include <system_error>
#include <utility>

#include "engine/check_call.h"
#include "engine/engine_state.h"

namespace hvd_ext {
namespace {

// A tensor is copied in pieces of this size. A copy takes about 10 us for 64 kB.
constexpr int64_t kCopyNbytes = 128 << 10;
// While a caller that makes progress copies, nothing else moves, also in other lanes: it makes a pass each time it has
// copied so much.
constexpr int64_t kCopiedPerPass = 64 << 10;

Status CheckConfig(const Config& config) {
  HVD_EXT_RETURN_IF_ERROR(
      Require(config.window >= 1 && config.window <= 1024, "window", config.window, "must be in [1, 1024]"));
  for (double seconds : {config.stall_warn_s, config.stall_fatal_s}) {
    if (!(seconds >= 0))
      return Invalid("stall_warn_s and stall_fatal_s must not be negative, one is " + std::to_string(seconds));
  }
  return Status::Ok();
}

}  // namespace

Engine::Engine() = default;

Engine::~Engine() {
  Stop();
  MutexLock lock(&state_->thread_mutex);
  if (state_->thread.joinable()) state_->thread.detach();  // only on the engine's own thread, which holds the state
}

Status Engine::Start(std::shared_ptr<Transport> transport, const Config& config, int64_t generation,
                     std::shared_ptr<Engine>* engine) {
  HVD_EXT_RETURN_IF_ERROR(CheckConfig(config));
  const bool fits = generation >= 0 && generation <= std::numeric_limits<int32_t>::max();
  HVD_EXT_RETURN_IF_ERROR(Require(fits, "generation", generation, "must be in [0, 2^31)"));
  HVD_EXT_RETURN_IF_ERROR(CheckLane(kCallsLane, config.window, transport->largest_tag()));
  std::shared_ptr<Engine> started(new Engine());
  auto state = std::make_shared<State>(std::move(transport), config, generation);
  started->state_ = state;
  {
    MutexLock lock(&state->thread_mutex);
    try {
      state->thread = std::thread([state] { state->loop.Run(); });
    } catch (const std::system_error& e) {
      return Internal(std::string("the engine's thread did not start: ") + e.what());
    }
  }
  *engine = std::move(started);
  return Status::Ok();
}

int Engine::rank() const { return state_->core.rank; }
int Engine::size() const { return state_->core.size; }
int64_t Engine::generation() const { return state_->core.generation; }
Medium Engine::MediumTo(int rank) const { return state_->core.transport->MediumTo(rank); }
const char* Engine::between() const { return state_->core.transport->between_hosts(); }
bool Engine::quiet() const { return state_->loop.quiet(); }
Status Engine::Usable() const { return state_->registry.Usable(); }

void Engine::StopSoon() { state_->inbox.Stop(); }

bool Engine::Stop() {
  StopSoon();
  if (state_->loop.IsMine()) return state_->loop.alone();  // from a callback: the loop ends after it
  MutexLock lock(&state_->thread_mutex);
  if (state_->thread.joinable()) state_->thread.join();
  return state_->loop.alone();
}

Status Engine::AddPlan(const int64_t* rows, int64_t n_rows, int64_t units, int64_t* plan) {
  auto decoded = std::make_shared<Plan>();
  HVD_EXT_RETURN_IF_ERROR(Decode(rows, n_rows, units, rank(), size(), decoded.get()));
  return state_->registry.AddPlan(std::move(decoded), plan);
}

Status Engine::RemovePlan(int64_t plan) { return state_->registry.RemovePlan(plan); }

Status Engine::OpenChannel(ChannelSpec spec, int64_t* channel) {
  HVD_EXT_RETURN_IF_ERROR(state_->registry.OpenChannel(spec, channel));
  if (!spec.partial) return Status::Ok();
  PartialChannel opened;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(*channel, &opened));
  return state_->PostRounds(opened, [opened](PartialRounds* rounds, int64_t) {
    AssertProgress();
    rounds->Open(opened);
  });
}

Status Engine::State::PostRounds(const PartialChannel& partial,
                                 std::function<void(PartialRounds*, int64_t lane)> work) {
  return Post([this, lane = partial.channel->lane(), work = std::move(work)] {
    AssertProgress();
    work(&rounds, lane);
  });
}

Status Engine::State::Post(std::function<void()> work) {
  return inbox.Post(std::move(work)) ? Status::Ok() : registry.Usable();
}

Status Engine::CloseChannel(int64_t channel) {
  std::shared_ptr<Channel> closed;
  if (state_->inbox.stopping()) return state_->registry.FindChannel(channel, &closed);  // the loop's end ends all
  HVD_EXT_RETURN_IF_ERROR(state_->registry.TakeChannel(channel, &closed));
  std::vector<Delivery> ended;
  closed->Fail(Stopped("channel '" + closed->name() + "' has been closed"), &ended);
  state_->PostDeliveries(std::move(ended), [state = state_.get(), lane = closed->lane()] {
    AssertProgress();
    state->rounds.Close(lane);
    state->lanes.Close(lane);
  });
  return Status::Ok();
}

void Engine::State::PostDeliveries(std::vector<Delivery> ended, std::function<void()> then) {
  auto shared = std::make_shared<std::vector<Delivery>>(std::move(ended));
  bool posted = inbox.Post([shared, then = std::move(then)] {
    DeliverAll(*shared);
    if (then != nullptr) then();
  });
  if (!posted) DeliverAll(*shared);
}

Status Engine::SwitchLayout(int64_t channel, const ChannelSpec& spec) {
  return state_->registry.SwitchLayout(channel, spec);
}

Status Engine::AtStep(int64_t channel, int64_t step, std::function<void(int64_t step)> call) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.FindChannel(channel, &found));
  found->AtStep(step, std::move(call));
  return Status::Ok();
}

bool Engine::HasCallBeforeStep(int64_t channel) {
  std::shared_ptr<Channel> found;
  return state_->registry.FindChannel(channel, &found).ok() && found->HasCallBeforeStep();
}

Status Engine::GetTimes(int64_t channel, int64_t most, std::vector<StepTimes>* times) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.FindChannel(channel, &found));
  *times = found->Times(most);
  return Status::Ok();
}

Status Engine::BeginStep(int64_t channel) { return state_->BeginStep(channel, std::nullopt); }
Status Engine::BeginTopKStep(int64_t channel, double density, std::optional<float> momentum) {
  return state_->BeginStep(channel, TopKStep{density, momentum});
}

Status Engine::State::BeginStep(int64_t handle, const std::optional<TopKStep>& topk) {
  std::shared_ptr<Channel> channel;
  HVD_EXT_RETURN_IF_ERROR(registry.UseChannel(handle, &channel));
  HVD_EXT_RETURN_IF_ERROR(joining.Check("a step"));
  int64_t step = 0;
  if (auto call = channel->TakeCallBeforeStep(&step)) call(step);
  return BeginStep(channel, topk, /*skips=*/false, &step);
}

Status Engine::State::BeginStep(const std::shared_ptr<Channel>& channel, const std::optional<TopKStep>& topk,
                                bool skips, int64_t* step) {
  Channel::Begun begun;
  Status status = channel->BeginStep(topk, skips, &begun);
  *step = begun.step;
  if (begun.lost) {
    PostDeliveries(std::move(begun.ended), [this, lane = channel->lane(), status] {
      AssertProgress();
      lanes.Fail(lane, Communication(status.message), true);
    });
  } else if (!begun.ended.empty()) {
    PostDeliveries(std::move(begun.ended), nullptr);
  }
  if (status.ok()) AnnounceStep(channel);
  return status;
}

void Engine::State::AnnounceStep(const std::shared_ptr<Channel>& channel) {
  if (!joining.announces()) return;
  inbox.Post([this, channel] {
    AssertProgress();
    joining.Announce(*channel);
  });
}

Status Engine::EndStep(int64_t channel, bool commit) {
  std::shared_ptr<Channel> found;
  if (commit) HVD_EXT_RETURN_IF_ERROR(state_->registry.Usable());
  HVD_EXT_RETURN_IF_ERROR(state_->registry.FindChannel(channel, &found));
  HVD_EXT_RETURN_IF_ERROR(found->EndStep(commit));
  state_->AnnounceStep(found);
  return Status::Ok();
}

Status Engine::HasDensity(int64_t channel, bool* has) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.FindChannel(channel, &found));
  *has = found->has_density();
  return Status::Ok();
}

Status Engine::GetFeedback(int64_t channel, int64_t bucket, FeedbackShard* shard) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.FindChannel(channel, &found));
  return found->GetFeedback(bucket, shard);
}

Status Engine::ReadFeedback(int64_t channel, int64_t bucket, FeedbackArray which, float* to) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.FindChannel(channel, &found));
  return found->ReadFeedback(bucket, which, to);
}

Status Engine::WriteFeedback(int64_t channel, int64_t bucket, FeedbackArray which, const float* from) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.UseChannel(channel, &found));
  return found->WriteFeedback(bucket, which, from);
}

Status Engine::GetTopKStatistics(int64_t channel, TopKStatistics* statistics) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.FindChannel(channel, &found));
  *statistics = found->GetTopKStatistics();
  return Status::Ok();
}

template <typename Write>
Status Engine::State::Submit(const std::shared_ptr<Channel>& channel, int64_t tensor, int64_t nbytes, int64_t* ticket,
                             const Write& write) {
  std::shared_ptr<ChannelStep> step;
  std::shared_ptr<Buffer> buffer;
  std::shared_ptr<Arriving> arriving;
  try {
    HVD_EXT_RETURN_IF_ERROR(channel->Reserve(tensor, nbytes, &core.pool, &step, &buffer, &arriving));
    *ticket = step->number;
    if (arriving != nullptr) HVD_EXT_RETURN_IF_ERROR(PostReady(channel));
    write(buffer.get(), step->layout->place(tensor).offset_nbytes, arriving.get());
  } catch (const std::bad_alloc&) {
    return Internal("submit: no memory for a bucket of '" + channel->name() + "'");
  } catch (const std::exception& e) {
    return Internal("submit to '" + channel->name() + "': " + e.what());
  }
  bool ready = false;
  HVD_EXT_RETURN_IF_ERROR(channel->Arrive(step, tensor, &ready));
  return ready ? PostReady(channel) : Status::Ok();
}

Status Engine::Submit(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, int64_t* ticket,
                      CallerProgress* progress) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.UseChannel(channel, &found));
  return state_->Submit(found, tensor, nbytes, ticket, [&](Buffer* buffer, int64_t offset, Arriving* arriving) {
    state_->core.Fill(buffer, offset, nbytes, [&](char* to) {
      for (int64_t at = 0; at < nbytes;) {
        const int64_t piece = std::min(nbytes - at, kCopyNbytes);
        std::memcpy(to + at, static_cast<const char*>(data) + at, static_cast<size_t>(piece));
        at += piece;
        if (arriving != nullptr) {
          arriving->copied.fetch_add(piece, std::memory_order_release);
          state_->core.transport->doorbell()->Ring(/*from_peer=*/false);
        }
        if (progress != nullptr) progress->Copied(piece);
      }
    });
  });
}

const std::shared_ptr<Device>& Engine::device() const { return state_->core.device; }

Status Engine::SubmitOnDevice(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, void* stream,
                              int64_t* ticket) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.UseChannel(channel, &found));
  if (!found->on_device()) return Invalid("submit to '" + found->name() + "': its tensors lie in the host's memory");
  if (device()->IsHost()) return Submit(channel, tensor, data, nbytes, ticket);
  return state_->Submit(found, tensor, nbytes, ticket, [&](Buffer* buffer, int64_t offset, Arriving*) {
    Queue* inputs = device()->inputs();
    inputs->Follow(stream);
    state_->core.CopyIn(buffer, offset, data, nbytes);
    inputs->Lead(stream);
  });
}

Status Engine::State::PostReady(const std::shared_ptr<Channel>& channel) {
  return Post([this, channel] {
    AssertProgress();
    rounds.Arrive(channel->lane());
    lanes.StartRuns(channel);
  });
}

void Engine::Collect(int64_t channel, int64_t tensor, int64_t ticket, Deliver deliver) {
  Delivery delivery;
  std::shared_ptr<Channel> found;
  delivery.status =
      state_->inbox.stopping() ? state_->registry.Usable() : state_->registry.FindChannel(channel, &found);
  if (!delivery.status.ok()) {
    delivery.deliver = std::move(deliver);
  } else if (!found->Collect(tensor, ticket, std::move(deliver), &delivery)) {
    return;
  }
  delivery.deliver(delivery.status, delivery.data, delivery.memory);
}

Status Engine::GiveResult(int64_t channel, int64_t tensor, const void* data, int64_t nbytes) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.UseChannel(channel, &found));
  HVD_EXT_RETURN_IF_ERROR(found->gate()->CheckGiveResult(found->name()));
  if (found->on_device()) return Invalid("a result of '" + found->name() + "': its tensors lie on the device");
  return found->GiveResult(tensor, data, nbytes);
}

Status Engine::State::FindPartial(int64_t handle, PartialChannel* found) const {
  HVD_EXT_RETURN_IF_ERROR(registry.UseChannel(handle, &found->channel));
  return found->channel->gate()->FindPartial(found->channel->name(), &found->gate);
}

Status Engine::SkipStep(int64_t channel, int64_t* ticket) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  HVD_EXT_RETURN_IF_ERROR(state_->BeginStep(found.channel, std::nullopt, /*skips=*/true, ticket));
  return state_->PostReady(found.channel);
}

Status Engine::Flush(int64_t channel, int64_t ahead) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  HVD_EXT_RETURN_IF_ERROR(Require(ahead >= 1, "flush: ahead", ahead, "must be at least 1"));
  found.gate->Flush(ahead);
  return Status::Ok();
}

Status Engine::Leave(int64_t channel) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  return state_->PostRounds(found, [](PartialRounds* rounds, int64_t lane) {
    AssertProgress();
    rounds->Leave(lane);
  });
}

void Engine::AwaitRound(int64_t channel, NextRound done) {
  PartialChannel found;
  Status status = state_->FindPartial(channel, &found);
  if (!status.ok()) return done(status, false);
  found.gate->AwaitRound(std::move(done));
}

Status Engine::Progress(int64_t channel, int64_t* step, int64_t* over) {
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->registry.UseChannel(channel, &found));
  found->Progress(step, over);
  return Status::Ok();
}

Status Engine::SetQuorum(int64_t channel, int64_t quorum) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  HVD_EXT_RETURN_IF_ERROR(CheckQuorum("", quorum, size()));
  return state_->PostRounds(found, [quorum](PartialRounds* rounds, int64_t lane) {
    AssertProgress();
    rounds->SetQuorum(lane, quorum);
  });
}

Status Engine::SetFlags(int64_t channel, int64_t flags) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  const bool fits = flags >= 0 && flags <= std::numeric_limits<int32_t>::max();
  HVD_EXT_RETURN_IF_ERROR(Require(fits, "flags", flags, "must be in [0, 2^31)"));
  found.gate->SetFlags(flags);
  return Status::Ok();
}

Status Engine::GetRounds(int64_t channel, int64_t first, int64_t most, std::vector<RoundInfo>* rounds) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  *rounds = found.gate->Rounds(first, most);
  return Status::Ok();
}

Status Engine::ReadHeld(int64_t channel, int64_t tensor, void* to, bool* held) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  HVD_EXT_RETURN_IF_ERROR(found.channel->CheckTensor(tensor));
  found.gate->ReadHeld(tensor, to, held);
  return Status::Ok();
}

Status Engine::WriteHeld(int64_t channel, int64_t tensor, const void* from) {
  PartialChannel found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPartial(channel, &found));
  HVD_EXT_RETURN_IF_ERROR(found.channel->CheckTensor(tensor));
  found.gate->WriteHeld(tensor, from);
  return Status::Ok();
}

Status Engine::State::Announce(const std::shared_ptr<OpenCall>& call) {
  HVD_EXT_RETURN_IF_ERROR(registry.UsableForCall(call->spec));
  HVD_EXT_RETURN_IF_ERROR(joining.Check(call->name()));
  return Post([this, call] {
    AssertProgress();
    calls.Announce(call);
  });
}

void Engine::Call(CallSpec spec, const void* input, Allocate allocate, Done done) {
  const std::shared_ptr<State> held = state_;  // `done` may drop the last reference to the engine before this returns
  auto call = std::make_shared<OpenCall>();
  call->input = input;
  call->allocate = std::move(allocate);
  call->done = [done](const Status& status, const std::vector<std::string>&) { done(status); };
  call->spec = std::move(spec);
  Status status = CheckCall(call->spec, size(), input, rank());
  if (status.ok()) status = state_->registry.Usable();
  if (status.ok() && NeedsPlan(call->spec.kind)) {
    status = state_->registry.FindPlan(call->spec.plan, &call->plan);
    if (status.ok()) status = CheckUnits(call->spec, call->plan->units, size());
    if (status.ok() && call->plan->sparse) {
      status = Invalid(call->name() + ": its plan is sparse, which only a bucket of a channel may have");
    }
  }
  if (status.ok()) status = held->Announce(call);
  if (status.ok()) return;
  if (status.code == Code::kInvalid) Refuse(call->spec.name, status.message);
  done(status);
}

void Engine::Refuse(const std::string& name, const std::string& why) {
  if (name.empty()) return;
  CallAnnouncement refusal;
  refusal.name = name;
  refusal.refusal = why;
  if (!state_->registry.UsableForCall(refusal).ok()) return;
  state_->inbox.Post([state = state_.get(), refusal] {
    AssertProgress();
    state->control.Send(0, refusal);
  });
}

void Engine::Exchange(std::string name, std::string payload, Exchanged done, bool agrees) {
  const std::shared_ptr<State> held = state_;  // as in Call
  auto call = std::make_shared<OpenCall>();
  call->spec.kind = Kind::kExchange;
  call->spec.name = std::move(name);
  call->spec.agrees = agrees;
  call->payload = std::move(payload);
  call->done = std::move(done);
  Status status =
      call->spec.name.empty() ? Invalid("an exchange must have a name, this one's is empty") : held->Announce(call);
  if (!status.ok()) call->done(status, {});
}

void Engine::Join(const std::vector<KnownPlan>& plans, std::string payload, JoinEnded done) {
  const std::shared_ptr<State> held = state_;  // as in Call
  Status status = held->registry.Usable();
  std::map<int64_t, std::shared_ptr<const Plan>> known;
  for (const KnownPlan& plan : plans) {
    if (status.ok()) status = held->registry.FindPlan(plan.plan, &known[plan.digest]);
  }
  for (const std::shared_ptr<Channel>& channel : held->registry.Channels()) {
    if (status.ok()) status = channel->gate()->CheckJoin(channel->name());
  }
  if (status.ok()) {
    status = held->Post([state = held.get(), known, payload, done] {
      AssertProgress();
      state->joining.Join(known, payload, done);
    });
  }
  if (!status.ok()) done(status, -1, {});
}

Status Engine::StartTrace(int64_t capacity) {
  HVD_EXT_RETURN_IF_ERROR(Require(capacity >= 1, "trace: capacity", capacity, "must be at least 1 record"));
  try {
    state_->core.trace.Start(capacity);
  } catch (const std::bad_alloc&) {
    return Internal("trace: no memory for " + std::to_string(capacity) + " records");
  }
  return Status::Ok();
}

void Engine::StopTrace() {
  auto passed = std::make_shared<std::promise<void>>();
  if (!state_->loop.IsMine() && state_->inbox.Post([passed] { passed->set_value(); })) {
    passed->get_future().wait_for(std::chrono::seconds(1));
  }
  state_->core.trace.Stop();
}

const Trace& Engine::trace() const { return state_->core.trace; }

Statistics Engine::GetStatistics() const {
  const ExecutorStatistics& moved = state_->executor.statistics();
  return {state_->core.buckets, state_->core.calls, moved.segments, moved.bytes_sent, moved.bytes_received};
}

// What these do depends on whether the constructor has got the progress lock, which clang cannot follow.
Engine::CallerProgress::CallerProgress(Engine* engine)
    : state_(engine->state_), has_lock_(state_->loop.BeginCaller()) {}

Engine::CallerProgress::~CallerProgress() {
  if (has_lock_) state_->loop.EndCaller();
}

void Engine::CallerProgress::Copied(int64_t nbytes) {
  copied_nbytes_ += nbytes;
  if (!has_lock_ || copied_nbytes_ < kCopiedPerPass) return;
  copied_nbytes_ = 0;
  state_->loop.Once();
}

// The lock is given up here and not by the destructor: a caller that waits on, because the engine stops, must not keep
// it from the thread that ends what it waits for.
void Engine::CallerProgress::Until(const std::atomic<bool>& ended, double most_s) {
  if (!std::exchange(has_lock_, false)) return;
  state_->loop.Until(ended, most_s);
  state_->loop.EndCaller();
}

}  // namespace hvd_ext

// The public calls. They check, take a place in the books under the mutex, and hand the rest to the engine's thread.
#include "engine/engine.h"

#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <new>
#include <system_error>
#include <utility>

#include "engine/check_call.h"
#include "engine/engine_state.h"

namespace hvd_ext {
namespace {

Status CheckConfig(const Config& config) {
  if (config.window < 1 || config.window > 1024) {
    return Invalid("window (" + std::to_string(config.window) + ") must be in [1, 1024]");
  }
  for (double seconds : {config.stall_warn_s, config.stall_fatal_s}) {
    if (!(seconds >= 0))
      return Invalid("stall_warn_s and stall_fatal_s must not be negative, one is " + std::to_string(seconds));
  }
  return Status::Ok();
}

}  // namespace

Engine::State::State(std::shared_ptr<Transport> t, const Config& c, int64_t g)
    : transport(std::move(t)),
      config(c),
      generation(g),
      rank(transport->rank()),
      size(transport->size()),
      pool(transport->arena()),
      executor(transport.get(), &pool, c.window, &trace) {
  moved_s_ = received_s_ = watched_s_ = NowSeconds();
  if (rank == 0) coordinator_ = std::make_unique<Coordinator>(size, config.numbers);
}

Status Engine::State::Usable() const {
  if (stopping) return Stopped("the engine has been shut down; call init() first");
  return failure;
}

Status Engine::State::FindPlan(int64_t handle, std::shared_ptr<const Plan>* plan) const {
  int64_t index = handle - HandleOf(0);
  if (handle >> 32 != generation) return OfStopped("plan", handle);
  if (index >= static_cast<int64_t>(plans.size()) || plans[static_cast<size_t>(index)] == nullptr) {
    return Invalid("plan (" + std::to_string(handle) + ") was never added, or has been removed");
  }
  *plan = plans[static_cast<size_t>(index)];
  return Status::Ok();
}

Status Engine::State::FindChannel(int64_t handle, std::shared_ptr<Channel>* channel) const {
  int64_t index = handle - HandleOf(0);
  if (handle >> 32 != generation) return OfStopped("channel", handle);
  if (index >= static_cast<int64_t>(channels.size())) {
    return Invalid("channel (" + std::to_string(handle) + ") was never opened");
  }
  *channel = channels[static_cast<size_t>(index)];
  return *channel != nullptr ? Status::Ok() : Stopped("channel (" + std::to_string(handle) + ") has been closed");
}

void Engine::State::Post(std::function<void()> work) {
  inbox.push_back(std::move(work));
  transport->doorbell()->Ring();
}

Engine::Engine() = default;

Engine::~Engine() {
  Stop();
  std::lock_guard<std::mutex> lock(state_->join_mutex);
  if (state_->thread.joinable()) state_->thread.detach();  // only on the engine's own thread, which holds the state
}

Status Engine::Start(std::shared_ptr<Transport> transport, const Config& config, int64_t generation,
                     std::shared_ptr<Engine>* engine) {
  HVD_EXT_RETURN_IF_ERROR(CheckConfig(config));
  if (generation < 0 || generation > std::numeric_limits<int32_t>::max()) {
    return Invalid("generation (" + std::to_string(generation) + ") must be in [0, 2^31)");
  }
  std::shared_ptr<Engine> started(new Engine());
  auto state = std::make_shared<State>(std::move(transport), config, generation);
  started->state_ = state;
  std::lock_guard<std::mutex> lock(state->mutex);
  try {
    state->thread = std::thread([state] { state->Loop(); });
  } catch (const std::system_error& e) {
    return Internal(std::string("the engine's thread did not start: ") + e.what());
  }
  *engine = std::move(started);
  return Status::Ok();
}

int Engine::rank() const { return state_->rank; }
int Engine::size() const { return state_->size; }
int64_t Engine::generation() const { return state_->generation; }
bool Engine::quiet() const { return state_->quiet; }

void Engine::StopSoon() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
  }
  state_->transport->doorbell()->Ring();
}

bool Engine::Stop() {
  StopSoon();
  if (state_->IsMover()) return state_->alone;  // from a callback: the loop ends after it
  std::lock_guard<std::mutex> lock(state_->join_mutex);
  if (state_->thread.joinable()) state_->thread.join();
  return state_->alone;
}

Status Engine::AddPlan(const int64_t* rows, int64_t n_rows, int64_t units, int64_t* plan) {
  auto decoded = std::make_shared<Plan>();
  HVD_EXT_RETURN_IF_ERROR(Decode(rows, n_rows, units, rank(), size(), decoded.get()));
  std::lock_guard<std::mutex> lock(state_->mutex);
  HVD_EXT_RETURN_IF_ERROR(state_->Usable());
  *plan = state_->HandleOf(state_->plans.size());
  state_->plans.push_back(std::move(decoded));
  return Status::Ok();
}

Status Engine::RemovePlan(int64_t plan) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<const Plan> found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindPlan(plan, &found));
  for (const std::shared_ptr<Channel>& channel : state_->channels) {
    if (channel != nullptr && channel->uses(found.get())) {
      return Invalid("plan (" + std::to_string(plan) + ") is used by channel '" + channel->spec().name +
                     "'; close it first");
    }
  }
  state_->plans[static_cast<size_t>(plan - state_->HandleOf(0))] = nullptr;
  return Status::Ok();
}

Status Engine::OpenChannel(ChannelSpec spec, int64_t* channel) {
  HVD_EXT_RETURN_IF_ERROR(Channel::Check(spec));
  std::lock_guard<std::mutex> lock(state_->mutex);
  HVD_EXT_RETURN_IF_ERROR(state_->Usable());
  std::vector<std::shared_ptr<const Plan>> plans(spec.buckets.size());
  std::vector<std::shared_ptr<const Plan>> dense_plans(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    const BucketSpec& bucket = spec.buckets[i];
    HVD_EXT_RETURN_IF_ERROR(state_->FindPlan(bucket.plan, &plans[i]));
    if (bucket.sparse) HVD_EXT_RETURN_IF_ERROR(state_->FindPlan(bucket.sparse->dense_plan, &dense_plans[i]));
  }
  HVD_EXT_RETURN_IF_ERROR(Channel::CheckPlans(spec, plans, dense_plans));
  int64_t lane = 1 + static_cast<int64_t>(state_->channels.size());
  HVD_EXT_RETURN_IF_ERROR(CheckLane(lane, state_->config.window));
  *channel = state_->HandleOf(state_->channels.size());
  std::shared_ptr<Channel> opened;
  try {
    opened = std::make_shared<Channel>(std::move(spec), lane, std::move(plans), std::move(dense_plans), &state_->trace);
  } catch (const std::bad_alloc&) {
    return Internal("open of a channel: no memory for what its sparse buckets keep");
  }
  auto failed = state_->lane_failures.find(lane);
  std::vector<Delivery> none;
  if (failed != state_->lane_failures.end()) opened->Fail(failed->second, &none);
  state_->channels.push_back(std::move(opened));
  return Status::Ok();
}

namespace {

void DeliverAll(std::vector<Delivery>* ended) {
  for (Delivery& delivery : *ended) delivery.deliver(delivery.status, delivery.data);
}

}  // namespace

Status Engine::CloseChannel(int64_t channel) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::shared_ptr<Channel> closed;
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &closed));
  if (state_->stopping) return Status::Ok();  // the end of the loop ends its collects
  state_->channels[static_cast<size_t>(channel - state_->HandleOf(0))] = nullptr;
  auto ended = std::make_shared<std::vector<Delivery>>();
  closed->Fail(Stopped("channel '" + closed->spec().name + "' has been closed"), ended.get());
  state_->Post([state = state_.get(), closed, ended] {
    DeliverAll(ended.get());
    state->CloseLane(closed->lane());
  });
  return Status::Ok();
}

Status Engine::BeginStep(int64_t channel) { return Begin(channel, std::nullopt); }
Status Engine::BeginSparseStep(int64_t channel, double density) { return Begin(channel, density); }

Status Engine::Begin(int64_t channel, std::optional<double> density) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  HVD_EXT_RETURN_IF_ERROR(state_->Usable());
  std::shared_ptr<Channel> found;
  HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
  bool lost = false;
  auto ended = std::make_shared<std::vector<Delivery>>();
  Status status = found->BeginStep(density, ended.get(), &lost);
  if (lost) found->Fail(Communication(status.message), ended.get());
  if (lost || !ended->empty()) {
    state_->Post([state = state_.get(), found, ended, lost, status] {
      DeliverAll(ended.get());
      if (lost) state->FailLane(found->lane(), Communication(status.message), true);
    });
  }
  return status;
}

Status Engine::Submit(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, int64_t* ticket) {
  std::shared_ptr<Channel> found;
  std::shared_ptr<ChannelStep> step;
  char* to = nullptr;
  try {
    std::lock_guard<std::mutex> lock(state_->mutex);
    HVD_EXT_RETURN_IF_ERROR(state_->Usable());
    HVD_EXT_RETURN_IF_ERROR(state_->FindChannel(channel, &found));
    HVD_EXT_RETURN_IF_ERROR(found->Reserve(tensor, nbytes, &state_->pool, &step, &to));
  } catch (const std::bad_alloc&) {
    return Internal("submit: no memory for a bucket of '" + found->spec().name + "'");
  }
  if (nbytes > 0) std::memcpy(to, data, static_cast<size_t>(nbytes));
  *ticket = step->number;
  std::lock_guard<std::mutex> lock(state_->mutex);
  HVD_EXT_RETURN_IF_ERROR(state_->Usable());
  std::vector<int64_t> full;
  HVD_EXT_RETURN_IF_ERROR(found->Arrive(step, tensor, &full));
  for (int64_t bucket : full) {
    state_->Post([state = state_.get(), found, step, bucket] { state->StartBucket(found, step, bucket); });
  }
  return Status::Ok();
}

void Engine::Collect(int64_t channel, int64_t tensor, int64_t ticket, Deliver deliver) {
  Delivery delivery;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    std::shared_ptr<Channel> found;
    delivery.status = state_->stopping ? state_->Usable() : state_->FindChannel(channel, &found);
    if (!delivery.status.ok()) {
      delivery.deliver = std::move(deliver);
    } else if (!found->Collect(tensor, ticket, std::move(deliver), &delivery)) {
      return;
    }
  }
  delivery.deliver(delivery.status, delivery.data);
}

void Engine::Call(CallSpec spec, const void* input, Allocate allocate, Done done) {
  auto call = std::make_shared<OpenCall>();
  call->input = input;
  call->allocate = std::move(allocate);
  call->done = [done](const Status& status, const std::vector<std::string>&) { done(status); };
  Status status = CheckCall(spec, size(), input, rank());
  if (status.ok()) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    status = state_->Usable();
    if (status.ok() && NeedsPlan(spec.kind)) status = state_->FindPlan(spec.plan, &call->plan);
    if (status.ok() && NeedsPlan(spec.kind)) status = CheckUnits(spec, call->plan->units, size());
    if (status.ok() && call->plan != nullptr && call->plan->sparse) {
      status = Invalid(NameOfCall(spec) + ": its plan is a sparse one, which only a channel's bucket can have");
    }
    if (status.ok() && state_->gone >= 0) {
      status = Communication(NameOfCall(spec) + ": " + state_->HasLeft(state_->gone));
    }
    if (status.ok()) {
      call->spec = std::move(spec);
      state_->Post([state = state_.get(), call] { state->AnnounceCall(call); });
    }
  }
  if (status.ok()) return;
  if (status.code == Code::kInvalid) Refuse(spec.name, status.message);
  done(status);
}

void Engine::Refuse(const std::string& name, const std::string& why) {
  if (name.empty()) return;
  CallAnnouncement refusal;
  refusal.name = name;
  refusal.refusal = why;
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->Usable().ok() || state_->gone >= 0) return;
  state_->Post([state = state_.get(), refusal] { state->Send(0, refusal); });
}

void Engine::Exchange(std::string name, std::string payload, Exchanged done) {
  auto call = std::make_shared<OpenCall>();
  call->spec.kind = Kind::kExchange;
  call->spec.name = std::move(name);
  call->payload = std::move(payload);
  call->done = std::move(done);
  Status status = call->spec.name.empty() ? Invalid("an exchange must have a name, this one's is empty") : Status::Ok();
  if (status.ok()) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    status = state_->Usable();
    if (status.ok() && state_->gone >= 0) status = Communication(call->name() + ": " + state_->HasLeft(state_->gone));
    if (status.ok()) state_->Post([state = state_.get(), call] { state->AnnounceCall(call); });
  }
  if (!status.ok()) call->done(status, {});
}

Status Engine::StartTrace(int64_t capacity) {
  if (capacity < 1) return Invalid("trace: capacity (" + std::to_string(capacity) + ") must be at least 1 record");
  try {
    state_->trace.Start(capacity);
  } catch (const std::bad_alloc&) {
    return Internal("trace: no memory for " + std::to_string(capacity) + " records");
  }
  return Status::Ok();
}

void Engine::StopTrace() {
  auto passed = std::make_shared<std::promise<void>>();
  bool waits = false;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    waits = !state_->stopping && !state_->IsMover();
    if (waits) state_->Post([passed] { passed->set_value(); });
  }
  if (waits) passed->get_future().wait_for(std::chrono::seconds(1));
  state_->trace.Stop();
}

const Trace& Engine::trace() const { return state_->trace; }

Statistics Engine::GetStatistics() const {
  const ExecutorStatistics& moved = state_->executor.statistics();
  return {state_->buckets, state_->calls, moved.segments, moved.bytes_sent, moved.bytes_received};
}

}  // namespace hvd_ext

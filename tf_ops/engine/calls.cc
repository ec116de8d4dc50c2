#include "engine/calls.h"

#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "engine/stall.h"
#include "engine/stall_watch.h"

namespace hvd_ext {
namespace {

// Rank 0 warns of a stalled call first. Another rank, which does not know who is missing, gives it this start.
constexpr double kRank0First_s = 3;

int64_t Elements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (int64_t n : shape) elements *= n;
  return elements;
}

// The status with the call's name in front, which it may have already.
Status Named(const OpenCall& call, const Status& status) {
  std::string name = call.name();
  return {status.code, status.message.rfind(name, 0) == 0 ? status.message : name + ": " + status.message};
}

// Where the result of a call lies in its buffer: parts in bytes, one after the other.
struct Outcome {
  struct Part {
    int64_t begin, nbytes;
  };
  std::vector<int64_t> shape;
  std::vector<Part> parts;
};

// Where each unit begins, in elements, when unit u has rows[u] rows.
std::vector<int64_t> Begins(const std::vector<int64_t>& rows, int64_t elements_each) {
  std::vector<int64_t> begins = {0};
  for (int64_t n : rows) begins.push_back(begins.back() + n * elements_each);
  return begins;
}

// The first ranks get one row more where the rows cannot be divided evenly.
std::vector<int64_t> EvenRows(int64_t rows, int64_t size) {
  std::vector<int64_t> even(static_cast<size_t>(size), rows / size);
  for (int64_t rank = 0; rank < rows % size; ++rank) ++even[static_cast<size_t>(rank)];
  return even;
}

int64_t Sum(const std::vector<int64_t>& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

// The work of a call, with this rank's input in its buffer. `parts` holds dimension 0 of every rank (allgather), or the
// rows from each rank to each (alltoall).
Run RunOf(const OpenCall& call, const std::vector<int64_t>& parts, Core* core, Outcome* outcome) {
  const int rank = core->rank, size = core->size;
  Run run;
  std::vector<int64_t>* shape = &outcome->shape;
  std::vector<size_t> units;  // the result's; empty: all
  run.what = call.name();
  run.plan = call.plan;
  run.dtype = call.spec.dtype;
  run.wire = call.spec.wire;
  run.segment_nbytes = call.spec.segment_nbytes;
  *shape = call.spec.shape;
  int64_t nbytes_each = static_cast<int64_t>(SizeOf(run.dtype));
  int64_t begin = 0;  // where the input goes
  int64_t row = shape->empty() ? 1 : Elements({shape->begin() + 1, shape->end()});
  size_t r = static_cast<size_t>(rank);
  if (call.spec.kind == Kind::kAllgather) {
    run.unit_begins = Begins(parts, row);
    (*shape)[0] = Sum(parts);
    begin = run.unit_begins[r];
  } else if (call.spec.kind == Kind::kReducescatter) {
    std::vector<int64_t> rows = EvenRows((*shape)[0], size);
    run.unit_begins = Begins(rows, row);
    (*shape)[0] = rows[r];
    units = {r};
  } else if (call.spec.kind == Kind::kAlltoall) {
    // Unit s * P + r goes from s to r. Those of other ranks are empty here, so that the buffer holds what comes from
    // the ranks before this one, then this rank's own tensor, then what comes from the others.
    std::vector<int64_t> rows(parts.size(), 0), received;
    for (int64_t from = 0; from < size; ++from) {
      for (int64_t to = 0; to < size; ++to) {
        size_t unit = static_cast<size_t>(from * size + to);
        if (from == rank || to == rank) rows[unit] = parts[unit];
        if (to != rank) continue;
        received.push_back(parts[unit]);
        units.push_back(unit);
      }
    }
    run.unit_begins = Begins(rows, row);
    begin = run.unit_begins[r * static_cast<size_t>(size)];
    (*shape)[0] = Sum(received);
    if (call.spec.received != nullptr) *call.spec.received = std::move(received);
  }
  run.elements = run.unit_begins.empty() ? Elements(*shape) : run.unit_begins.back();
  if (units.empty()) outcome->parts = {{0, run.elements * nbytes_each}};
  for (size_t unit : units) {
    int64_t elements = run.unit_begins[unit + 1] - run.unit_begins[unit];
    outcome->parts.push_back({run.unit_begins[unit] * nbytes_each, elements * nbytes_each});
  }
  run.buffer = std::make_shared<Buffer>(core->pool.Take(run.elements * nbytes_each));
  run.result = core->PlacesOf(run.buffer).result;
  bool reads = call.spec.kind != Kind::kBroadcast || call.spec.root == rank;
  size_t nbytes = static_cast<size_t>(Elements(call.spec.shape) * nbytes_each);
  if (reads && nbytes > 0) {
    core->Fill(run.buffer.get(), begin * nbytes_each, static_cast<int64_t>(nbytes),
               [&](char* at) { std::memcpy(at, call.input, nbytes); });
  }
  return run;
}

// Copies the result out and ends the call.
void EndCall(const OpenCall& call, const Outcome& outcome, const Buffer& result, const Status& status) {
  if (!status.ok()) {
    call.done(Named(call, status), {});
    return;
  }
  void* memory = nullptr;
  Status allocated = call.allocate(outcome.shape, &memory);
  char* to = static_cast<char*>(memory);
  for (const Outcome::Part& part : outcome.parts) {
    if (!allocated.ok() || part.nbytes == 0) continue;
    std::memcpy(to, result.data() + part.begin, static_cast<size_t>(part.nbytes));
    to += part.nbytes;
  }
  call.done(allocated, {});
}

}  // namespace

Calls::Calls(Core* core, Control* control, Executor* executor)
    : core_(core),
      control_(control),
      executor_(executor),
      coordinator_(core->rank == 0 ? std::make_unique<Coordinator>(core->size, core->config.numbers) : nullptr) {}

void Calls::Announce(std::shared_ptr<OpenCall> call) {
  Status refused = core_->failure;
  if (refused.ok() && control_->HasLeft(0)) refused = Communication(call->name() + ": " + core_->HasLeft(0));
  if (!refused.ok()) {
    call->done(refused, {});
    return;
  }
  call->since_s = call->heard_s = core_->now_s;
  int64_t id = next_++;
  CallAnnouncement announcement{call->spec, id, std::nullopt, std::move(call->payload)};
  open_[id] = std::move(call);  // before the message: whatever happens to it, the call is ended
  control_->Send(0, std::move(announcement));
}

std::shared_ptr<OpenCall> Calls::Take(int64_t id) {
  auto found = open_.find(id);
  if (found == open_.end()) return nullptr;
  std::shared_ptr<OpenCall> call = std::move(found->second);
  open_.erase(found);
  return call;
}

void Calls::Handle(int peer, CallAnnouncement announcement) {
  if (coordinator_ == nullptr) return;
  std::vector<Outgoing> out;
  coordinator_->Receive(peer, std::move(announcement), core_->now_s, &out);
  control_->SendAll(std::move(out));
}

void Calls::Handle(const CallStart& start) {
  std::shared_ptr<OpenCall> call = Take(start.id);
  if (call == nullptr) {
    core_->Break(Internal(core_->RankName(0) + " has started a call (" + std::to_string(start.id) +
                          ") that this rank has not made"));
    return;
  }
  Start(call, start);
}

void Calls::Handle(const ZeroCall& zeros) {
  auto call = std::make_shared<OpenCall>();
  static_cast<CallTerms&>(call->spec) = zeros;
  const auto plan = plans_of_zeros_.find(zeros.plan_digest);
  if (plan == plans_of_zeros_.end()) {
    core_->Break(Internal(call->name() + ": " + core_->RankName(0) + " has started it with a plan that this rank, " +
                          "which has joined, does not have"));
    return;
  }
  call->plan = plan->second;
  call->since_s = core_->now_s;
  const auto nbytes = Elements(zeros.shape) * static_cast<int64_t>(SizeOf(zeros.dtype));
  auto memory = std::make_shared<std::vector<char>>(static_cast<size_t>(nbytes));  // the input, then the result
  call->input = memory->data();
  call->allocate = [memory](const std::vector<int64_t>&, void** to) {
    *to = memory->data();
    return Status::Ok();
  };
  call->done = [](const Status&, const std::vector<std::string>&) {};
  CallStart start;
  start.id = next_++;
  Start(call, start);
}

void Calls::HandleJoined(int peer, const std::vector<int64_t>& digests) {
  std::vector<Outgoing> out;
  coordinator_->Join(peer, digests, &out);
  control_->SendAll(std::move(out));
}

void Calls::HandleAllJoined() { coordinator_->EndJoin(); }

void Calls::Start(const std::shared_ptr<OpenCall>& call, const CallStart& start) {
  ++core_->calls;
  Trace* trace = &core_->trace;
  double started_s = trace->on() ? NowSeconds() : -1;
  if (started_s >= 0) {
    bool plans = call->plan != nullptr;
    trace->AddCall(start.id, plans ? call->spec.plan : -1, call->name(), call->since_s, started_s);
  }
  if (call->spec.kind == Kind::kBarrier || call->spec.kind == Kind::kExchange) {
    call->done(Status::Ok(), start.payloads);
    if (started_s >= 0) trace->Add(TraceKind::kCall, kCallsLane, start.id, 0, started_s, NowSeconds());
    return;
  }
  Outcome outcome;
  Run run;
  try {
    run = RunOf(*call, start.rows, core_, &outcome);
  } catch (const std::bad_alloc&) {  // the other ranks have started it, so they must hear of it
    Status failed = Internal(call->name() + ": no memory for its buffer");
    core_->Break(failed);
    call->done(failed, {});
    return;
  }
  if (core_->config.segment_nbytes > 0) run.segment_nbytes = core_->config.segment_nbytes;
  bool reduces = call->spec.kind == Kind::kAllreduce || call->spec.kind == Kind::kReducescatter;
  if (reduces) run.op = call->spec.op;
  if (run.op == ReduceOp::kAverage) run.divisor = core_->size;
  run.id = start.id;
  run.done = [trace, call, outcome, result = run.result, started_s, id = start.id](const Status& status) {
    EndCall(*call, outcome, *result, status);
    if (started_s >= 0) trace->Add(TraceKind::kCall, kCallsLane, id, 0, started_s, NowSeconds());
  };
  executor_->Enqueue(kCallsLane, std::move(run), core_->now_s);
}

void Calls::Handle(const CallRefusal& refusal) {
  std::shared_ptr<OpenCall> call = Take(refusal.id);
  if (call != nullptr) call->done(refusal.status, {});
}

void Calls::Handle(const CallKnown& known) {
  auto call = open_.find(known.id);
  if (call != open_.end()) call->second->heard_s = core_->now_s;
}

void Calls::HandleLeave(int peer) {
  if (coordinator_ != nullptr) {
    std::vector<Outgoing> out;
    coordinator_->Leave(peer, &out);
    control_->SendAll(std::move(out));
  }
  if (peer == 0) EndAll(Communication(core_->HasLeft(0)));
}

void Calls::EndAll(const Status& status) {
  std::map<int64_t, std::shared_ptr<OpenCall>> ended;
  ended.swap(open_);
  for (const auto& [id, call] : ended) call->done(Named(*call, status), {});
}

Status Calls::Watch() {
  const Config& config = core_->config;
  if (coordinator_ != nullptr) {
    std::vector<Outgoing> out;
    std::vector<std::string> warnings;
    Status status = coordinator_->Watch(core_->now_s, config.stall_warn_s, config.stall_fatal_s, &out, &warnings);
    control_->SendAll(std::move(out));
    for (const std::string& text : warnings) Warn(core_->Number(core_->rank), text);
    return status.ok() ? status : StalledTooLong(*core_, status.message);
  }
  // Rank 0 speaks first. Where it is silent, its process has stopped or is unreachable.
  for (const auto& [id, call] : open_) {
    double waited_s = core_->now_s - call->since_s;
    std::string text = call->name() + " has waited " + Seconds(waited_s) + "; " + core_->RankName(0) +
                       ", which knows who is missing, does not answer";
    if (config.stall_fatal_s > 0 && waited_s >= 1.5 * config.stall_fatal_s + kRank0First_s) {
      return StalledTooLong(*core_, text);
    }
    if (config.stall_warn_s <= 0) continue;
    if (core_->now_s - call->heard_s < 1.5 * config.stall_warn_s + kRank0First_s) continue;
    if (!std::exchange(call->silence, true)) Warn(core_->Number(core_->rank), text);
  }
  return Status::Ok();
}

}  // namespace hvd_ext

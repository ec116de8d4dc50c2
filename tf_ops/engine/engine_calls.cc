// Calls and buckets on the engine's thread: from the books to a run of a lane.
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "engine/engine_state.h"

namespace hvd_ext {
namespace {

int64_t Elements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (int64_t n : shape) elements *= n;
  return elements;
}

// The status in the call's name, which it may carry already.
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
Run RunOf(const OpenCall& call, const std::vector<int64_t>& parts, int rank, int size, BufferPool* pool,
          Outcome* outcome) {
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
  run.buffer = std::make_shared<Buffer>(pool->Take(run.elements * nbytes_each));
  bool reads = call.spec.kind != Kind::kBroadcast || call.spec.root == rank;
  size_t nbytes = static_cast<size_t>(Elements(call.spec.shape) * nbytes_each);
  if (reads && nbytes > 0) std::memcpy(run.buffer->data() + begin * nbytes_each, call.input, nbytes);
  return run;
}

// Copies the result out and ends the call.
void EndCall(const OpenCall& call, const Outcome& outcome, const Buffer& buffer, const Status& status) {
  if (!status.ok()) {
    call.done(Named(call, status), {});
    return;
  }
  void* memory = nullptr;
  Status allocated = call.allocate(outcome.shape, &memory);
  char* to = static_cast<char*>(memory);
  for (const Outcome::Part& part : outcome.parts) {
    if (!allocated.ok() || part.nbytes == 0) continue;
    std::memcpy(to, buffer.data() + part.begin, static_cast<size_t>(part.nbytes));
    to += part.nbytes;
  }
  call.done(allocated, {});
}

}  // namespace

void Engine::State::AnnounceCall(std::shared_ptr<OpenCall> call) {
  Status refused = failure;
  if (refused.ok() && left_s_.count(0) > 0) refused = Communication(call->name() + ": " + HasLeft(0));
  if (!refused.ok()) {
    call->done(refused, {});
    return;
  }
  call->since_s = call->heard_s = now_s_;
  int64_t id = next_call_++;
  CallAnnouncement announcement = Announce(id, call->spec, std::move(call->payload));
  open_calls_[id] = std::move(call);  // first: whatever happens to the message, the call is ended
  Send(0, std::move(announcement));
}

std::shared_ptr<OpenCall> Engine::State::TakeCall(int64_t id) {
  auto found = open_calls_.find(id);
  if (found == open_calls_.end()) return nullptr;
  std::shared_ptr<OpenCall> call = std::move(found->second);
  open_calls_.erase(found);
  return call;
}

void Engine::State::StartCall(const CallStart& start) {
  std::shared_ptr<OpenCall> call = TakeCall(start.id);
  if (call == nullptr) {
    broken_ = Internal("rank " + std::to_string(Number(0)) + " has started a call (" + std::to_string(start.id) +
                       ") that this rank has not made");
    return;
  }
  ++calls;
  double started_s = trace.on() ? NowSeconds() : -1;
  if (started_s >= 0) {
    bool plans = call->plan != nullptr;
    trace.AddCall(start.id, plans ? call->spec.plan : -1, call->name(), call->since_s, started_s);
  }
  if (call->spec.kind == Kind::kBarrier || call->spec.kind == Kind::kExchange) {
    call->done(Status::Ok(), start.payloads);
    if (started_s >= 0) trace.Add(TraceKind::kCall, kCallsLane, start.id, 0, started_s, NowSeconds());
    return;
  }
  Outcome outcome;
  Run run;
  try {
    run = RunOf(*call, start.rows, rank, size, &pool, &outcome);
  } catch (const std::bad_alloc&) {  // the others have started it, so they must hear of it
    broken_ = Internal(call->name() + ": no memory for its buffer");
    call->done(broken_, {});
    return;
  }
  if (config.segment_nbytes > 0) run.segment_nbytes = config.segment_nbytes;
  bool reduces = call->spec.kind == Kind::kAllreduce || call->spec.kind == Kind::kReducescatter;
  if (reduces) run.op = call->spec.op;
  if (run.op == ReduceOp::kAverage) run.divisor = size;
  run.id = start.id;
  run.done = [this, call, outcome, buffer = run.buffer, started_s, id = start.id](const Status& status) {
    EndCall(*call, outcome, *buffer, status);
    if (started_s >= 0) trace.Add(TraceKind::kCall, kCallsLane, id, 0, started_s, NowSeconds());
  };
  executor.Enqueue(kCallsLane, std::move(run), now_s_);
}

void Engine::State::RefuseCall(const CallRefusal& refusal) {
  std::shared_ptr<OpenCall> call = TakeCall(refusal.id);
  if (call != nullptr) call->done(refusal.status, {});
}

void Engine::State::EndCalls(const Status& status) {
  std::map<int64_t, std::shared_ptr<OpenCall>> ended;
  ended.swap(open_calls_);
  for (const auto& [id, call] : ended) call->done(Named(*call, status), {});
}

void Engine::State::StartBucket(const std::shared_ptr<Channel>& channel, const std::shared_ptr<ChannelStep>& step,
                                int64_t bucket) {
  const BucketSpec& spec = channel->spec().buckets[static_cast<size_t>(bucket)];
  Run run;
  run.what = channel->NameOfBucket(bucket, *step);
  run.plan = channel->PlanOf(*step, bucket);
  run.sparse = channel->MakeRun(*step, bucket);
  run.dtype = spec.dtype;
  run.wire = spec.wire;
  run.op = spec.op;
  run.divisor = spec.op == ReduceOp::kAverage ? size : 1;
  run.buffer = step->buckets[static_cast<size_t>(bucket)].buffer;
  run.elements = channel->bucket_elements(bucket);
  run.segment_nbytes = config.segment_nbytes > 0 ? config.segment_nbytes : spec.segment_nbytes;
  run.id = step->number;
  run.part = bucket;
  run.done = [this, channel, step, bucket](const Status& status) {
    double ended_s = trace.on() ? NowSeconds() : -1;
    std::vector<Delivery> ended;
    {
      std::lock_guard<std::mutex> lock(mutex);
      channel->EndBucket(step.get(), bucket, status, &ended);
    }
    if (status.ok()) ++buckets;
    for (Delivery& delivery : ended) delivery.deliver(delivery.status, delivery.data);
    int64_t count = static_cast<int64_t>(ended.size());
    if (ended_s >= 0) {
      trace.Add(TraceKind::kDeliver, channel->lane(), step->number, bucket, ended_s, NowSeconds(), count);
    }
    std::lock_guard<std::mutex> lock(mutex);
    channel->Delivered(step.get(), count);
  };
  executor.Enqueue(channel->lane(), std::move(run), now_s_);
  CheckClosed(channel->lane());
}

// Tells the others how far this rank has come in the lane: what they have given to it beyond that can never end.
void Engine::State::CloseLane(int64_t lane) { SendToOthers(LaneClosed{lane, executor.runs(lane)}); }

void Engine::State::CheckClosed(int64_t lane) {
  auto found = closed_.find(lane);
  if (found == closed_.end() || executor.runs(lane) <= found->second.runs) return;
  for (const LaneView& view : executor.Views()) {
    if (view.lane == lane && view.run < found->second.runs) return;  // it ends for all; WatchLanes comes back
  }
  FailLane(lane,
           Communication("rank " + std::to_string(Number(found->second.rank)) + " has closed the channel after " +
                         std::to_string(found->second.runs) + " buckets, rank " + std::to_string(Number(rank)) +
                         " has given it " + std::to_string(executor.runs(lane)) +
                         "; all ranks must train the same number of steps"),
           false);
}

}  // namespace hvd_ext

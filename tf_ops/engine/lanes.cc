#include "engine/lanes.h"

#include <string>
#include <utility>
#include <vector>

namespace hvd_ext {

void Lanes::StartRuns(const std::shared_ptr<Channel>& channel) {
  for (Channel::Ready ready; channel->TakeReady(&ready);) Start(channel, std::move(ready));
}

void Lanes::Start(const std::shared_ptr<Channel>& channel, Channel::Ready ready) {
  const std::shared_ptr<ChannelStep>& step = ready.step;
  const Layout::Bucket& bucket = step->layout->bucket(ready.bucket);
  const BucketSpec& spec = bucket.spec;
  Run run;
  run.what = channel->NameOfBucket(ready.bucket, *step);
  run.plan = bucket.PlanAt(step->topk.density);
  run.sparse = channel->MakeSparseRun(*step, ready.bucket);
  run.dtype = spec.dtype;
  run.wire = spec.wire;
  run.op = spec.op;
  run.divisor = spec.op == ReduceOp::kAverage ? core_->size : 1;
  Core::Places places = core_->PlacesOf(std::move(ready.buffer), channel->on_device());
  run.buffer = std::move(places.buffer);
  run.result = places.result;
  run.arriving = std::move(ready.arriving);
  run.elements = bucket.elements;
  run.segment_nbytes = core_->config.segment_nbytes > 0 ? core_->config.segment_nbytes : spec.segment_nbytes;
  run.id = step->number;
  run.part = ready.bucket;
  run.done = [core = core_, channel, step, bucket = ready.bucket, result = places.result](const Status& status) {
    double ended_s = core->trace.on() ? NowSeconds() : -1;
    std::vector<Delivery> ended;
    const int64_t count = channel->EndRun(step.get(), bucket, status, result, &ended);
    if (status.ok()) ++core->buckets;
    // The callbacks copy the results on this thread. It is the last of several passes that this thread makes over the
    // bucket's memory, and another thread could make it meanwhile only on an idle core; in a step the cores compute.
    DeliverAll(ended);
    if (ended_s >= 0) {
      core->trace.Add(TraceKind::kDeliver, channel->lane(), step->number, bucket, ended_s, NowSeconds(), count);
    }
    channel->Delivered(step.get(), count);
  };
  executor_->Enqueue(channel->lane(), std::move(run), core_->now_s);
  CheckClosed(channel->lane());
}

void Lanes::Close(int64_t lane) { control_->SendToOthers(LaneClosed{lane, executor_->runs(lane)}); }

void Lanes::Fail(int64_t lane, const Status& status, bool tell) {
  std::vector<Delivery> ended;
  if (!registry_->FailLane(lane, status, &ended)) return;
  if (tell) {
    control_->SendToOthers(LaneFailed{lane, Communication(core_->RankName(core_->rank) + ": " + status.message)});
  }
  executor_->Fail(lane, status);
  DeliverAll(ended);
}

void Lanes::Handle(int peer, const LaneClosed& closed) {
  auto [place, fresh] = closed_.try_emplace(closed.lane, Closed{closed.runs, peer});
  if (!fresh && closed.runs < place->second.runs) place->second = {closed.runs, peer};
  CheckClosed(closed.lane);
}

int Lanes::ClosedBy(int64_t lane) const {
  auto found = closed_.find(lane);
  return found == closed_.end() ? -1 : found->second.rank;
}

void Lanes::CheckClosed(int64_t lane) {
  auto found = closed_.find(lane);
  if (found == closed_.end() || executor_->runs(lane) <= found->second.runs) return;
  for (const LaneView& view : executor_->Views()) {
    if (view.lane == lane && view.run < found->second.runs) return;  // that run ends for all; the watch looks again
  }
  Fail(lane,
       Communication(core_->RankName(found->second.rank) + " has closed the channel after " +
                     std::to_string(found->second.runs) + " buckets, " + core_->RankName(core_->rank) +
                     " has given it " + std::to_string(executor_->runs(lane)) +
                     "; all ranks must train the same number of steps"),
       false);
}

}  // namespace hvd_ext

#include "engine/partial_rounds.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/stall.h"
#include "engine/stall_watch.h"

namespace hvd_ext {

std::vector<int> RelaysOf(const std::vector<int>& hosts, int rank) {
  std::vector<int> leaders;  // the first rank of each host, in the order of the ranks: rank 0 is the first
  std::vector<int> seen;
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (std::find(seen.begin(), seen.end(), hosts[i]) != seen.end()) continue;
    seen.push_back(hosts[i]);
    leaders.push_back(static_cast<int>(i));
  }
  const auto mine = std::find(leaders.begin(), leaders.end(), rank);
  if (mine == leaders.end()) return {};
  std::vector<int> relays;
  const size_t place = static_cast<size_t>(mine - leaders.begin());
  size_t step = 1;
  while (step <= place) step *= 2;
  for (; place + step < leaders.size(); step *= 2) relays.push_back(leaders[place + step]);
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (static_cast<int>(i) != rank && hosts[i] == hosts[static_cast<size_t>(rank)]) {
      relays.push_back(static_cast<int>(i));
    }
  }
  return relays;
}

PartialRounds::Lane* PartialRounds::Find(int64_t lane) {
  auto found = lanes_of_.find(lane);
  return found == lanes_of_.end() ? nullptr : &found->second;
}

void PartialRounds::Open(const PartialChannel& opened) {
  const PartialSpec& spec = opened.gate->spec();
  Lane lane(opened);
  lane.relays = RelaysOf(spec.hosts, core_->rank);
  if (core_->rank == 0) lane.opener.emplace(spec, core_->size);
  const int64_t number = opened.channel->lane();
  lanes_of_.emplace(number, std::move(lane));
  auto early = early_.find(number);
  if (early == early_.end()) return;
  const Early came = std::move(early->second);
  early_.erase(early);
  for (const auto& [peer, arrival] : came.arrivals) Handle(peer, arrival);
  for (const RoundsOpen& open : came.opens) Handle(open);
}

void PartialRounds::Arrive(int64_t lane) {
  Lane* found = Find(lane);
  RoundArrival arrival;
  if (found == nullptr) return;
  if (found->gate->TakeArrival(&arrival.step, &arrival.full)) {
    arrival.lane = lane;
    control_->Send(0, arrival);
  }
  Start(found);  // the bound may have waited for it
}

void PartialRounds::Leave(int64_t lane) {
  Lane* found = Find(lane);
  if (found == nullptr) return;
  found->gate->Leave();
  RoundArrival arrival;
  arrival.lane = lane;
  arrival.left = true;
  control_->Send(0, arrival);
  Start(found);
}

void PartialRounds::SetQuorum(int64_t lane, int64_t quorum) {
  Lane* found = Find(lane);
  if (found == nullptr || !found->opener) return;
  found->opener->SetQuorum(quorum);
  TellOpened(lane, found);
}

void PartialRounds::Handle(int peer, const RoundArrival& arrival) {
  Lane* found = Find(arrival.lane);
  if (found == nullptr) {
    early_[arrival.lane].arrivals.emplace_back(peer, arrival);
    return;
  }
  if (!found->opener) return;
  if (arrival.left) {
    found->opener->Leave(peer);
  } else {
    found->opener->Arrive(peer, arrival.step, arrival.full);
    found->gate->Came(peer, arrival.step);
  }
  TellOpened(arrival.lane, found);
}

void PartialRounds::TellOpened(int64_t number, Lane* lane) {
  RoundsOpen open;
  open.lane = number;
  open.round = lane->opener->Opened();
  open.end = lane->opener->TakeEnd();
  if (open.round == lane->told && !open.end) return;
  lane->told = open.round;
  Handle(open);
}

void PartialRounds::Handle(const RoundsOpen& open) {
  Lane* found = Find(open.lane);
  if (found == nullptr) {
    early_[open.lane].opens.push_back(open);
    return;
  }
  for (int peer : found->relays) control_->Send(peer, open);
  found->gate->Open(open.round);
  if (open.end) {
    std::vector<Delivery> ended;
    found->gate->End(open.round, &ended);
    DeliverAll(ended);
  }
  Start(found);
}

// Every rank takes part in every round, so none begins without a rank that is gone. Words of open rounds, and the end
// of those that run, may still be on their way.
void PartialRounds::WatchGone(int64_t number, Lane* lane) {
  std::string gone;
  if (int rank = lanes_->ClosedBy(number); rank >= 0) {
    gone = core_->RankName(rank) + " has closed the channel; all ranks must train the same number of steps";
  }
  for (int peer = 0; gone.empty() && peer < core_->size; ++peer) {
    if (peer != core_->rank && control_->HasLeft(peer)) gone = core_->HasLeft(peer);
  }
  const int64_t round = gone.empty() ? 0 : lane->gate->WaitsFor();
  if (round != lane->lost) {
    lane->lost = round;
    lane->lost_s = core_->now_s;
  }
  if (round == 0 || core_->now_s - lane->lost_s < core_->config.leave_grace_s) return;
  const std::string what = "round " + std::to_string(round) + " of '" + lane->channel->name() + "'";
  lanes_->Fail(number, Communication(what + ": " + gone), true);
}

// Rounds that are open and do not run are found by the watch over lanes: some ranks have begun them.
Status PartialRounds::Watch() {
  const Config& config = core_->config;
  for (auto& [number, lane] : lanes_of_) {
    WatchGone(number, &lane);
    if (!lane.opener) continue;
    RoundWait wait = lane.opener->Waits();
    if (!wait.begun) continue;
    if (lane.watched != wait.round) {
      lane.watched = wait.round;
      lane.waits_s = core_->now_s;
      lane.named.clear();
    }
    const double waited_s = core_->now_s - lane.waits_s;
    const std::string text = WaitsForRound(lane.channel->name(), waited_s, wait, config.numbers);
    if (config.stall_fatal_s > 0 && waited_s >= config.stall_fatal_s) return StalledTooLong(*core_, text);
    if (config.stall_warn_s <= 0 || waited_s < config.stall_warn_s || lane.named == wait.ranks) continue;
    Warn(core_->Number(core_->rank), text);
    lane.named = std::move(wait.ranks);
  }
  return Status::Ok();
}

void PartialRounds::Start(Lane* lane) {
  while (lane->channel->BeginRound()) {
  }
  lanes_->StartRuns(lane->channel);
}

}  // namespace hvd_ext

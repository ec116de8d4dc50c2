// The watch over ranks that stay away. For calls rank 0 knows who is missing. For lanes the rank whose work stands
// still asks rank 0, which asks all how far they are; no step of this waits in the loop.
#include <algorithm>
#include <utility>

#include "engine/engine_state.h"

namespace hvd_ext {
namespace {

constexpr double kReply_s = 1;    // rank 0 gives the others this long to say how far they are
constexpr double kVerdict_s = 3;  // a rank gives rank 0 this long; also the start that rank 0 has in a stalled call
// A rank that was not running must not take its own absence for a peer's silence: it has to have looked this often.
constexpr int kQuietLooks = 20;

}  // namespace

void Engine::State::Watch() {
  if (!failure.ok()) return;
  WatchLanes();
  WatchCalls();
  WatchInquiries();
}

void Engine::State::WatchLanes() {
  for (const LaneView& view : executor.Views()) {
    CheckClosed(view.lane);
    LaneWatch& watch = watches_[view.lane];
    if (watch.progress_s != view.progress_s) {
      watch = LaneWatch{};
      watch.progress_s = view.progress_s;
    }
    ++watch.quiet;
    if (LostByLeave(view, watch)) continue;
    double waited_s = now_s_ - view.progress_s;
    bool fatal = config.stall_fatal_s > 0 && waited_s >= config.stall_fatal_s;
    bool warn = config.stall_warn_s > 0 && waited_s >= config.stall_warn_s * static_cast<double>(watch.warnings + 1);
    if (watch.asked_s >= 0) {
      watch.fatal |= fatal;
      if (now_s_ - watch.asked_s < kVerdict_s) continue;
      watch.asked_s = -1;
      std::string text = view.what + " has waited " + Seconds(waited_s) + "; rank " + std::to_string(Number(0)) +
                         ", which finds out who is missing, does not answer";
      if (watch.fatal) {
        FailByStall(text);
        return;
      }
      PrintForLane(view.lane, view.run, view.progress_s, "rank 0 does not answer", text);
    } else if (fatal || warn) {
      if (warn) watch.warnings = static_cast<int64_t>(waited_s / config.stall_warn_s);
      watch.fatal = fatal;
      Ask(view, &watch, waited_s);
    }
  }
}

// A lane that waits for messages of a peer that has left, and they do not come: they were never sent. Lanes that wait
// for others go on; if those are held up in turn, they say so.
bool Engine::State::LostByLeave(const LaneView& view, const LaneWatch& watch) {
  if (watch.quiet < kQuietLooks) return false;
  for (int peer : view.peers) {
    auto left = left_s_.find(peer);
    if (left == left_s_.end() || now_s_ - std::max(view.progress_s, left->second) < config.leave_grace_s) continue;
    FailLane(view.lane, Communication(view.what + ": " + HasLeft(peer)), true);
    return true;
  }
  return false;
}

void Engine::State::Ask(const LaneView& view, LaneWatch* watch, double waited_s) {
  watch->asked_s = now_s_;
  Send(0, StallQuestion{view.lane, view.run, waited_s, view.what});
}

void Engine::State::HandleQuestion(int peer, const StallQuestion& question) {
  Inquiry inquiry{peer, question.lane, question.run, question.waited_s, now_s_, question.what, {}};
  inquiry.reports.resize(static_cast<size_t>(size));
  StallProbe probe{question.lane, next_inquiry_++};
  inquiries_.emplace(probe.inquiry, std::move(inquiry));
  SendToOthers(probe);
  Send(rank, probe);
}

void Engine::State::HandleProbe(const StallProbe& probe) {
  LaneReport report;
  if (probe.lane > kCallsLane) {
    std::lock_guard<std::mutex> lock(mutex);
    if (probe.lane > static_cast<int64_t>(channels.size())) {
      report.state = LaneReport::kNotOpened;
    } else if (const auto& channel = channels[static_cast<size_t>(probe.lane - 1)]; channel == nullptr) {
      report.state = LaneReport::kClosed;
    } else {
      report = channel->Report();
    }
  }
  // Buckets in the inbox count too, so that a rank is not called missing for what it has submitted a moment ago.
  report.runs = std::max(report.runs, executor.runs(probe.lane));
  Send(0, StallReport{probe.inquiry, std::move(report)});
}

void Engine::State::HandleReport(int peer, const StallReport& report) {
  auto found = inquiries_.find(report.inquiry);
  if (found == inquiries_.end()) return;  // it came too late
  LaneReport& place = found->second.reports[static_cast<size_t>(peer)];
  place = report.report;
  place.answered = true;
  const std::vector<LaneReport>& all = found->second.reports;
  if (!std::all_of(all.begin(), all.end(), [](const LaneReport& r) { return r.answered; })) return;
  Answer(found->second);
  inquiries_.erase(found);
}

void Engine::State::WatchInquiries() {
  for (auto it = inquiries_.begin(); it != inquiries_.end();) {
    if (now_s_ - it->second.since_s < kReply_s) {
      ++it;
      continue;
    }
    Answer(it->second);
    it = inquiries_.erase(it);
  }
}

void Engine::State::Answer(const Inquiry& inquiry) {
  double waited_s = inquiry.waited_s + now_s_ - inquiry.since_s;
  std::string text = WaitsForLane(inquiry.what, waited_s, inquiry.run, inquiry.reports, config.numbers);
  std::string who = WhoIsMissing(inquiry.run, inquiry.reports, config.numbers);
  Send(inquiry.asker, StallVerdict{inquiry.lane, text});
  PrintForLane(inquiry.lane, inquiry.run, inquiry.since_s - inquiry.waited_s, who, text);
}

void Engine::State::HandleVerdict(const StallVerdict& verdict) {
  auto found = watches_.find(verdict.lane);
  if (found == watches_.end() || found->second.asked_s < 0) return;
  LaneWatch& watch = found->second;
  watch.asked_s = -1;
  for (const LaneView& view : executor.Views()) {
    if (view.lane != verdict.lane || view.progress_s != watch.progress_s) continue;  // it has moved since
    if (watch.fatal) FailByStall(verdict.text);
    return;
  }
}

// Rank 0 hears of one stall from every rank that waits, again and again, and prints it once. A wait in the same run, or
// one that began before the last report, belongs to the stall that was reported; only other words about who is missing
// are news of it.
void Engine::State::PrintForLane(int64_t lane, int64_t run, double since_s, const std::string& who,
                                 const std::string& text) {
  if (config.stall_warn_s <= 0) return;  // asked for the limit's sake only
  Printed& printed = printed_.try_emplace(lane, Printed{run, now_s_, {}}).first->second;
  if (run != printed.run && since_s > printed.at_s) printed = {run, now_s_, {}};
  if (printed.who.insert(who).second) hvd_ext::Warn(Number(rank), text);
}

void Engine::State::FailByStall(const std::string& text) {
  FailEverything(
      Communication(text + ", longer than the limit (" + Seconds(config.stall_fatal_s) + ", HVD_EXT_STALL_FATAL_S)"),
      true);
}

void Engine::State::WatchCalls() {
  if (coordinator_ != nullptr) {
    std::vector<Outgoing> out;
    std::vector<std::string> warnings;
    Status status = coordinator_->Watch(now_s_, config.stall_warn_s, config.stall_fatal_s, &out, &warnings);
    SendAll(out);
    for (const std::string& text : warnings) hvd_ext::Warn(Number(rank), text);
    if (!status.ok()) FailByStall(status.message);
    return;
  }
  // Rank 0 speaks first; where it is silent, its process has stopped or is unreachable.
  for (const auto& [id, call] : open_calls_) {
    double waited_s = now_s_ - call->since_s;
    std::string text = call->name() + " has waited " + Seconds(waited_s) + "; rank " + std::to_string(Number(0)) +
                       ", which knows who is missing, does not answer";
    if (config.stall_fatal_s > 0 && waited_s >= 1.5 * config.stall_fatal_s + kVerdict_s) {
      FailByStall(text);
      return;
    }
    if (config.stall_warn_s <= 0 || now_s_ - call->heard_s < 1.5 * config.stall_warn_s + kVerdict_s) continue;
    if (!std::exchange(call->silence, true)) hvd_ext::Warn(Number(rank), text);
  }
}

}  // namespace hvd_ext

#include "engine/stall_watch.h"

#include <algorithm>
#include <utility>

namespace hvd_ext {
namespace {

constexpr double kReply_s = 1;    // how long rank 0 waits for the reports of all ranks
constexpr double kVerdict_s = 3;  // how long a rank waits for rank 0's verdict
// A rank that was not running must not take its own absence for a peer's silence: it has to have looked this often.
constexpr int kQuietLooks = 20;

}  // namespace

Status StalledTooLong(const Core& core, const std::string& text) {
  return Communication(text + ", longer than the limit (" + Seconds(core.config.stall_fatal_s) +
                       ", HVD_EXT_STALL_FATAL_S)");
}

Status StallWatch::Look() {
  HVD_EXT_RETURN_IF_ERROR(WatchLanes());
  for (auto it = inquiries_.begin(); it != inquiries_.end();) {
    if (core_->now_s - it->second.since_s < kReply_s) {
      ++it;
      continue;
    }
    Answer(it->second);
    it = inquiries_.erase(it);
  }
  return Status::Ok();
}

Status StallWatch::WatchLanes() {
  const Config& config = core_->config;
  for (const LaneView& view : executor_->Views()) {
    lanes_->CheckClosed(view.lane);
    LaneWatch& watch = watches_[view.lane];
    if (watch.progress_s != view.progress_s) {
      watch = LaneWatch{};
      watch.progress_s = view.progress_s;
    }
    ++watch.quiet;
    if (LostByLeave(view, watch)) continue;
    double waited_s = core_->now_s - view.progress_s;
    bool fatal = config.stall_fatal_s > 0 && waited_s >= config.stall_fatal_s;
    bool warn = config.stall_warn_s > 0 && waited_s >= config.stall_warn_s * static_cast<double>(watch.warnings + 1);
    if (watch.asked_s >= 0) {
      watch.fatal |= fatal;
      if (core_->now_s - watch.asked_s < kVerdict_s) continue;
      watch.asked_s = -1;
      std::string text = view.what + " has waited " + Seconds(waited_s) + "; " + core_->RankName(0) +
                         ", which finds out who is missing, does not answer";
      if (watch.fatal) return StalledTooLong(*core_, text);
      Print(view.lane, view.run, view.progress_s, "rank 0 does not answer", text);
    } else if (fatal || warn) {
      if (warn) watch.warnings = static_cast<int64_t>(waited_s / config.stall_warn_s);
      watch.fatal = fatal;
      watch.asked_s = core_->now_s;
      control_->Send(0, StallQuestion{view.lane, view.run, waited_s, view.what});
    }
  }
  return Status::Ok();
}

// Fails a lane that waits for messages of a peer that has left: they do not come, so they were never sent. Lanes that
// wait for other peers go on; if those peers are held up in turn, they say so.
bool StallWatch::LostByLeave(const LaneView& view, const LaneWatch& watch) {
  if (watch.quiet < kQuietLooks) return false;
  for (int peer : view.peers) {
    double left_s = control_->LeftAt(peer);
    if (left_s < 0 || core_->now_s - std::max(view.progress_s, left_s) < core_->config.leave_grace_s) continue;
    lanes_->Fail(view.lane, Communication(view.what + ": " + core_->HasLeft(peer)), true);
    return true;
  }
  return false;
}

void StallWatch::Handle(int peer, const StallQuestion& question) {
  StallProbe probe{question.lane, next_inquiry_++};
  inquiries_.emplace(probe.inquiry,
                     Inquiry{peer, question, core_->now_s, std::vector<LaneReport>(static_cast<size_t>(core_->size))});
  control_->SendToOthers(probe);
  control_->Send(core_->rank, probe);
}

void StallWatch::Handle(const StallProbe& probe) {
  LaneReport report;
  if (probe.lane > kCallsLane) report = registry_->Report(probe.lane);
  // The channel counts buckets in the inbox too, so that a rank is not called missing for what it has submitted a
  // moment ago.
  report.runs = std::max(report.runs, executor_->runs(probe.lane));
  control_->Send(0, StallReport{probe.inquiry, std::move(report)});
}

void StallWatch::Handle(int peer, const StallReport& report) {
  auto found = inquiries_.find(report.inquiry);
  if (found == inquiries_.end()) return;  // it came too late
  std::vector<LaneReport>& all = found->second.reports;
  LaneReport& place = all[static_cast<size_t>(peer)];
  place = report.report;
  place.answered = true;
  if (!std::all_of(all.begin(), all.end(), [](const LaneReport& r) { return r.answered; })) return;
  Answer(found->second);
  inquiries_.erase(found);
}

void StallWatch::Answer(const Inquiry& inquiry) {
  const StallQuestion& question = inquiry.question;
  const std::vector<int>& numbers = core_->config.numbers;
  double waited_s = question.waited_s + core_->now_s - inquiry.since_s;
  std::string text = WaitsForLane(question.what, waited_s, question.run, inquiry.reports, numbers);
  std::string who = WhoIsMissing(question.run, inquiry.reports, numbers);
  control_->Send(inquiry.asker, StallVerdict{question.lane, text});
  Print(question.lane, question.run, inquiry.since_s - question.waited_s, who, text);
}

Status StallWatch::Handle(const StallVerdict& verdict) {
  auto found = watches_.find(verdict.lane);
  if (found == watches_.end() || found->second.asked_s < 0) return Status::Ok();
  LaneWatch& watch = found->second;
  watch.asked_s = -1;
  for (const LaneView& view : executor_->Views()) {
    if (view.lane != verdict.lane || view.progress_s != watch.progress_s) continue;  // it has moved since
    return watch.fatal ? StalledTooLong(*core_, verdict.text) : Status::Ok();
  }
  return Status::Ok();
}

// Rank 0 hears of one stall from every rank that waits, again and again, and prints it once. A wait in the same run, or
// one that began before the last report, belongs to the stall that was reported; only other words about who is missing
// are news of it.
void StallWatch::Print(int64_t lane, int64_t run, double since_s, const std::string& who, const std::string& text) {
  if (core_->config.stall_warn_s <= 0) return;  // rank 0 was asked because of the limit only
  Printed& printed = printed_.try_emplace(lane, Printed{run, core_->now_s, {}}).first->second;
  if (run != printed.run && since_s > printed.at_s) printed = {run, core_->now_s, {}};
  if (printed.who.insert(who).second) Warn(core_->Number(core_->rank), text);
}

}  // namespace hvd_ext

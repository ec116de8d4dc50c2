#include "engine/stall.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace hvd_ext {
namespace {

std::atomic<void (*)(const std::string&)> warning_sink{nullptr};

std::string StateOf(const LaneReport& report) {
  if (!report.answered) return "it does not answer";
  if (report.state == LaneReport::kNotOpened) return "it has not opened the channel";
  if (report.state == LaneReport::kClosed) return "it has closed the channel";
  if (report.state == LaneReport::kNotBegun) return "it has not begun the step";
  if (report.state == LaneReport::kAtBound) {
    return "its next gradient is not there, and it is as far behind as its staleness allows";
  }
  if (report.missing > 0) return NameList(report.names, report.missing) + " not submitted";
  return "it has not reached this point";
}

}  // namespace

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

std::string HasLeft(int rank) {
  return "rank " + std::to_string(rank) +
         " has shut down: it called shutdown() or its program has ended, so no collective can end any more; all ranks "
         "must make the same calls and train the same number of steps";
}

std::string InSet(const std::vector<int>& numbers) {
  return numbers.empty() ? "" : " in the process set of ranks " + Joined(numbers);
}

std::string WaitsForCall(const std::string& what, double waited_s, const std::vector<int>& missing) {
  bool one = missing.size() == 1;
  return what + " has waited " + Seconds(waited_s) + " for rank" + (one ? " " : "s ") + Joined(missing) +
         (one ? " (it has not called it)" : " (they have not called it)");
}

std::string WhoIsMissing(int64_t run, const std::vector<LaneReport>& reports, const std::vector<int>& numbers) {
  std::string ranks;
  int count = 0;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const LaneReport& report = reports[rank];
    if (report.answered && report.runs > run) continue;
    ranks += (count++ > 0 ? ", " : "") + std::to_string(NumberOf(numbers, static_cast<int>(rank))) + " (" +
             StateOf(report) + ")";
  }
  if (count > 0) return (count == 1 ? "for rank " : "for ranks ") + ranks;
  return "for messages: all ranks take part in it, but nothing arrives";
}

std::string WaitsForLane(const std::string& what, double waited_s, int64_t run, const std::vector<LaneReport>& reports,
                         const std::vector<int>& numbers) {
  return what + InSet(numbers) + " has waited " + Seconds(waited_s) + " " + WhoIsMissing(run, reports, numbers);
}

std::string WaitsForRound(const std::string& channel, double waited_s, const RoundWait& wait,
                          const std::vector<int>& numbers) {
  std::vector<int> ranks;
  for (int rank : wait.ranks) ranks.push_back(NumberOf(numbers, rank));
  const bool one = wait.ranks.size() == 1;
  const bool any = wait.count < static_cast<int64_t>(wait.ranks.size());
  return "round " + std::to_string(wait.round) + " of '" + channel + "'" + InSet(numbers) + " has waited " +
         Seconds(waited_s) + " for " + (any ? std::to_string(wait.count) + " of " : "") + (one ? "rank " : "ranks ") +
         Joined(ranks) + (one ? " (its gradient is not there)" : " (their gradients are not there)");
}

std::string NameList(const std::vector<std::string>& names, int64_t total) {
  std::string text;
  size_t shown = names.size() < kNamesShown ? names.size() : kNamesShown;
  for (size_t i = 0; i < shown; ++i) text += (i > 0 ? ", '" : "'") + names[i] + "'";
  int64_t more = total - static_cast<int64_t>(shown);
  return more > 0 ? text + " and " + std::to_string(more) + " more" : text;
}

void Warn(int rank, const std::string& text) {
  std::string line = "hvd_ext: [rank " + std::to_string(rank) + "] " + text + "\n";
  if (auto sink = warning_sink.load()) {
    sink(line);
    return;
  }
  // One write: the lines of several ranks on one terminal stay whole.
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

void SetWarningSink(void (*sink)(const std::string&)) { warning_sink = sink; }

}  // namespace hvd_ext

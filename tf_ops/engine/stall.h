// The words about ranks that stay away, and where warnings are printed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/rounds.h"

namespace hvd_ext {

// How far a rank is in a lane, as it says when it is asked.
struct LaneReport {
  enum State : int64_t { kOpen = 0, kNotOpened = 1, kClosed = 2, kNotBegun = 3, kAtBound = 4 };

  bool answered = false;
  // kNotBegun: no step under way; kAtBound: with partial rounds, the staleness allows no round before its next gradient
  int64_t state = kOpen;
  int64_t runs = 0;                // buckets (calls) it has given to the lane so far
  int64_t missing = 0;             // tensors that its next bucket still lacks
  std::vector<std::string> names;  // of the first of those tensors
};

constexpr size_t kNamesShown = 5;

// The number under which people know a rank: its rank in the job, also in an engine of some of the job's ranks.
inline int NumberOf(const std::vector<int>& numbers, int rank) {
  return numbers.empty() ? rank : numbers[static_cast<size_t>(rank)];
}
// " in the process set of ranks 0, 2"; empty for the job.
std::string InSet(const std::vector<int>& numbers);
// "0, 2"
template <typename Number>
std::string Joined(const std::vector<Number>& numbers) {
  std::string text;
  for (Number number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}
// "60 s", "0.5 s"
std::string Seconds(double seconds);
// "rank 2 has shut down: ..."
std::string HasLeft(int rank);
// "allreduce 'x' has waited 60 s for ranks 2, 3 (they have not called it)"
std::string WaitsForCall(const std::string& what, double waited_s, const std::vector<int>& missing);
// "for rank 2 ('a', 'b' not submitted)": the ranks that run `run` of a lane waits for.
std::string WhoIsMissing(int64_t run, const std::vector<LaneReport>& reports, const std::vector<int>& numbers = {});
// "bucket 1 of 'Adam' (step 3) has waited 60 s for rank 2 ('a', 'b' not submitted)"; `run` is the run of the lane that
// waits.
std::string WaitsForLane(const std::string& what, double waited_s, int64_t run, const std::vector<LaneReport>& reports,
                         const std::vector<int>& numbers = {});
// "round 7 of 'Adam' has waited 60 s for rank 2 (its gradient is not there)", "for 1 of ranks 2, 3 (...)": a partial
// round that is not open.
std::string WaitsForRound(const std::string& channel, double waited_s, const RoundWait& wait,
                          const std::vector<int>& numbers = {});
// "'a', 'b' and 7 more"
std::string NameList(const std::vector<std::string>& names, int64_t total);

// Prints "hvd_ext: [rank 1] ..." as one line to stderr, at once and whole.
void Warn(int rank, const std::string& text);
// For tests: warnings go to `sink` instead; null restores stderr.
void SetWarningSink(void (*sink)(const std::string& text));

}  // namespace hvd_ext

// Control messages between the engines of a job, and their bytes. A message is a struct, and HVD_EXT_FIELDS lists what
// travels of it, in order, for encoding and decoding alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/stall.h"

#define HVD_EXT_FIELDS(...)                       \
  auto Fields() { return std::tie(__VA_ARGS__); } \
  auto Fields() const { return std::tie(__VA_ARGS__); }

namespace hvd_ext {

// --- Calls. Each rank numbers its own calls: `id` is the receiver's number of the call, in an announcement the
// sender's.

// Any rank to rank 0: this rank has made the call, or has refused to.
struct CallAnnouncement : CallTerms {
  int64_t id = -1;  // -1: no rank waits for an answer
  // This rank has refused its own call with these words: of the terms only the name counts.
  std::optional<std::string> refusal;
  std::string payload;  // of an exchange

  HVD_EXT_FIELDS(id, name, refusal, kind, dtype, op, root, plan_digest, segment_nbytes, wire, counted, shape, splits,
                 agrees, signature, users_dtype, payload)
};

// Rank 0 to all: run the call now.
struct CallStart {
  int64_t id = 0;
  std::vector<int64_t> rows;          // allgather: dimension 0 of every rank; alltoall: the rows from each rank to each
  std::vector<std::string> payloads;  // exchange: by rank; empty for ranks that have joined

  HVD_EXT_FIELDS(id, rows, payloads)
};

// Rank 0 to those who have announced the call: end it with this status.
struct CallRefusal {
  int64_t id = 0;
  Status status;

  HVD_EXT_FIELDS(id, status)
};

// Rank 0 to those who have announced the call: it knows that they wait.
struct CallKnown {
  int64_t id = 0;

  HVD_EXT_FIELDS(id)
};

// --- Lanes

// Any rank to all others: nothing runs on this lane any more.
struct LaneFailed {
  int64_t lane = 0;
  Status status;

  HVD_EXT_FIELDS(lane, status)
};

// Any rank to all others: the sender takes part in `runs` runs of this lane and in no more.
struct LaneClosed {
  int64_t lane = 0;
  int64_t runs = 0;

  HVD_EXT_FIELDS(lane, runs)
};

// Any rank to rank 0, of a partial channel: the sender's gradient of `step` is there, and its round waits for all ranks
// where it is `full`; or the sender gives no more gradients until all ranks have left.
struct RoundArrival {
  int64_t lane = 0, step = 0;
  bool full = false, left = false;

  HVD_EXT_FIELDS(lane, step, full, left)
};

// From rank 0 to all, along a tree: the rounds up to this one are open; all ranks have left where it is the `end`.
struct RoundsOpen {
  int64_t lane = 0, round = 0;
  bool end = false;

  HVD_EXT_FIELDS(lane, round, end)
};

// Any rank to rank 0: the sender's run of this lane has made no progress for `waited_s`; who holds it up?
struct StallQuestion {
  int64_t lane = 0, run = 0;
  double waited_s = 0;
  std::string what;  // the run's name

  HVD_EXT_FIELDS(lane, run, waited_s, what)
};

// Rank 0 to all: how far are you in this lane?
struct StallProbe {
  int64_t lane = 0;
  int64_t inquiry = 0;  // rank 0's number of the question

  HVD_EXT_FIELDS(lane, inquiry)
};

// The answer to a probe.
struct StallReport {
  int64_t inquiry = 0;
  LaneReport report;

  HVD_EXT_FIELDS(inquiry, report.state, report.runs, report.missing, report.names)
};

// Rank 0 to the rank that has asked: what holds the lane up.
struct StallVerdict {
  int64_t lane = 0;
  std::string text;

  HVD_EXT_FIELDS(lane, text)
};

// --- Joining (joining.h)

// Any rank to rank 0: the sender gives zeros until all ranks have joined. It has the plans with these digests.
struct RankJoined {
  std::vector<int64_t> digests;
  std::string payload;

  HVD_EXT_FIELDS(digests, payload)
};

// Rank 0 to the ranks that have not joined: another rank has.
struct OthersJoined {
  HVD_EXT_FIELDS()
};

// Any rank to rank 0, and from there to the ranks that have joined: how far the sender is with a channel.
struct StepReached : StepPlace {
  int64_t lane = 0;

  HVD_EXT_FIELDS(lane, runs, density, momentum, ended, committed, committed_before)
};

// Rank 0 to the ranks that have joined: take part in this call with zeros.
struct ZeroCall : CallTerms {
  HVD_EXT_FIELDS(name, kind, dtype, op, plan_digest, segment_nbytes, wire, shape, signature)
};

// Rank 0 to all: all ranks have joined.
struct AllJoined {
  int64_t last = 0;
  std::vector<std::string> payloads;  // by rank

  HVD_EXT_FIELDS(last, payloads)
};

// --- Life

// Any rank to all others: the sender's engine has failed.
struct EngineFailed {
  Status status;

  HVD_EXT_FIELDS(status)
};

// Any rank to all others, its last message: the sender shuts down.
struct ShuttingDown {
  HVD_EXT_FIELDS()
};

// The place of a struct in this list is its number in the bytes.
using ControlMessage =
    std::variant<CallAnnouncement, CallStart, CallRefusal, CallKnown, LaneFailed, LaneClosed, RoundArrival, RoundsOpen,
                 StallQuestion, StallProbe, StallReport, StallVerdict, RankJoined, OthersJoined, StepReached, ZeroCall,
                 AllJoined, EngineFailed, ShuttingDown>;

#undef HVD_EXT_FIELDS

std::string Encode(const ControlMessage& message);

// Refuses bytes that are not one whole message (kInternal).
Status Decode(const std::string& bytes, ControlMessage* message);

}  // namespace hvd_ext

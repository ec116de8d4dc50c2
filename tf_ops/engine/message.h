// Control messages between the engines of a job, and their bytes. A message is a struct, and Fields lists what travels
// of it, in order, for encoding and decoding alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/stall.h"

namespace hvd_ext {

// --- Calls. Each rank numbers its own calls: `id` is the receiver's number of the call, in an announcement the
// sender's.

// Any rank to rank 0: this rank has made the call, or has refused to.
struct CallAnnouncement {
  int64_t id = -1;  // -1: no rank waits for an answer
  std::string name;
  std::optional<std::string> refusal;  // this rank has refused its own call with these words; what follows is not used
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kSum;
  int64_t root = 0;
  int64_t plan_digest = 0;
  int64_t segment_nbytes = 0;
  std::optional<DType> wire;
  bool counted = false;
  std::vector<int64_t> shape;
  std::optional<std::vector<int64_t>> splits;
  std::string signature, users_dtype;  // as in CallSpec
  std::string payload;                 // of an exchange

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.id, m.name, m.refusal, m.kind, m.dtype, m.op, m.root, m.plan_digest, m.segment_nbytes, m.wire,
                   m.counted, m.shape, m.splits, m.signature, m.users_dtype, m.payload);
  }
};

// Rank 0 to all: run the call now.
struct CallStart {
  int64_t id = 0;
  std::vector<int64_t> rows;          // allgather: dimension 0 of every rank; alltoall: the rows from each rank to each
  std::vector<std::string> payloads;  // exchange: by rank

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.id, m.rows, m.payloads);
  }
};

// Rank 0 to those who have announced the call: end it with this status.
struct CallRefusal {
  int64_t id = 0;
  Status status;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.id, m.status);
  }
};

// Rank 0 to those who have announced the call: it knows that they wait.
struct CallKnown {
  int64_t id = 0;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.id);
  }
};

// --- Lanes

// Any rank to all others: nothing runs on this lane any more.
struct LaneFailed {
  int64_t lane = 0;
  Status status;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.lane, m.status);
  }
};

// Any rank to all others: the sender takes part in `runs` runs of this lane and in no more.
struct LaneClosed {
  int64_t lane = 0;
  int64_t runs = 0;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.lane, m.runs);
  }
};

// Any rank to rank 0, of a partial channel: the sender's gradient of `step` is there, and its round waits for all ranks
// where it is `full`; or the sender gives no more gradients until all ranks have left.
struct RoundArrival {
  int64_t lane = 0, step = 0;
  bool full = false, left = false;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.lane, m.step, m.full, m.left);
  }
};

// From rank 0 to all, along a tree: the rounds up to this one are open; all ranks have left where it is the `end`.
struct RoundsOpen {
  int64_t lane = 0, round = 0;
  bool end = false;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.lane, m.round, m.end);
  }
};

// Any rank to rank 0: the sender's run of this lane has made no progress for `waited_s`; who holds it up?
struct StallQuestion {
  int64_t lane = 0, run = 0;
  double waited_s = 0;
  std::string what;  // the run's name

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.lane, m.run, m.waited_s, m.what);
  }
};

// Rank 0 to all: how far are you in this lane?
struct StallProbe {
  int64_t lane = 0;
  int64_t inquiry = 0;  // rank 0's number of the question

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.lane, m.inquiry);
  }
};

// The answer to a probe.
struct StallReport {
  int64_t inquiry = 0;
  LaneReport report;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.inquiry, m.report.state, m.report.runs, m.report.missing, m.report.names);
  }
};

// Rank 0 to the rank that has asked: what holds the lane up.
struct StallVerdict {
  int64_t lane = 0;
  std::string text;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.lane, m.text);
  }
};

// --- Life

// Any rank to all others: the sender's engine has failed.
struct EngineFailed {
  Status status;

  template <typename Self, typename Archive>
  static bool Fields(Self& m, Archive& archive) {
    return archive(m.status);
  }
};

// Any rank to all others, its last message: the sender shuts down.
struct ShuttingDown {
  template <typename Self, typename Archive>
  static bool Fields(Self&, Archive& archive) {
    return archive();
  }
};

// The place of a struct in this list is its number in the bytes.
using ControlMessage =
    std::variant<CallAnnouncement, CallStart, CallRefusal, CallKnown, LaneFailed, LaneClosed, RoundArrival, RoundsOpen,
                 StallQuestion, StallProbe, StallReport, StallVerdict, EngineFailed, ShuttingDown>;

std::string Encode(const ControlMessage& message);

// Refuses bytes that are not one whole message (kInternal).
Status Decode(const std::string& bytes, ControlMessage* message);

}  // namespace hvd_ext

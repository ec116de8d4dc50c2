// Records of what the engine did when, of fixed size, in a ring that keeps the newest. A place that records costs one
// read of an atomic while the trace is off; while it is on, a read of the clock, a lock and a copy, and no allocation.
// Times are those of NowSeconds(), the steady clock, in nanoseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace hvd_ext {

double NowSeconds();

enum class TraceKind : int32_t {
  kFill = 0,       // a bucket: its first tensor came .. it was full
  kSubmitted = 1,  // a step: its last tensor came (begin = end)
  kWait = 2,       // a step: at least one collect waited
  kRun = 3,        // a bucket or call: its first segment started .. its last ended
  kRound = 4,      // a round of a run, over all segments: the first began .. the last ended
  kDeliver = 5,    // a bucket: it ended .. the collects that waited for it have their tensors
  kAnnounce = 6,   // a call: this rank has made it .. rank 0 has started it
  kCall = 7,       // a call: rank 0 has started it .. it has ended
};

// The layout that hvd_ext/engine/native.py reads.
struct TraceRecord {
  int64_t begin_ns = 0, end_ns = 0;
  int64_t id = 0;     // lane 0: the call's number on this rank; else the channel's step
  int64_t plan = -1;  // kAnnounce: the plan's handle
  TraceKind kind = TraceKind::kFill;
  int32_t lane = 0;
  int32_t part = 0;    // the bucket
  int32_t round = 0;   // kRound; kDeliver: how many collects
  char name[64] = {};  // kAnnounce: "allreduce 'x'", cut to 63 bytes
};
static_assert(sizeof(TraceRecord) == 112, "hvd_ext/engine/native.py holds this layout");

class Trace {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Forgets what was recorded. `capacity` is at least 1.
  void Start(int64_t capacity);
  void Stop() { on_.store(false); }

  void Add(TraceKind kind, int64_t lane, int64_t id, int64_t part, double begin_s, double end_s, int64_t round = 0);
  void AddCall(int64_t id, int64_t plan, const std::string& name, double begin_s, double end_s);

  // Copies the newest records, at most `most`, oldest first; *dropped: how many were recorded and are not among them.
  int64_t Read(TraceRecord* records, int64_t most, int64_t* dropped) const;

 private:
  // Adds a record whose other fields are filled.
  void Put(TraceRecord record, double begin_s, double end_s);

  std::atomic<bool> on_{false};
  mutable Mutex mutex_;
  std::vector<TraceRecord> ring_ HVD_EXT_GUARDED_BY(mutex_);
  int64_t added_ HVD_EXT_GUARDED_BY(mutex_) = 0;
};

inline bool IsOn(const Trace* trace) { return trace != nullptr && trace->on(); }

}  // namespace hvd_ext

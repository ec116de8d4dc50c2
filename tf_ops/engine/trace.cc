#include "engine/trace.h"

#include <algorithm>
#include <cmath>

namespace hvd_ext {
namespace {

int64_t Nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

}  // namespace

void Trace::Start(int64_t capacity) {
  MutexLock lock(&mutex_);
  ring_.assign(static_cast<size_t>(std::max<int64_t>(1, capacity)), TraceRecord());
  added_ = 0;
  on_.store(true);
}

void Trace::Add(TraceKind kind, int64_t lane, int64_t id, int64_t part, double begin_s, double end_s, int64_t round) {
  TraceRecord record;
  record.id = id;
  record.kind = kind;
  record.lane = static_cast<int32_t>(lane);
  record.part = static_cast<int32_t>(part);
  record.round = static_cast<int32_t>(round);
  Put(record, begin_s, end_s);
}

void Trace::AddCall(int64_t id, int64_t plan, const std::string& name, double begin_s, double end_s) {
  TraceRecord record;
  record.id = id;
  record.plan = plan;
  record.kind = TraceKind::kAnnounce;
  name.copy(record.name, sizeof(record.name) - 1);
  Put(record, begin_s, end_s);
}

void Trace::Put(TraceRecord record, double begin_s, double end_s) {
  record.begin_ns = Nanoseconds(begin_s);
  record.end_ns = Nanoseconds(end_s);
  MutexLock lock(&mutex_);
  if (on()) ring_[static_cast<size_t>(added_++ % static_cast<int64_t>(ring_.size()))] = record;
}

int64_t Trace::Read(TraceRecord* records, int64_t most, int64_t* dropped) const {
  MutexLock lock(&mutex_);
  int64_t capacity = static_cast<int64_t>(ring_.size());
  int64_t count = std::min({added_, capacity, std::max<int64_t>(0, most)});
  for (int64_t i = 0; i < count; ++i) records[i] = ring_[static_cast<size_t>((added_ - count + i) % capacity)];
  *dropped = added_ - count;
  return count;
}

}  // namespace hvd_ext

#include "cache/place.h"

#include <algorithm>
#include <cstdio>

namespace hvd_ext {

void BeginIndex(char* index, const StoreOptions& options) {
  IndexHead* head = reinterpret_cast<IndexHead*>(index + kHeadAt);
  head->magic = kMagic;
  head->version = kFormatVersion;
  head->fingerprint[0] = options.fingerprint[0];
  head->fingerprint[1] = options.fingerprint[1];
  head->samples = options.samples;
  head->segment_bytes = kSegmentBytes;
  head->crc = HeadCrc(*head);
}

IndexIs JudgeIndex(const IndexHead& head, const StoreOptions& options) {
  if (head.magic != kMagic || head.version != kFormatVersion || head.crc != HeadCrc(head)) return IndexIs::kNone;
  if (head.segment_bytes != kSegmentBytes || head.samples < 0) return IndexIs::kNone;
  bool ours = head.fingerprint[0] == options.fingerprint[0] && head.fingerprint[1] == options.fingerprint[1] &&
              head.samples == options.samples;
  return ours ? IndexIs::kOurs : IndexIs::kOther;
}

std::string OtherData(const std::string& path, const IndexHead& head, const StoreOptions& options) {
  char words[256];
  std::snprintf(words, sizeof(words),
                " (%lld samples, fingerprint %016llx%016llx): must be of the same data as this cache (%lld samples, "
                "fingerprint %016llx%016llx); name another place, or clear this one",
                static_cast<long long>(head.samples), static_cast<unsigned long long>(head.fingerprint[0]),
                static_cast<unsigned long long>(head.fingerprint[1]), static_cast<long long>(options.samples),
                static_cast<unsigned long long>(options.fingerprint[0]),
                static_cast<unsigned long long>(options.fingerprint[1]));
  return "cache '" + options.name + "': the records in " + path + words;
}

void Place::Attach(char* index) {
  head_ = reinterpret_cast<IndexHead*>(index + kHeadAt);
  entries_ = reinterpret_cast<Entry*>(index + kEntriesAt);
  // After a loss of power the head may be older than the entries.
  int64_t end = 0;
  for (int64_t i = 0; i < head_->samples; ++i) {
    uint64_t entry = entries_[i].load(std::memory_order_relaxed);
    if (StateOf(entry) == kReady) end = std::max(end, OffsetOf(entry) + RoomOf(entry));
  }
  int64_t used = head_->used.load(std::memory_order_relaxed);
  while (used < end && !head_->used.compare_exchange_weak(used, end, std::memory_order_relaxed)) {
  }
}

int64_t Place::CountRecords() const {
  int64_t records = 0;
  for (int64_t i = 0; i < head_->samples; ++i) {
    records += StateOf(entries_[i].load(std::memory_order_relaxed)) == kReady ? 1 : 0;
  }
  return records;
}

void Place::Close(const std::string& why) {
  if (!open_.exchange(false)) return;
  warn_(what_ + " takes no more records: " + why + "; " + std::to_string(CountRecords()) + " of " +
        std::to_string(samples()) + " samples are in it, the others are read from disk or source each time");
}

int64_t Place::Take(int64_t nbytes) {
  int64_t n = (nbytes + kUnit - 1) / kUnit * kUnit;
  int64_t used = head_->used.load(std::memory_order_relaxed);
  while (open()) {
    int64_t at = (used + kUnit - 1) / kUnit * kUnit;
    int64_t in_segment = at % kSegmentBytes;
    if (in_segment + n > kSegmentBytes) at += kSegmentBytes - in_segment;
    if (at + n > limit_) {
      Close("its limit of " + std::to_string(limit_) + " bytes is reached");
      return -1;
    }
    if (!Reserve(at + n)) return -1;
    if (head_->used.compare_exchange_weak(used, at + n, std::memory_order_relaxed)) return at;
  }
  return -1;
}

}  // namespace hvd_ext

// How records lie in a place; one format in memory and on disk.
//
//   index    64 bytes that belong to what holds the file (an arena begins with its token)
//            IndexHead
//            an entry for each sample: 8 bytes
//   records  in segments of 64 MB: RecordHead, the bytes, zeros to a multiple of 16. No record goes over the end of a
//            segment. In memory they follow the index in one file, on disk a segment is a file.
//
// All numbers are little endian, as all processors are that this is built for.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "cache/crc32c.h"

namespace hvd_ext {

constexpr int64_t kSegmentBytes = int64_t{64} << 20;
constexpr int64_t kUnit = 16;                                  // records begin at its multiples
constexpr int64_t kLargestRecord = kSegmentBytes - 2 * kUnit;  // of its bytes: with its head the units fit in 22 bits
constexpr uint64_t kMagic = 0x6568636163647668u;               // "hvdcache"
constexpr uint32_t kFormatVersion = 1;
constexpr int64_t kHeadAt = 64;

struct IndexHead {
  uint64_t magic;
  uint32_t version;
  uint32_t crc;  // of the version and of what follows, up to `used`
  uint64_t fingerprint[2];
  int64_t samples;
  int64_t segment_bytes;
  char unused[16];
  // What changes has a cache line of its own.
  std::atomic<int64_t> used;      // bytes of records, up to the next free one
  std::atomic<int64_t> reserved;  // in memory: bytes of records whose pages are reserved
  char unused_too[48];
};
static_assert(sizeof(IndexHead) == 128, "the entries begin at 192");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "entries are shared by processes");

using Entry = std::atomic<uint64_t>;
constexpr int64_t kEntriesAt = kHeadAt + static_cast<int64_t>(sizeof(IndexHead));

inline int64_t IndexBytes(int64_t samples) { return kEntriesAt + samples * static_cast<int64_t>(sizeof(Entry)); }

inline uint32_t HeadCrc(const IndexHead& head) {
  uint32_t crc = Crc32c(0, &head.version, sizeof(head.version));
  return Crc32c(crc, head.fingerprint, 2 * sizeof(uint64_t) + 2 * sizeof(int64_t));
}

// The states of an entry, its lowest two bits. An entry that is claimed says by whom, see claim.h.
enum EntryState : uint64_t { kEmpty = 0, kClaimed = 1, kReady = 2 };
inline EntryState StateOf(uint64_t entry) { return static_cast<EntryState>(entry & 3u); }

// A ready entry: where its record begins, in units (40 bits), and how many units it has, head included (22 bits).
inline uint64_t ReadyEntry(int64_t offset, int64_t nbytes) {
  uint64_t units = static_cast<uint64_t>((nbytes + kUnit - 1) / kUnit);
  return static_cast<uint64_t>(offset / kUnit) << 24 | units << 2 | kReady;
}
inline int64_t OffsetOf(uint64_t ready) { return static_cast<int64_t>(ready >> 24) * kUnit; }
inline int64_t RoomOf(uint64_t ready) { return static_cast<int64_t>(ready >> 2 & 0x3fffffu) * kUnit; }
constexpr int64_t kFarthest = (int64_t{1} << 40) * kUnit;

struct RecordHead {
  uint64_t number;
  uint32_t nbytes;
  uint32_t crc;  // of number, nbytes and the bytes
};
constexpr int64_t kRecordHead = sizeof(RecordHead);
static_assert(kRecordHead == kUnit, "bytes follow the head");

inline uint32_t BeginRecordCrc(const RecordHead& head) {
  return Crc32c(0, &head, sizeof(head.number) + sizeof(head.nbytes));
}

// Whether what lies at `record`, `room` bytes long, can be the record of this number; see also IsWhole.
inline bool IsRecordOf(int64_t number, const char* record, int64_t room, RecordHead* head) {
  if (room < kRecordHead) return false;
  std::memcpy(head, record, sizeof(*head));
  return head->number == static_cast<uint64_t>(number) && kRecordHead + int64_t{head->nbytes} <= room;
}
inline bool IsWhole(const RecordHead& head, const char* record) {
  return Crc32c(BeginRecordCrc(head), record + kRecordHead, head.nbytes) == head.crc;
}

}  // namespace hvd_ext

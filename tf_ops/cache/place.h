// A place: an index and room for records, in memory or on disk. The store asks it to read and to write records; which
// record is looked up, claimed or loaded is the store's.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "cache/format.h"
#include "cache/free_memory.h"
#include "cache/store.h"

namespace hvd_ext {

using Warn = std::function<void(const std::string& words)>;  // any thread may call it

enum class Found {
  kYes,
  kNo,      // no record, or one that is not what was written, which was forgotten
  kNotNow,  // there is one, but this process cannot get at it
};

class Place {
 public:
  virtual ~Place() = default;

  Entry& entry(int64_t number) { return entries_[number]; }
  // Whether the place takes records. It never opens again.
  bool open() const { return open_.load(std::memory_order_relaxed); }

  // Sets *record to the record's head, which its bytes follow. kNo: what lies there is not the record that was written.
  // The record is valid until the calling thread reads the next one. With `always` the bytes are checked even where the
  // place trusts them.
  virtual Found Read(int64_t number, uint64_t ready, bool always, const char** record, RecordHead* head) = 0;

  // Has the processor fetch the begin of the record, if it is in memory.
  virtual void Fetch(int64_t /*number*/) {}

  // Writes a record of the pieces, one after the other. Returns the entry to publish, or 0, and
  // then the place is closed.
  virtual uint64_t Write(const RecordHead& head, const Piece* pieces, int64_t n_pieces) = 0;

  // Ready entries of the index.
  int64_t CountRecords() const;
  int64_t samples() const { return head_->samples; }
  // Takes no record any more, with one warning. `why` ends the sentence.
  void Close(const std::string& why);

 protected:
  // `what` names the place in warnings, as the begin of a sentence.
  Place(std::string what, int64_t limit, Warn warn) : what_(std::move(what)), limit_(limit), warn_(std::move(warn)) {}

  // The index has been mapped. Room that its entries use counts as used, whatever the head says.
  void Attach(char* index);
  // Takes room for n bytes of a record, or returns -1 and closes the place. `limit` is exact.
  int64_t Take(int64_t nbytes);
  // The bytes of records up to `end` can be written; where not, the place is closed.
  virtual bool Reserve(int64_t end) = 0;

  const std::string what_;
  const int64_t limit_;
  const Warn warn_;
  IndexHead* head_ = nullptr;
  Entry* entries_ = nullptr;
  std::atomic<bool> open_{true};
};

// Writes the head of a new index.
void BeginIndex(char* index, const StoreOptions& options);

// What an index is to a store: its own, of other data, or none of this version (damaged, or of another one).
enum class IndexIs { kOurs, kOther, kNone };
IndexIs JudgeIndex(const IndexHead& head, const StoreOptions& options);
// Words for kOther: "<path> holds a cache of other data ...".
std::string OtherData(const std::string& path, const IndexHead& head, const StoreOptions& options);

// Both set *place to null with a warning where the system does not give the place, and fail as Store::Open says.
Status OpenMemory(const StoreOptions& options, const Warn& warn, std::shared_ptr<Place>* place, ArenaAddress* address);
Status OpenDisk(const StoreOptions& options, const Warn& warn, std::shared_ptr<Place>* place);
// Maps another process's memory. Fails where it cannot be mapped; *other then says whether it is of other data.
Status MapMemory(const StoreOptions& options, const ArenaAddress& address, const Warn& warn,
                 std::shared_ptr<Place>* place, bool* other);

}  // namespace hvd_ext

#include "cache/store.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/mutex.h"
#include "cache/claim.h"
#include "cache/numbered.h"
#include "cache/place.h"

namespace hvd_ext {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kFirstSleep = std::chrono::microseconds(200);
constexpr auto kLongestSleep = std::chrono::microseconds(5000);
// So far before they are needed, entries and then the begins of records are fetched into the processor's cache.
constexpr int64_t kEntriesAhead = 12, kRecordsAhead = 3;

// Warnings until they are fetched. The places hold it too: they may close while the store is made.
struct Warnings {
  Mutex mutex;
  std::deque<std::string> words HVD_EXT_GUARDED_BY(mutex);
};

int64_t Since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
}

class TheStore : public Store {
 public:
  explicit TheStore(const StoreOptions& options) : options_(options), warnings_(std::make_shared<Warnings>()) {
    warn_ = [warnings = warnings_](const std::string& words) {
      MutexLock lock(&warnings->mutex);
      warnings->words.push_back(words);
    };
  }
  ~TheStore() override { ReleaseAll(); }

  Status Begin() {
    if (options_.memory_bytes > 0) HVD_EXT_RETURN_IF_ERROR(OpenMemory(options_, warn_, &memory_, &address_));
    if (!options_.disk.empty()) HVD_EXT_RETURN_IF_ERROR(OpenDisk(options_, warn_, &disk_));
    return Status::Ok();
  }

  ArenaAddress memory_address() const override { return address_; }

  Status ShareMemory(const std::vector<ArenaAddress>& addresses, int64_t* taken) override {
    *taken = -1;
    if (memory_ == nullptr || !options_.keep.empty()) return Status::Ok();
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (addresses[i].fd < 0) continue;
      if (addresses[i].token == address_.token) {
        *taken = static_cast<int64_t>(i);
        return Status::Ok();
      }
      std::shared_ptr<Place> place;
      bool other = false;
      Status status = MapMemory(options_, addresses[i], warn_, &place, &other);
      if (other) return status;
      if (!status.ok()) continue;
      memory_ = std::move(place);
      address_ = {};
      *taken = static_cast<int64_t>(i);
      return Status::Ok();
    }
    return Status::Ok();
  }

  Status Lookup(const int64_t* numbers, int64_t n, bool wait, const Take& take, std::vector<int64_t>* missing,
                std::vector<int64_t>* pending) override {
    missing->clear();
    pending->clear();
    for (int64_t i = 0; i < n; ++i) {
      if (numbers[i] < 0 || numbers[i] >= options_.samples) return NotOurs(numbers[i]);
    }
    StoreStatistics counts{};
    const Clock::time_point begin = Clock::now();
    for (int64_t i = 0; i < n; ++i) {
      if (memory_ != nullptr) {
        if (i + kEntriesAhead < n) __builtin_prefetch(&memory_->entry(numbers[i + kEntriesAhead]));
        if (i + kRecordsAhead < n) memory_->Fetch(numbers[i + kRecordsAhead]);
      }
      Found found = Read(numbers[i], i, take, &counts);
      if (found == Found::kNo && wait) {
        pending->push_back(i);
        continue;
      }
      Claimed claimed = Claimed::kByNone;
      // An entry that becomes ready between the two looks is read.
      while (found == Found::kNo && (claimed = Claim(numbers[i])) == Claimed::kThere) {
        found = Read(numbers[i], i, take, &counts);
      }
      if (found == Found::kYes) continue;
      (claimed == Claimed::kByOther ? pending : missing)->push_back(i);
    }
    counts.memory_ns = Since(begin) - counts.disk_ns;
    if (wait && !pending->empty()) {
      Wait(numbers, take, &counts, missing, pending);
      std::sort(missing->begin(), missing->end());
    }
    counts.misses = static_cast<int64_t>(missing->size());
    Add(counts);
    return Status::Ok();
  }

  Status Insert(int64_t number, const Piece* pieces, int64_t n_pieces, bool* stored) override {
    *stored = false;
    StoreStatistics counts{};
    if (number < 0 || number >= options_.samples) return NotOurs(number);
    int64_t nbytes = 0;
    for (int64_t i = 0; i < n_pieces; ++i) nbytes += pieces[i].nbytes;
    if (nbytes > kLargestRecord) {
      if (!warned_of_size_.exchange(true)) {
        warn_("cache '" + options_.name + "': sample " + std::to_string(number) + " (" + std::to_string(nbytes) +
              " bytes) must have at most " + std::to_string(kLargestRecord) +
              " to be stored: it, and others as large, are loaded each time they are used");
      }
    } else {
      RecordHead head{static_cast<uint64_t>(number), static_cast<uint32_t>(nbytes), 0};
      head.crc = BeginRecordCrc(head);
      for (int64_t i = 0; i < n_pieces; ++i) head.crc = Crc32c(head.crc, pieces[i].data, pieces[i].nbytes);
      *stored = StoreIn(memory_.get(), head, pieces, n_pieces, &counts.memory_inserted, &counts.memory_inserted_bytes);
      *stored |= StoreIn(disk_.get(), head, pieces, n_pieces, &counts.disk_inserted, &counts.disk_inserted_bytes);
    }
    counts.passed_through = *stored ? 0 : 1;
    Add(counts);
    Release(&number, 1);
    return Status::Ok();
  }

  void Release(const int64_t* numbers, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) {
      if (numbers[i] < 0 || numbers[i] >= options_.samples) continue;
      {
        MutexLock lock(&claims_mutex_);
        claims_.erase(numbers[i]);
      }
      GiveBack(memory_.get(), numbers[i]);
      GiveBack(disk_.get(), numbers[i]);
    }
  }

  void ReleaseAll() override {
    std::vector<int64_t> all;
    {
      MutexLock lock(&claims_mutex_);
      all.assign(claims_.begin(), claims_.end());
    }
    Release(all.data(), static_cast<int64_t>(all.size()));
  }

  StoreStatistics Statistics() const override {
    StoreStatistics s{};
    int64_t* numbers = reinterpret_cast<int64_t*>(&s);
    for (size_t i = 0; i < counts_.size(); ++i) numbers[i] = counts_[i].load(std::memory_order_relaxed);
    s.memory_open = Opened(memory_) ? 1 : 0;
    s.disk_open = Opened(disk_) ? 1 : 0;
    s.memory_records = memory_ == nullptr ? 0 : memory_->CountRecords();
    s.disk_records = disk_ == nullptr ? 0 : disk_->CountRecords();
    return s;
  }

  bool NextWarning(std::string* words) override {
    MutexLock lock(&warnings_->mutex);
    if (warnings_->words.empty()) return false;
    *words = std::move(warnings_->words.front());
    warnings_->words.pop_front();
    return true;
  }

  Status Verify(const std::function<bool(int64_t, int64_t)>& progress, Verified* memory, Verified* disk) override {
    *memory = *disk = {};
    int64_t total = options_.samples * ((memory_ != nullptr ? 1 : 0) + (disk_ != nullptr ? 1 : 0));
    int64_t done = 0;
    for (auto [place, seen] : {std::pair(memory_.get(), memory), std::pair(disk_.get(), disk)}) {
      for (int64_t number = 0; place != nullptr && number < options_.samples; ++number, ++done) {
        if (done % 256 == 0 && !progress(done, total)) return Status::Ok();
        uint64_t entry = place->entry(number).load(std::memory_order_acquire);
        if (StateOf(entry) != kReady) continue;
        const char* record = nullptr;
        RecordHead head{};
        Found found = place->Read(number, entry, /*always=*/true, &record, &head);
        if (found == Found::kYes) {
          ++seen->records;
          seen->bytes += head.nbytes;
        } else if (found == Found::kNo) {
          ++seen->damaged;
          StoreStatistics counts{};
          Forget(place, number, entry, &counts);
          Add(counts);
        }
      }
    }
    progress(total, total);
    return Status::Ok();
  }

 private:
  // Adds the counts of one call.
  void Add(const StoreStatistics& counts) {
    const int64_t* numbers = reinterpret_cast<const int64_t*>(&counts);
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (numbers[i] != 0) counts_[i].fetch_add(numbers[i], std::memory_order_relaxed);
    }
  }

  enum class Claimed { kHere, kByOther, kByNone, kThere };

  Status NotOurs(int64_t number) const {
    return Invalid("cache '" + options_.name + "': number (" + std::to_string(number) + ") must be one of 0 .. " +
                   std::to_string(options_.samples - 1));
  }

  static bool Opened(const std::shared_ptr<Place>& place) { return place != nullptr && place->open(); }

  // Where claims lie: on the disk, so that jobs which share it share the work, or else in memory.
  Place* ClaimPlace() const {
    if (Opened(disk_)) return disk_.get();
    return Opened(memory_) ? memory_.get() : nullptr;
  }

  // Gives the record to `take` if one of the places has it.
  Found Read(int64_t number, int64_t place, const Take& take, StoreStatistics* counts) {
    const char* record = nullptr;
    RecordHead head{};
    Found found = ReadIn(memory_.get(), number, &record, &head, counts);
    if (found == Found::kYes) {
      take(place, record + kRecordHead, head.nbytes);
      ++counts->memory_hits;
      counts->memory_hit_bytes += head.nbytes;
      return found;
    }
    if (disk_ == nullptr) return found;
    const Clock::time_point begin = Clock::now();
    Found on_disk = ReadIn(disk_.get(), number, &record, &head, counts);
    if (on_disk == Found::kYes) {
      Promote(number, head, record, counts);
      take(place, record + kRecordHead, head.nbytes);
      ++counts->disk_hits;
      counts->disk_hit_bytes += head.nbytes;
      counts->disk_ns += Since(begin);
      return on_disk;
    }
    return found == Found::kNotNow ? found : on_disk;
  }

  static Found ReadIn(Place* place, int64_t number, const char** record, RecordHead* head, StoreStatistics* counts) {
    if (place == nullptr) return Found::kNo;
    uint64_t entry = place->entry(number).load(std::memory_order_acquire);
    if (StateOf(entry) != kReady) return Found::kNo;
    Found found = place->Read(number, entry, /*always=*/false, record, head);
    if (found == Found::kNo) Forget(place, number, entry, counts);
    return found;
  }

  // A record that was read from the disk is put into memory. A claim keeps two readers from taking room for it twice.
  void Promote(int64_t number, const RecordHead& head, const char* record, StoreStatistics* counts) {
    if (!Opened(memory_)) return;
    Entry& entry = memory_->entry(number);
    uint64_t seen = entry.load(std::memory_order_relaxed);
    if (StateOf(seen) == kReady || (StateOf(seen) == kClaimed && !IsStaleClaim(seen, options_.claim_s))) return;
    uint64_t claim = NewClaim();
    if (!entry.compare_exchange_strong(seen, claim, std::memory_order_relaxed)) return;
    Piece piece{record + kRecordHead, head.nbytes};
    uint64_t ready = memory_->Write(head, &piece, 1);
    if (entry.compare_exchange_strong(claim, ready, std::memory_order_release) && ready != 0) {
      ++counts->memory_inserted;
      counts->memory_inserted_bytes += head.nbytes;
    }
  }

  static void Forget(Place* place, int64_t number, uint64_t entry, StoreStatistics* counts) {
    ++counts->damaged;
    place->entry(number).compare_exchange_strong(entry, kEmpty, std::memory_order_relaxed);
  }

  // Returns whether the place has a record of the number now.
  bool StoreIn(Place* place, const RecordHead& head, const Piece* pieces, int64_t n_pieces, int64_t* inserted,
               int64_t* inserted_bytes) {
    if (place == nullptr) return false;
    Entry& entry = place->entry(static_cast<int64_t>(head.number));
    uint64_t seen = entry.load(std::memory_order_relaxed);
    if (StateOf(seen) == kReady) return true;
    if (!place->open()) return false;
    uint64_t ready = place->Write(head, pieces, n_pieces);
    if (ready == 0) return false;
    // Whoever has claimed it meanwhile finds the record when its own comes; the bytes are the same.
    while (StateOf(seen) != kReady) {
      if (!entry.compare_exchange_weak(seen, ready, std::memory_order_release, std::memory_order_relaxed)) continue;
      ++*inserted;
      *inserted_bytes += head.nbytes;
      break;
    }
    return true;
  }

  // Claims a number that was not there. `expected`: what was seen in its entry, kEmpty or a claim to take over.
  Claimed Claim(int64_t number, uint64_t expected = kEmpty) {
    Place* place = ClaimPlace();
    if (place == nullptr) return Claimed::kByNone;
    if (!place->entry(number).compare_exchange_strong(expected, NewClaim(), std::memory_order_relaxed)) {
      return StateOf(expected) == kReady ? Claimed::kThere : Claimed::kByOther;
    }
    MutexLock lock(&claims_mutex_);
    claims_.insert(number);
    return Claimed::kHere;
  }

  static void GiveBack(Place* place, int64_t number) {
    if (place == nullptr) return;
    uint64_t entry = place->entry(number).load(std::memory_order_relaxed);
    if (IsOwnClaim(entry)) place->entry(number).compare_exchange_strong(entry, kEmpty, std::memory_order_relaxed);
  }

  // Waits for the places in `pending`, until it is empty.
  void Wait(const int64_t* numbers, const Take& take, StoreStatistics* counts, std::vector<int64_t>* missing,
            std::vector<int64_t>* pending) {
    const Clock::time_point begin = Clock::now();
    Clock::duration sleep = kFirstSleep;
    bool slept = false, claims = false;
    while (true) {
      // What no process loads is claimed when nothing is left to wait for: who waits holds no claims.
      std::vector<std::pair<int64_t, uint64_t>> free;
      std::vector<int64_t> waiting;
      uint64_t judged = 0;  // the owner of the claim that was judged last, and whether it runs
      bool stale = false;
      for (int64_t i : *pending) {
        Found found = Read(numbers[i], i, take, counts);
        if (found == Found::kYes) continue;
        Place* place = ClaimPlace();
        if (found == Found::kNotNow || place == nullptr || claims) {
          missing->push_back(i);
          continue;
        }
        uint64_t entry = place->entry(numbers[i]).load(std::memory_order_relaxed);
        if (StateOf(entry) == kClaimed) {
          if (entry != judged) stale = IsStaleClaim(judged = entry, options_.claim_s);
          if (!stale) {
            waiting.push_back(i);
            continue;
          }
        }
        free.emplace_back(i, entry);
      }
      std::vector<int64_t> left = waiting;
      if (waiting.empty()) {
        for (auto [i, entry] : free) {
          if (StateOf(entry) == kReady || Claim(numbers[i], entry) != Claimed::kHere) {
            left.push_back(i);
            continue;
          }
          claims = true;
          missing->push_back(i);
          counts->taken_over += StateOf(entry) == kClaimed;
        }
      } else {
        for (auto [i, entry] : free) left.push_back(i);
      }
      *pending = std::move(left);
      if (pending->empty()) break;
      if (claims) continue;
      slept = true;
      std::this_thread::sleep_for(sleep);
      sleep = std::min<Clock::duration>(sleep * 2, kLongestSleep);
    }
    if (slept) {
      counts->waits = 1;
      counts->waited_ns = Since(begin);
    }
  }

  const StoreOptions options_;
  const std::shared_ptr<Warnings> warnings_;
  Warn warn_;
  std::shared_ptr<Place> memory_, disk_;  // null: none
  ArenaAddress address_;
  Mutex claims_mutex_;
  std::unordered_set<int64_t> claims_ HVD_EXT_GUARDED_BY(claims_mutex_);
  std::atomic<bool> warned_of_size_{false};
  std::array<std::atomic<int64_t>, sizeof(StoreStatistics) / sizeof(int64_t)> counts_{};  // in the order of the fields
};

// Lookups of batches ask for their store: a lock a batch costs nothing. Never destroyed: threads of TensorFlow may
// still look a batch up while the process ends.
Numbered<std::shared_ptr<Store>>& Stores() {
  static auto* stores = new Numbered<std::shared_ptr<Store>>;
  return *stores;
}

}  // namespace

int64_t RegisterStore(std::shared_ptr<Store> store) { return Stores().Add(std::move(store)); }
std::shared_ptr<Store> FindStore(int64_t cache) { return Stores().Find(cache); }
std::shared_ptr<Store> ForgetStore(int64_t cache) { return Stores().Remove(cache); }

Status Store::Open(const StoreOptions& options, std::shared_ptr<Store>* store) {
  const std::string subject = "cache '" + options.name + "': ";
  if (options.samples < 0 || options.samples > (int64_t{1} << 40)) {
    return Invalid(subject + "samples (" + std::to_string(options.samples) +
                   "): must not be negative, and at most 2^40");
  }
  if (options.memory_bytes < 0 || options.disk_bytes < 0) {
    return Invalid(subject + "memory_bytes (" + std::to_string(options.memory_bytes) + ") and disk_bytes (" +
                   std::to_string(options.disk_bytes) + "): must not be negative");
  }
  if (!(options.claim_s > 0)) {
    return Invalid(subject + "claim_s (" + std::to_string(options.claim_s) + "): must be positive");
  }
  std::shared_ptr<TheStore> made = std::make_shared<TheStore>(options);
  HVD_EXT_RETURN_IF_ERROR(made->Begin());
  *store = std::move(made);
  return Status::Ok();
}

}  // namespace hvd_ext

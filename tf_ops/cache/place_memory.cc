// Records in memory: in an arena, which ends with the processes that map it, or in a file with a name, which stays.
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "cache/file.h"
#include "cache/place.h"

namespace hvd_ext {
namespace {

constexpr int64_t kStep = 8 << 20;             // the fewest bytes that are reserved at once
constexpr int64_t kMargin = int64_t{1} << 30;  // see LeavesEnough

int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Where the records begin in the file.
int64_t RecordsAt(int64_t samples) { return RoundUp(IndexBytes(samples), 4096); }

// Memory that processes share, with pages that are reserved before they are touched.
struct Mapping {
  char* base = nullptr;  // null: there is none
  int64_t capacity = 0;
  std::function<Status(int64_t offset, int64_t nbytes)> reserve;
  std::shared_ptr<void> owner;  // what it ends with
};

Mapping MappingOf(std::shared_ptr<MappedArena> mapped, std::shared_ptr<Arena> own) {
  auto reserve = [mapped](int64_t offset, int64_t nbytes) { return mapped->Reserve(offset, nbytes); };
  return {mapped->base(), mapped->capacity(), std::move(reserve), std::move(own)};
}

Mapping MappingOf(File kept, char* base, int64_t capacity) {
  auto file = std::make_shared<File>(std::move(kept));
  auto reserve = [file](int64_t offset, int64_t nbytes) {
    while (fallocate(file->fd(), 0, offset, nbytes) != 0) {
      if (errno != EINTR) return Internal("reserving " + std::to_string(nbytes) + " bytes: " + Words(errno));
    }
    return Status::Ok();
  };
  auto unmap = [capacity](char* mapped) { munmap(mapped, static_cast<size_t>(capacity)); };
  return {base, capacity, std::move(reserve), std::shared_ptr<char>(base, unmap)};
}

class MemoryPlace : public Place {
 public:
  // `stays`: the records may be another job's.
  MemoryPlace(const StoreOptions& options, Mapping mapping, bool stays, Warn warn)
      : Place("cache '" + options.name + "': its memory",
              std::min(options.memory_bytes, mapping.capacity - RecordsAt(options.samples)), std::move(warn)),
        mapping_(std::move(mapping)),
        root_(options.memory_root),
        records_at_(RecordsAt(options.samples)),
        records_(mapping_.base + records_at_),
        room_(mapping_.capacity - records_at_) {
    Attach(mapping_.base);
    if (stays) trusted_ = std::vector<std::atomic<uint8_t>>(static_cast<size_t>(options.samples));
  }

  Found Read(int64_t number, uint64_t ready, bool always, const char** record, RecordHead* head) override {
    int64_t offset = OffsetOf(ready), room = RoomOf(ready);
    // Memory that stays may have grown since this process mapped it; beyond its room nothing is ours to judge.
    if (offset + room > room_) return trusted_.empty() ? Found::kNo : Found::kNotNow;
    *record = records_ + offset;
    if (!IsRecordOf(number, *record, room, head)) return Found::kNo;
    if (!always && (trusted_.empty() || IsTrusted(number).load(std::memory_order_relaxed) != 0)) return Found::kYes;
    if (!IsWhole(*head, *record)) return Found::kNo;
    if (!trusted_.empty()) IsTrusted(number).store(1, std::memory_order_relaxed);
    return Found::kYes;
  }

  void Fetch(int64_t number) override {
    uint64_t seen = entry(number).load(std::memory_order_relaxed);
    if (StateOf(seen) == kReady) __builtin_prefetch(records_ + OffsetOf(seen));
  }

  uint64_t Write(const RecordHead& head, const Piece* pieces, int64_t n_pieces) override {
    int64_t nbytes = kRecordHead + head.nbytes;
    int64_t offset = Take(nbytes);
    if (offset < 0) return 0;
    char* to = records_ + offset;
    std::memcpy(to, &head, sizeof(head));
    to += kRecordHead;
    for (int64_t i = 0; i < n_pieces; ++i) {
      if (pieces[i].nbytes > 0) std::memcpy(to, pieces[i].data, static_cast<size_t>(pieces[i].nbytes));
      to += pieces[i].nbytes;
    }
    return ReadyEntry(offset, nbytes);
  }

 protected:
  bool Reserve(int64_t end) override {
    if (end <= head_->reserved.load(std::memory_order_acquire)) return true;
    MutexLock lock(&reserving_);
    int64_t reserved = head_->reserved.load(std::memory_order_acquire);
    if (end <= reserved) return true;
    if (!open()) return false;
    int64_t to = std::min(RoundUp(end, kStep), RoundUp(limit_, 4096));
    to = std::min(to, room_);
    if (!LeavesEnough(to - reserved)) return false;
    // Other processes may reserve the same pages at this moment: those that are there stay as they are.
    Status status = mapping_.reserve(records_at_ + reserved, to - reserved);
    if (!status.ok()) {
      Close("the host has no more for it: " + status.message);
      return false;
    }
#ifdef MADV_POPULATE_WRITE
    // Spares the writer its page faults. The pages may be another process's too; nothing in them changes.
    int64_t page = sysconf(_SC_PAGESIZE);
    int64_t begin = (records_at_ + reserved) / page * page;
    madvise(mapping_.base + begin, static_cast<size_t>(records_at_ + to - begin), MADV_POPULATE_WRITE);
#endif
    while (reserved < to && !head_->reserved.compare_exchange_weak(reserved, to, std::memory_order_acq_rel)) {
    }
    return true;
  }

 private:
  std::atomic<uint8_t>& IsTrusted(int64_t number) { return trusted_[static_cast<size_t>(number)]; }

  // Reserving must leave something to the training itself: a tenth of the memory, but no more than 1 GiB.
  bool LeavesEnough(int64_t nbytes) {
    FreeMemory free = LookAtFreeMemory(root_);
    if (!free.known) return true;
    int64_t margin = std::min(free.all / 10, kMargin);
    if (free.left - nbytes >= margin) return true;
    Close(free.who + " leaves " + std::to_string(free.left) + " bytes, and " + std::to_string(margin) +
          " must stay free");
    return false;
  }

  const Mapping mapping_;
  const std::string root_;
  const int64_t records_at_;
  char* const records_;
  const int64_t room_;
  Mutex reserving_;
  std::vector<std::atomic<uint8_t>> trusted_;  // by number: checked by this process; empty: all are
};

// Opens the file, or makes it, complete with its index, under its name at once. Sets *why where the system does not
// give it.
Status OpenKept(const StoreOptions& options, const Warn& warn, File* file, std::string* why) {
  const std::string& path = options.keep;
  const std::string subject = "cache '" + options.name + "': the memory that stays (" + path + ")";
  const int64_t index = RecordsAt(options.samples);
  for (int attempt = 0; attempt < 10; ++attempt) {
    File found(open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (found.fd() >= 0 || errno != ENOENT) {
      int error = errno;
      struct stat seen{};
      if (found.fd() < 0 && lstat(path.c_str(), &seen) != 0) return Invalid(subject + ": " + Words(error));
      if (found.fd() >= 0 && fstat(found.fd(), &seen) != 0) return Invalid(subject + ": fstat: " + Words(errno));
      bool plain = S_ISREG(seen.st_mode), own = seen.st_uid == geteuid(), closed = (seen.st_mode & 077) == 0;
      if (!plain || !own || !closed) {
        return Invalid(subject + " must be a plain file of this user that no other user can open, it is " +
                       (!plain ? "no plain file"
                        : !own ? "another user's"
                               : "open to others") +
                       "; remove it, or name another");
      }
      if (found.fd() < 0) return Invalid(subject + ": " + Words(error));
      alignas(IndexHead) char begin[kEntriesAt];
      int64_t got = 0;
      bool whole = seen.st_size >= index && ReadAt(found.fd(), begin, sizeof(begin), 0, &got) == 0 &&
                   got == static_cast<int64_t>(sizeof(begin));
      const IndexHead& head = *reinterpret_cast<IndexHead*>(begin + kHeadAt);
      IndexIs is = whole ? JudgeIndex(head, options) : IndexIs::kNone;
      int64_t used = whole ? head.used.load() : 0, reserved = whole ? head.reserved.load() : 0;
      if (used < 0 || used > kFarthest || reserved < 0 || reserved > seen.st_size) is = IndexIs::kNone;
      if (is == IndexIs::kOther) return Invalid(OtherData(path, head, options));
      if (is == IndexIs::kOurs) {
        *file = std::move(found);
        return Status::Ok();
      }
      warn(subject + " is damaged or of another version: it starts empty");
      unlink(path.c_str());
      continue;
    }
    // A file without a name in the same folder, which is given its name when it is complete: whoever opens it finds a
    // whole index, and nothing is left of a process that is killed before.
    size_t slash = path.find_last_of('/');
    std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    std::vector<char> begin(static_cast<size_t>(kEntriesAt));
    BeginIndex(begin.data(), options);
    File made(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    std::string link = "/proc/self/fd/" + std::to_string(made.fd());
    if (made.fd() >= 0 && fchmod(made.fd(), 0600) == 0 && ftruncate(made.fd(), index) == 0 &&
        fallocate(made.fd(), 0, 0, index) == 0 &&
        pwrite(made.fd(), begin.data(), begin.size(), 0) == static_cast<ssize_t>(begin.size()) &&
        linkat(AT_FDCWD, link.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      *file = std::move(made);
      return Status::Ok();
    }
    if (errno == EEXIST) continue;  // another process was first
    *why = subject + ": " + Words(errno);
    return Status::Ok();
  }
  *why = subject + ": it is made and removed again and again";
  return Status::Ok();
}

Status MapKept(const StoreOptions& options, const Warn& warn, Mapping* mapping, std::string* why) {
  File file;
  HVD_EXT_RETURN_IF_ERROR(OpenKept(options, warn, &file, why));
  if (file.fd() < 0) return Status::Ok();
  struct stat seen{};
  int64_t capacity = RecordsAt(options.samples) + RoundUp(options.memory_bytes, 4096);
  // A file only grows: other processes may have mapped it.
  bool sized = fstat(file.fd(), &seen) == 0 && (seen.st_size >= capacity || ftruncate(file.fd(), capacity) == 0);
  capacity = std::max<int64_t>(capacity, seen.st_size);
  constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_SHARED | MAP_NORESERVE;
  void* base = sized ? mmap(nullptr, static_cast<size_t>(capacity), kProtection, kFlags, file.fd(), 0) : MAP_FAILED;
  if (base == MAP_FAILED) {
    *why = "mapping " + std::to_string(capacity) + " bytes of " + options.keep + ": " + Words(errno);
    return Status::Ok();
  }
  madvise(base, static_cast<size_t>(capacity), MADV_DONTDUMP);
  *mapping = MappingOf(std::move(file), static_cast<char*>(base), capacity);
  return Status::Ok();
}

}  // namespace

Status OpenMemory(const StoreOptions& options, const Warn& warn, std::shared_ptr<Place>* place, ArenaAddress* address) {
  place->reset();
  Mapping mapping;
  std::string why;
  bool stays = !options.keep.empty();
  if (stays) {
    HVD_EXT_RETURN_IF_ERROR(MapKept(options, warn, &mapping, &why));
  } else {
    std::shared_ptr<Arena> arena;
    std::shared_ptr<MappedArena> mapped;
    Status status = Arena::Make(RecordsAt(options.samples) + RoundUp(options.memory_bytes, 4096), &arena);
    if (status.ok()) status = MappedArena::Open(arena->address(), &mapped, /*reserves=*/true);
    if (status.ok()) status = mapped->Reserve(0, RecordsAt(options.samples));
    if (status.ok()) {
      BeginIndex(mapped->base(), options);
      *address = arena->address();
      mapping = MappingOf(std::move(mapped), std::move(arena));
    } else {
      why = status.message;
    }
  }
  if (mapping.base == nullptr) {
    warn("cache '" + options.name + "': does without memory: " + why);
    return Status::Ok();
  }
  *place = std::make_shared<MemoryPlace>(options, std::move(mapping), stays, warn);
  return Status::Ok();
}

Status MapMemory(const StoreOptions& options, const ArenaAddress& address, const Warn& warn,
                 std::shared_ptr<Place>* place, bool* other) {
  *other = false;
  std::shared_ptr<MappedArena> mapped;
  HVD_EXT_RETURN_IF_ERROR(MappedArena::Open(address, &mapped, /*reserves=*/true));
  if (mapped->At(0, kEntriesAt) == nullptr) return Internal("shared memory: too small for a cache");
  const IndexHead& head = *reinterpret_cast<IndexHead*>(mapped->base() + kHeadAt);
  IndexIs is = JudgeIndex(head, options);
  *other = is == IndexIs::kOther;
  if (is != IndexIs::kOurs) return Invalid(OtherData("another rank's memory", head, options));
  if (mapped->capacity() < RecordsAt(options.samples)) return Internal("shared memory: too small for its index");
  *place = std::make_shared<MemoryPlace>(options, MappingOf(std::move(mapped), nullptr), /*stays=*/false, warn);
  return Status::Ok();
}

}  // namespace hvd_ext

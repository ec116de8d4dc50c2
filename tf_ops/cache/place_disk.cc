// Records on disk: a folder with the segments and the file `index`, which all processes map. Python puts about.json
// beside them, for people.
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "cache/file.h"
#include "cache/place.h"

namespace hvd_ext {
namespace {

constexpr const char* kIndex = "index";
constexpr const char* kNewIndex = "index.new";  // until it is whole
constexpr const char* kSegment = "segment-";

std::string SegmentName(int64_t segment) {
  char name[32];
  std::snprintf(name, sizeof(name), "%s%06lld", kSegment, static_cast<long long>(segment));
  return name;
}

// The buffer in which this thread reads. It is valid until the thread's next read.
std::vector<char>& ReadBuffer() {
  thread_local std::vector<char> buffer;
  return buffer;
}

class DiskPlace : public Place {
 public:
  DiskPlace(const StoreOptions& options, std::shared_ptr<File> folder, char* index, Warn warn)
      : Place("cache '" + options.name + "': its disk (" + options.disk + ")",
              options.disk_bytes > 0 ? std::min(options.disk_bytes, kFarthest) : kFarthest, std::move(warn)),
        folder_(std::move(folder)),
        index_(index) {
    Attach(index);
  }
  ~DiskPlace() override { munmap(index_, static_cast<size_t>(IndexBytes(samples()))); }

  Found Read(int64_t number, uint64_t ready, bool /*always*/, const char** record, RecordHead* head) override {
    int64_t offset = OffsetOf(ready), room = RoomOf(ready), seen = 0;
    if (offset % kSegmentBytes + room > kSegmentBytes) return Found::kNo;
    std::shared_ptr<File> file;
    int error = Segment(offset / kSegmentBytes, /*make=*/false, &file);
    if (error != 0) return error == ENOENT ? Found::kNo : Found::kNotNow;  // the process may have too many files open
    std::vector<char>& buffer = ReadBuffer();
    if (static_cast<int64_t>(buffer.size()) < room) buffer.resize(static_cast<size_t>(room));
    if (ReadAt(file->fd(), buffer.data(), room, offset % kSegmentBytes, &seen) != 0) return Found::kNo;
    *record = buffer.data();
    return IsRecordOf(number, *record, seen, head) && IsWhole(*head, *record) ? Found::kYes : Found::kNo;
  }

  uint64_t Write(const RecordHead& head, const Piece* pieces, int64_t n_pieces) override {
    int64_t nbytes = kRecordHead + head.nbytes;
    int64_t offset = Take(nbytes);
    if (offset < 0) return 0;
    std::vector<iovec> parts{{const_cast<RecordHead*>(&head), static_cast<size_t>(kRecordHead)}};
    for (int64_t i = 0; i < n_pieces; ++i) {
      if (pieces[i].nbytes > 0) {
        parts.push_back({const_cast<void*>(pieces[i].data), static_cast<size_t>(pieces[i].nbytes)});
      }
    }
    std::shared_ptr<File> file;
    int error = Segment(offset / kSegmentBytes, /*make=*/true, &file);
    if (error == 0) error = WriteAt(file->fd(), std::move(parts), offset % kSegmentBytes);
    if (error == 0) return ReadyEntry(offset, nbytes);
    Close("writing to it failed: " + Words(error));
    return 0;
  }

 protected:
  bool Reserve(int64_t /*end*/) override { return true; }  // a file that finds no room says so when it is written to

 private:
  // The files that are open, by segment modulo their number: a cache of 250 GB has more segments than a process may
  // have files. A file that gives way is closed when its last reader has ended.
  struct Slot {
    Mutex mutex;
    int64_t segment HVD_EXT_GUARDED_BY(mutex) = -1;
    std::shared_ptr<File> file HVD_EXT_GUARDED_BY(mutex);
  };

  int Segment(int64_t segment, bool make, std::shared_ptr<File>* file) {
    Slot& slot = slots_[static_cast<size_t>(segment) % slots_.size()];
    MutexLock lock(&slot.mutex);
    if (slot.segment != segment) {
      int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (make ? O_CREAT : 0);
      int fd = openat(folder_->fd(), SegmentName(segment).c_str(), flags, 0600);
      if (fd < 0) return errno;
      slot.file = std::make_shared<File>(fd);
      slot.segment = segment;
    }
    *file = slot.file;
    return 0;
  }

  const std::shared_ptr<File> folder_;
  char* const index_;
  std::array<Slot, 128> slots_;
};

void RemoveSegments(const std::string& folder) {
  std::error_code ignored;
  for (const auto& file : std::filesystem::directory_iterator(folder, ignored)) {
    if (file.path().filename().string().rfind(kSegment, 0) == 0) std::filesystem::remove(file.path(), ignored);
  }
}

// Makes the index beside its place, whole, and puts it there; other processes wait for the folder's lock meanwhile.
int MakeIndex(int folder, const StoreOptions& options) {
  int64_t nbytes = IndexBytes(options.samples);
  File file(openat(folder, kNewIndex, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (file.fd() < 0) return errno;
  std::vector<char> begin(static_cast<size_t>(kEntriesAt));
  BeginIndex(begin.data(), options);
  // Without room for its pages, touching the map would end the process: zeros are written, not left as a hole.
  std::vector<char> zeros(1 << 20);
  for (int64_t at = 0; at < nbytes;) {
    int64_t n = std::min<int64_t>(nbytes - at, static_cast<int64_t>(zeros.size()));
    int error = WriteAt(file.fd(), {{zeros.data(), static_cast<size_t>(n)}}, at);
    if (error != 0) return error;
    at += n;
  }
  int error = WriteAt(file.fd(), {{begin.data(), begin.size()}}, 0);
  if (error != 0) return error;
  return renameat(folder, kNewIndex, folder, kIndex) == 0 ? 0 : errno;
}

}  // namespace

Status OpenDisk(const StoreOptions& options, const Warn& warn, std::shared_ptr<Place>* place) {
  place->reset();
  const std::string without = "cache '" + options.name + "': does without its disk (" + options.disk + "): ";
  std::error_code failed;
  std::filesystem::create_directories(options.disk, failed);
  std::shared_ptr<File> folder = std::make_shared<File>(open(options.disk.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder->fd() < 0) {
    warn(without + Words(errno));
    return Status::Ok();
  }
  // Whoever finds no index makes it, and the others wait. The system gives the lock back when a process ends; a file
  // system without locks can make the index twice, and then what one of them stores is found damaged and loaded again.
  File lock(open(options.disk.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  while (flock(lock.fd(), LOCK_EX) != 0 && errno == EINTR) {
  }
  const int64_t nbytes = IndexBytes(options.samples);
  for (bool made = false;; made = true) {
    File index(openat(folder->fd(), kIndex, O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (index.fd() < 0 && (errno != ENOENT || made)) {
      warn(without + "its index: " + Words(errno));
      return Status::Ok();
    }
    if (index.fd() >= 0) {
      alignas(IndexHead) char begin[kEntriesAt];
      struct stat seen{};
      int64_t got = 0;
      bool whole = fstat(index.fd(), &seen) == 0 && ReadAt(index.fd(), begin, sizeof(begin), 0, &got) == 0 &&
                   got == static_cast<int64_t>(sizeof(begin));
      const IndexHead& head = *reinterpret_cast<IndexHead*>(begin + kHeadAt);
      IndexIs is = whole ? JudgeIndex(head, options) : IndexIs::kNone;
      if (is == IndexIs::kOther) return Invalid(OtherData("the folder " + options.disk, head, options));
      int64_t used = whole ? head.used.load() : 0;
      if (seen.st_size != nbytes || used < 0 || used > kFarthest) is = IndexIs::kNone;
      if (is == IndexIs::kOurs) {
        void* base = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, index.fd(), 0);
        if (base == MAP_FAILED) {
          warn(without + "mapping its index: " + Words(errno));
          return Status::Ok();
        }
        *place = std::make_shared<DiskPlace>(options, folder, static_cast<char*>(base), warn);
        return Status::Ok();
      }
      if (made) {
        warn(without + "its index cannot be read back");
        return Status::Ok();
      }
      warn("cache '" + options.name + "': the index in " + options.disk +
           " is damaged or of another version of the format: the cache starts empty");
    }
    RemoveSegments(options.disk);
    int error = MakeIndex(folder->fd(), options);
    if (error != 0) {
      unlinkat(folder->fd(), kNewIndex, 0);
      warn(without + "making its index: " + Words(error));
      return Status::Ok();
    }
  }
}

Status LookAtIndex(const std::string& path, StoreAbout* about) {
  File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const std::string subject = "cache index (" + path + ")";
  if (file.fd() < 0) return Invalid(subject + ": " + Words(errno));
  alignas(IndexHead) char begin[kEntriesAt];
  int64_t seen = 0;
  int error = ReadAt(file.fd(), begin, sizeof(begin), 0, &seen);
  if (error != 0) return Invalid(subject + ": " + Words(error));
  const IndexHead& head = *reinterpret_cast<IndexHead*>(begin + kHeadAt);
  StoreOptions same;
  same.fingerprint = {head.fingerprint[0], head.fingerprint[1]};
  same.samples = head.samples;
  if (seen != static_cast<int64_t>(sizeof(begin)) || JudgeIndex(head, same) != IndexIs::kOurs) {
    return Invalid(subject + ": must be an index of version " + std::to_string(kFormatVersion) +
                   " of the format; it is damaged, of another version, or another file");
  }
  *about = {{head.fingerprint[0], head.fingerprint[1]}, head.samples, 0, 0};
  std::vector<uint64_t> entries(1 << 16);
  for (int64_t at = 0; at < head.samples; at += static_cast<int64_t>(entries.size())) {
    int64_t n = std::min<int64_t>(head.samples - at, static_cast<int64_t>(entries.size())) * 8;
    error = ReadAt(file.fd(), reinterpret_cast<char*>(entries.data()), n, kEntriesAt + at * 8, &seen);
    if (error != 0 || seen != n) return Invalid(subject + ": its entries must be there; it is cut off");
    for (int64_t i = 0; i < n / 8; ++i) {
      if (StateOf(entries[static_cast<size_t>(i)]) != kReady) continue;
      ++about->records;
      about->record_bytes += RoomOf(entries[static_cast<size_t>(i)]);
    }
  }
  return Status::Ok();
}

}  // namespace hvd_ext

#include "shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <utility>

namespace hvd_ext {
namespace {

constexpr const char* kName = "hvd_ext";         // the name of the file, which /proc shows
constexpr const char* kLink = "/memfd:hvd_ext";  // the link that /proc shows for it
constexpr int64_t kStep = 4 << 20;               // the fewest bytes that are reserved at once
constexpr int64_t kLargest = int64_t{64} << 30;  // with 128 ranks on a host, each maps 8 of its 128 TiB
constexpr int64_t kAlignment = 64;               // a cache line, and the widest vector

int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

Status Failed(const std::string& call) {
  return Internal("shared memory: " + call + ": " + std::strerror(errno) + " (code " + std::to_string(errno) + ")");
}

// Reserves pages of the file, and returns whether the system has them.
bool ReservePages(int fd, int64_t offset, int64_t nbytes) {
  int failed = -1;
  do {
    failed = fallocate(fd, 0, offset, nbytes);
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

// Maps the file of an arena; MAP_FAILED where it fails. It is left out of core dumps: a dump would allocate a page for
// every hole, up to all of the host's memory.
void* Map(int fd, int64_t capacity) {
  const size_t nbytes = static_cast<size_t>(capacity);
  void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base != MAP_FAILED) madvise(base, nbytes, MADV_DONTDUMP);
  return base;
}

// The arenas of this process by token, for MappedArena. It is never destroyed, because an arena may end later than
// static objects.
struct Registry {
  Mutex mutex;
  std::map<std::array<uint64_t, 2>, std::weak_ptr<Arena>> arenas HVD_EXT_GUARDED_BY(mutex);
};

Registry& TheRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

int64_t Arena::DefaultCapacity() {
  int64_t page = sysconf(_SC_PAGESIZE);
  int64_t memory = sysconf(_SC_PHYS_PAGES) * page;
  rlimit addresses{};
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY) return 0;
  return memory > 0 ? std::min(RoundUp(memory, page), kLargest) : kLargest;
}

Status Arena::Make(int64_t capacity, std::shared_ptr<Arena>* arena) {
  ArenaAddress address;
  address.pid = getpid();
  address.capacity = RoundUp(capacity, sysconf(_SC_PAGESIZE));
  if (getrandom(address.token.data(), sizeof(address.token), 0) != static_cast<ssize_t>(sizeof(address.token))) {
    return Failed("getrandom");
  }
  int fd = memfd_create(kName, MFD_CLOEXEC);
  if (fd < 0) return Failed("memfd_create");
  address.fd = fd;
  void* base = MAP_FAILED;
  Status status;
  if (ftruncate(fd, address.capacity) != 0) {
    status = Failed("ftruncate");
  } else {
    base = Map(fd, address.capacity);
    if (base == MAP_FAILED) status = Failed("mmap of " + std::to_string(address.capacity) + " bytes");
  }
  if (!status.ok()) {
    close(fd);
    return status;
  }
  madvise(base, static_cast<size_t>(address.capacity), MADV_HUGEPAGE);  // a hint, which most systems refuse here
  std::shared_ptr<Arena> made(new Arena(static_cast<char*>(base), address));
  char* begin = made->Take(sizeof(address.token));
  if (begin == nullptr) return Failed("reserving its first pages");
  std::memcpy(begin, address.token.data(), sizeof(address.token));
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  registry.arenas[address.token] = made;
  *arena = std::move(made);
  return Status::Ok();
}

Arena::Arena(char* base, const ArenaAddress& address) : base_(base), address_(address) {}

Arena::~Arena() {
  {
    Registry& registry = TheRegistry();
    MutexLock lock(&registry.mutex);
    registry.arenas.erase(address_.token);
  }
  {
    MutexLock lock(&mutex_);
    for (char* pinned : pinned_) unpin_(pinned);
  }
  munmap(base_, static_cast<size_t>(address_.capacity));
  close(static_cast<int>(address_.fd));
}

void Arena::PinBy(std::function<void(char*, int64_t)> pin, std::function<void(char*)> unpin) {
  MutexLock lock(&mutex_);
  pin_ = std::move(pin);
  unpin_ = std::move(unpin);
  Pin(0, reserved_);
}

void Arena::Pin(int64_t offset, int64_t nbytes) {
  if (pin_ == nullptr || nbytes == 0) return;
  pin_(base_ + offset, nbytes);
  pinned_.push_back(base_ + offset);
}

char* Arena::Take(int64_t nbytes) {
  MutexLock lock(&mutex_);
  int64_t rounded = RoundUp(std::max<int64_t>(nbytes, 1), kAlignment);
  if (rounded > address_.capacity - used_) return nullptr;
  int64_t end = used_ + rounded;
  if (end > reserved_) {
    // Touching a page that the system cannot provide would end the process with SIGBUS. If its reservation here fails,
    // the caller gets null instead.
    int64_t more = std::min(RoundUp(end - reserved_, kStep), address_.capacity - reserved_);
    if (!ReservePages(static_cast<int>(address_.fd), reserved_, more)) return nullptr;
#ifdef MADV_POPULATE_WRITE
    madvise(base_ + reserved_, static_cast<size_t>(more),
            MADV_POPULATE_WRITE);  // spares the first step its page faults
#endif
    Pin(reserved_, more);
    reserved_ += more;
  }
  return base_ + std::exchange(used_, end);
}

MappedArena::MappedArena(char* base, int64_t capacity, int fd, std::shared_ptr<Arena> own)
    : base_(base), capacity_(capacity), fd_(fd), own_(std::move(own)) {}

MappedArena::~MappedArena() {
  if (own_ == nullptr) munmap(base_, static_cast<size_t>(capacity_));
  if (fd_ >= 0) close(fd_);
}

Status MappedArena::Reserve(int64_t offset, int64_t nbytes) {
  int fd = own_ != nullptr ? static_cast<int>(own_->address_.fd) : fd_;
  if (fd < 0) return Internal("shared memory: must be opened for reserving");
  if (At(offset, nbytes) == nullptr) return Internal("shared memory: a range that is reserved must lie inside");
  if (nbytes > 0 && !ReservePages(fd, offset, nbytes)) {
    return Failed("reserving " + std::to_string(nbytes) + " bytes");
  }
  return Status::Ok();
}

Status MappedArena::Open(const ArenaAddress& address, std::shared_ptr<MappedArena>* mapped, bool reserves) {
  {
    Registry& registry = TheRegistry();
    MutexLock lock(&registry.mutex);
    auto found = registry.arenas.find(address.token);
    std::shared_ptr<Arena> own = found == registry.arenas.end() ? nullptr : found->second.lock();
    if (own != nullptr) {
      char* base = own->base_;
      mapped->reset(new MappedArena(base, address.capacity, -1, std::move(own)));
      return Status::Ok();
    }
  }
  std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  // The file is opened only if it is an arena: with a process id of another container the path may name anything, even
  // a device.
  char link[64] = "";
  if (readlink(path.c_str(), link, sizeof(link) - 1) < 0) return Failed("readlink of " + path);
  if (std::strncmp(link, kLink, std::strlen(kLink)) != 0) {
    return Internal("shared memory: " + path + " is '" + link + "', must be an arena of hvd_ext");
  }
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return Failed("open of " + path);
  struct stat seen{};
  void* base = MAP_FAILED;
  Status status;
  if (fstat(fd, &seen) != 0) {
    status = Failed("fstat of " + path);
  } else if (seen.st_size != address.capacity) {
    status = Internal("shared memory: " + path + " has " + std::to_string(seen.st_size) + " bytes, must have " +
                      std::to_string(address.capacity));
  } else {
    base = Map(fd, address.capacity);
    if (base == MAP_FAILED) status = Failed("mmap of " + path);
  }
  if (!status.ok() || !reserves) {
    close(fd);
    fd = -1;
  }
  if (!status.ok()) return status;
  std::shared_ptr<MappedArena> opened(new MappedArena(static_cast<char*>(base), address.capacity, fd, nullptr));
  if (std::memcmp(base, address.token.data(), sizeof(address.token)) != 0) {
    return Internal("shared memory: " + path + " is another rank's arena");
  }
  *mapped = std::move(opened);
  return Status::Ok();
}

}  // namespace hvd_ext

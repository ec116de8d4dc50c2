#include "cache/claim.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>

#include "cache/file.h"
#include "cache/format.h"

namespace hvd_ext {
namespace {

// From the lowest bit: state 2, time 24, begin 8, where 8, process id 22.
constexpr int kTimeAt = 2, kOwnerAt = 26, kPidAt = 42;
constexpr uint64_t kTimeMask = 0xffffff;
constexpr uint64_t kOwnerMask = 0xffff;  // begin and where
constexpr int64_t kTicks = 8;            // a second

std::string ReadAll(const std::string& path) {
  char text[1024];
  int64_t n = 0;
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.fd() < 0 || ReadAt(file.fd(), text, sizeof(text), 0, &n) != 0) return "";
  return std::string(text, static_cast<size_t>(n));
}

uint64_t Hash8(const std::string& text) { return Crc32c(0, text.data(), static_cast<int64_t>(text.size())) & 0xff; }

// When a process began, hashed. False: there is no such process, or it has ended and was not waited for.
bool BeginOf(int64_t pid, uint64_t* hash) {
  std::string stat = ReadAll("/proc/" + std::to_string(pid) + "/stat");
  size_t at = stat.rfind(')');  // the name before it may hold anything
  if (at == std::string::npos || at + 2 >= stat.size()) return false;
  char state = stat[at + 2];  // field 3
  if (state == 'Z' || state == 'X') return false;
  for (int field = 3; field < 22 && at != std::string::npos; ++field) at = stat.find(' ', at + 2);
  // `at` is now the blank before field 22, the time at which the process began.
  if (at == std::string::npos) return false;
  *hash = Hash8(stat.substr(at + 1, stat.find(' ', at + 1) - at - 1));
  return true;
}

uint64_t Where() {
  struct stat seen{};
  if (stat("/proc/self/ns/pid", &seen) != 0) seen.st_ino = 0;
  return Hash8(ReadAll("/proc/sys/kernel/random/boot_id") + std::to_string(seen.st_ino));
}

// This process in a claim, less state and time. A child of fork() is another process.
uint64_t Self() {
  static std::atomic<uint64_t> known{0};
  uint64_t pid = static_cast<uint64_t>(getpid());
  uint64_t self = known.load(std::memory_order_relaxed);
  if (self >> kPidAt == pid) return self;
  uint64_t begin = 0;
  BeginOf(static_cast<int64_t>(pid), &begin);
  self = pid << kPidAt | (Where() << 8 | begin) << kOwnerAt;
  known.store(self, std::memory_order_relaxed);
  return self;
}

uint64_t Now() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec * kTicks + now.tv_nsec / (1000000000 / kTicks)) & kTimeMask;
}

}  // namespace

uint64_t NewClaim() { return Self() | Now() << kTimeAt | kClaimed; }

bool IsOwnClaim(uint64_t claim) { return StateOf(claim) == kClaimed && claim >> kOwnerAt == Self() >> kOwnerAt; }

bool IsStaleClaim(uint64_t claim, double claim_s) {
  // The difference of two times on a circle. A clock may be a little behind that of the claim's owner.
  int64_t age = static_cast<int64_t>((Now() - (claim >> kTimeAt)) & kTimeMask);
  if (age > static_cast<int64_t>(kTimeMask / 2)) age = static_cast<int64_t>(kTimeMask) + 1 - age;
  if (static_cast<double>(age) > claim_s * kTicks) return true;
  if (IsOwnClaim(claim)) return false;
  uint64_t self = Self();
  uint64_t owner = claim >> kOwnerAt & kOwnerMask;
  if (owner >> 8 != (self >> kOwnerAt & kOwnerMask) >> 8) return false;  // its process id means nothing here
  uint64_t begin = 0;
  bool known = BeginOf(getpid(), &begin);  // else /proc cannot be read
  return known && (!BeginOf(static_cast<int64_t>(claim >> kPidAt), &begin) || begin != (owner & 0xff));
}

}  // namespace hvd_ext

// Files of the system: a descriptor that closes itself, complete reads and writes, and the words of an error.
#pragma once

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace hvd_ext {

inline std::string Words(int error) {
  return std::string(std::strerror(error)) + " (code " + std::to_string(error) + ")";
}

class File {
 public:
  explicit File(int fd = -1) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File() {
    const int before = errno;  // of the call that has failed
    if (fd_ >= 0) close(fd_);
    errno = before;
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Both return 0, or the code of the error; a read that comes to the end of the file is short.
inline int ReadAt(int fd, char* to, int64_t nbytes, int64_t offset, int64_t* seen) {
  *seen = 0;
  while (*seen < nbytes) {
    ssize_t n = pread(fd, to + *seen, static_cast<size_t>(nbytes - *seen), offset + *seen);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) break;
    *seen += n;
  }
  return 0;
}

inline int WriteAt(int fd, std::vector<iovec> parts, int64_t offset) {
  size_t first = 0;
  while (first < parts.size()) {
    int count = static_cast<int>(std::min<size_t>(parts.size() - first, 64));
    ssize_t n = pwritev(fd, parts.data() + first, count, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    offset += n;
    while (first < parts.size() && n >= static_cast<ssize_t>(parts[first].iov_len)) {
      n -= static_cast<ssize_t>(parts[first++].iov_len);
    }
    if (n > 0) {
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + n;
      parts[first].iov_len -= static_cast<size_t>(n);
    }
  }
  return 0;
}

}  // namespace hvd_ext

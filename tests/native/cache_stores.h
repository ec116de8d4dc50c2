// What the tests of the data cache share: a folder that goes away, samples whose bytes follow from their number, and
// stores that are opened and looked up in one line.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cache/store.h"
#include "harness.h"

namespace hvd_ext::test {

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hvd_ext-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// The bytes of a sample: every byte depends on the number and on its place.
inline std::string BytesOf(int64_t number, int64_t nbytes) {
  std::string bytes(static_cast<size_t>(nbytes), 0);
  uint64_t state = static_cast<uint64_t>(number) * 0x9e3779b97f4a7c15u + 1;
  for (char& byte : bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

inline StoreOptions OptionsFor(int64_t samples) {
  StoreOptions options;
  options.name = "test";
  options.fingerprint = {0x1234, 0x5678};
  options.samples = samples;
  return options;
}

inline std::shared_ptr<Store> Opened(const StoreOptions& options) {
  std::shared_ptr<Store> store;
  CHECK_OK(Store::Open(options, &store));
  return store;
}

// All numbers of a store, ascending.
inline std::vector<int64_t> AllOf(int64_t samples) {
  std::vector<int64_t> all(static_cast<size_t>(samples));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

struct Seen {
  std::map<int64_t, std::string> there;  // by place in the numbers
  std::vector<int64_t> missing, pending;
};

inline Seen LookUp(Store* store, const std::vector<int64_t>& numbers, bool wait = false) {
  Seen seen;
  auto take = [&](int64_t place, const char* data, int64_t nbytes) {
    CHECK(seen.there.emplace(place, std::string(data, static_cast<size_t>(nbytes))).second);
  };
  CHECK_OK(
      store->Lookup(numbers.data(), static_cast<int64_t>(numbers.size()), wait, take, &seen.missing, &seen.pending));
  CHECK_EQ(seen.there.size() + seen.missing.size() + seen.pending.size(), numbers.size());
  return seen;
}

// The bytes of a record that must be there.
inline std::string RecordOf(Store* store, int64_t number) {
  Seen seen = LookUp(store, {number});
  CHECK_EQ(seen.there.size(), 1u);
  return seen.there.at(0);
}

inline bool Put(Store* store, int64_t number, const std::string& bytes) {
  Piece piece{bytes.data(), static_cast<int64_t>(bytes.size())};
  bool stored = false;
  CHECK_OK(store->Insert(number, &piece, 1, &stored));
  return stored;
}

inline std::vector<std::string> WarningsOf(Store* store) {
  std::vector<std::string> all;
  for (std::string words; store->NextWarning(&words);) all.push_back(words);
  return all;
}

inline std::string OnlyWarningOf(Store* store) {
  std::vector<std::string> all = WarningsOf(store);
  CHECK_EQ(all.size(), 1u);
  return all[0];
}

// Checks that there is one warning and that it contains `part`.
inline void MustWarn(Store* store, const std::string& part) {
  const std::string warning = OnlyWarningOf(store);
  if (warning.find(part) == std::string::npos) throw Failure("must contain '" + part + "': " + warning);
}

inline void WriteFile(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

// Changes one byte of a file in place.
inline void Flip(const std::string& path, int64_t at) {
  int fd = open(path.c_str(), O_RDWR);
  CHECK(fd >= 0);
  char byte = 0;
  CHECK_EQ(pread(fd, &byte, 1, at), 1);
  byte = static_cast<char>(byte ^ 0x10);
  CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
  close(fd);
}

// Runs `body` in a process of its own, which ends with the exit status that body returns.
inline pid_t Child(const std::function<int()>& body) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (child > 0) return child;
  int status = 99;
  try {
    status = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "in a child: %s\n", error.what());
  }
  _exit(status);
}

inline int ExitOf(pid_t child) {
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace hvd_ext::test

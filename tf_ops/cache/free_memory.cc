#include "cache/free_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

namespace hvd_ext {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// What the versions of cgroups call the same things.
struct Names {
  const char *hierarchy, *limit, *used, *file_pages, *shmem;
};
constexpr Names kFirst = {"sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_cache ",
                          "total_shmem "};
constexpr Names kSecond = {"sys/fs/cgroup", "/memory.max", "/memory.current", "file ", "shmem "};

// The number that a file begins with; kNone where there is no such file or it says "max".
int64_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? number : kNone;
}

// The number after `key` at the begin of a line, or -1.
int64_t After(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size(), key) == 0) return std::strtoll(line.c_str() + key.size(), nullptr, 10);
  }
  return -1;
}

void Narrow(FreeMemory* free, int64_t limit, int64_t used, int64_t droppable, const std::string& who) {
  if (limit == kNone || used == kNone) return;
  int64_t left = std::max<int64_t>(limit - std::max<int64_t>(used - std::max<int64_t>(droppable, 0), 0), 0);
  if (free->known && left >= free->left) return;
  *free = {true, left, limit, who};
}

// All folders from a cgroup up to the root of its hierarchy. In a container the path may be one of the host, which
// is not there: then the root of the hierarchy is the container's own cgroup.
std::vector<std::string> Upwards(const std::string& hierarchy, std::string path) {
  std::vector<std::string> folders;
  while (!path.empty() && path != "/") {
    folders.push_back(hierarchy + path);
    path.erase(path.find_last_of('/'));
  }
  folders.push_back(hierarchy);
  return folders;
}

}  // namespace

FreeMemory LookAtFreeMemory(const std::string& given) {
  std::string root = given.empty() || given.back() != '/' ? given + "/" : given;
  FreeMemory free;
  std::string meminfo = root + "proc/meminfo";
  int64_t available_kb = After(meminfo, "MemAvailable:");
  if (available_kb >= 0) free = {true, available_kb * 1024, After(meminfo, "MemTotal:") * 1024, meminfo};
  std::ifstream cgroups(root + "proc/self/cgroup");
  std::string line;  // number:controllers:path
  while (std::getline(cgroups, line)) {
    size_t first = line.find(':');
    size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.find("..", second) != std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool first_version = !controllers.empty();
    if (first_version && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const Names& names = first_version ? kFirst : kSecond;
    for (const std::string& folder : Upwards(root + names.hierarchy, path)) {
      std::string limit = folder + names.limit;
      int64_t file_pages = After(folder + "/memory.stat", names.file_pages);
      int64_t shmem = std::max<int64_t>(After(folder + "/memory.stat", names.shmem), 0);
      Narrow(&free, NumberIn(limit), NumberIn(folder + names.used), file_pages - shmem, limit);
    }
  }
  return free;
}

}  // namespace hvd_ext

// What memory the host can still give: to the cgroups of this process, and on the whole machine.
#pragma once

#include <cstdint>
#include <string>

namespace hvd_ext {

struct FreeMemory {
  bool known = false;  // false: the machine does not say
  int64_t left = 0;    // bytes that can be used before the system ends processes; never negative
  int64_t all = 0;     // of which there are so many in all: the memory of the machine, or the limit of a cgroup
  std::string who;     // what says so, for messages: the file
};

// Looks at MemAvailable of `root`proc/meminfo, and at the memory limits of all cgroups of version 2 and of version 1
// above this process, which `root`proc/self/cgroup names; the scarcest counts. Pages of files that the system can drop
// at once count as free, but pages of memory files (shmem), such as the cache's own, do not.
FreeMemory LookAtFreeMemory(const std::string& root);

}  // namespace hvd_ext

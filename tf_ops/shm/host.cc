#include "shm/host.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace hvd_ext {
namespace {

void Hash(const std::string& text, uint64_t* hash) {  // FNV-1a
  for (unsigned char c : text) *hash = (*hash ^ c) * 1099511628211u;
}

}  // namespace

uint64_t HostIdentity() {
  uint64_t hash = 14695981039346656037u;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  Hash(boot, &hash);
  for (const char* name : {"ipc", "net", "pid"}) {
    char link[64] = "";
    if (readlink((std::string("/proc/self/ns/") + name).c_str(), link, sizeof(link) - 1) > 0) Hash(link, &hash);
  }
  utsname names{};
  if (uname(&names) == 0) Hash(names.nodename, &hash);
  return hash;
}

}  // namespace hvd_ext

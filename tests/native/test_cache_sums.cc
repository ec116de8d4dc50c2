// Checksums, and what the host says of its memory.
#include <random>

#include "cache/crc32c.h"
#include "cache/free_memory.h"
#include "cache_stores.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

TEST("cache sums: the values of RFC 3720, appendix B.4, and of the catalogue of CRCs") {
  std::string zeros(32, '\0'), ones(32, '\xff'), up(32, '\0'), down(32, '\0');
  for (int i = 0; i < 32; ++i) {
    up[static_cast<size_t>(i)] = static_cast<char>(i);
    down[static_cast<size_t>(i)] = static_cast<char>(31 - i);
  }
  for (auto crc : {Crc32c, Crc32cPortable}) {
    CHECK_EQ(crc(0, "", 0), 0u);
    CHECK_EQ(crc(0, "123456789", 9), 0xe3069283u);
    CHECK_EQ(crc(0, zeros.data(), 32), 0x8a9136aau);
    CHECK_EQ(crc(0, ones.data(), 32), 0x62a8ab43u);
    CHECK_EQ(crc(0, up.data(), 32), 0x46dd794eu);
    CHECK_EQ(crc(0, down.data(), 32), 0x113fdb5cu);
  }
}

TEST("cache sums: streams, the portable way and parts one after the other agree at any length and place") {
  std::string bytes = BytesOf(7, 60000);
  std::mt19937 random(3);
  for (int i = 0; i < 100; ++i) {
    int64_t n = std::uniform_int_distribution<int64_t>(0, i % 3 == 0 ? 40 : i % 3 == 1 ? 2000 : 50000)(random);
    const char* at = bytes.data() + std::uniform_int_distribution<int>(0, 9999)(random);
    uint32_t expected = Crc32cPortable(0, at, n);
    CHECK_EQ(Crc32c(0, at, n), expected);
    int64_t first = std::uniform_int_distribution<int64_t>(0, n)(random);
    uint32_t a = Crc32c(0, at, first);
    CHECK_EQ(Crc32c(a, at + first, n - first), expected);
  }
}

TEST("cache memory: the machine and every cgroup above the process are asked, and the scarcest counts") {
  Folder root;
  CHECK(!LookAtFreeMemory(root / "").known);
  WriteFile(root / "proc/meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable:     400 kB\n");
  FreeMemory free = LookAtFreeMemory(root / "");
  CHECK(free.known);
  CHECK_EQ(free.left, 400 * 1024);
  CHECK_EQ(free.all, 1000 * 1024);

  WriteFile(root / "proc/self/cgroup", "0::/job/step\n");
  WriteFile(root / "sys/fs/cgroup/job/step/memory.max", "max\n");
  WriteFile(root / "sys/fs/cgroup/job/step/memory.current", "50000\n");
  WriteFile(root / "sys/fs/cgroup/job/memory.max", "300000\n");
  WriteFile(root / "sys/fs/cgroup/job/memory.current", "200000\n");
  WriteFile(root / "sys/fs/cgroup/job/memory.stat", "anon 1\nfile 70000\nkernel 3\nshmem 30000\nfile_mapped 5\n");
  free = LookAtFreeMemory(root / "");
  CHECK_EQ(free.left, 300000 - (200000 - 40000));  // pages of files can be dropped, those of memory files not
  CHECK_EQ(free.all, 300000);
  CHECK(free.who.find("job/memory.max") != std::string::npos);

  // In a container the path may be the host's, and the root of the hierarchy is the container's cgroup.
  WriteFile(root / "proc/self/cgroup", "0::/elsewhere\n");
  WriteFile(root / "sys/fs/cgroup/memory.max", "1000\n");
  WriteFile(root / "sys/fs/cgroup/memory.current", "2000\n");
  CHECK_EQ(LookAtFreeMemory(root / "").left, 0);
}

TEST("cache memory: a cgroup of version 1 counts too") {
  Folder root;
  WriteFile(root / "proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB\n");
  WriteFile(root / "proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/job\n");
  WriteFile(root / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "500000\n");
  WriteFile(root / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "450000\n");
  WriteFile(root / "sys/fs/cgroup/memory/job/memory.stat", "cache 1\ntotal_cache 20000\ntotal_shmem 5000\n");
  CHECK_EQ(LookAtFreeMemory(root / "").left, 500000 - (450000 - 15000));
}

}  // namespace
}  // namespace hvd_ext::test

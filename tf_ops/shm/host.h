// Tells which processes can share memory.
#pragma once

#include <cstdint>

namespace hvd_ext {

// Returns the same number in all processes of one machine that are in the same containers and namespaces. Processes in
// other containers, or in a network namespace of their own, count as those of another host, because somebody separated
// them on purpose.
uint64_t HostIdentity();

}  // namespace hvd_ext

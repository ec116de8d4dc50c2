// Which processes can share memory.
#pragma once

#include <cstdint>

namespace hvd_ext {

// The same number in all processes of one machine that lie in the same containers and namespaces. Processes in other
// containers, or in a network namespace of their own, count as those of another host: somebody separated them on
// purpose.
uint64_t HostIdentity();

}  // namespace hvd_ext

// Who moves an engine's work on: one thread at a time, the engine's own or a caller that would only wait (see
// progress_loop.h). It holds the engine's progress lock, and with it this role: what only that thread may touch is
// guarded by the role, and what only it may call requires the role. One name stands for the locks of all engines,
// because the parts of one engine never call those of another.
#pragma once

#include "base/mutex.h"

namespace hvd_ext {

class HVD_EXT_CAPABILITY("role") ProgressRole {};
inline ProgressRole progress_role;

// For functions that are called back with the role, as those in the inbox are: clang cannot follow them.
inline void AssertProgress() HVD_EXT_ASSERT(progress_role) {}

}  // namespace hvd_ext

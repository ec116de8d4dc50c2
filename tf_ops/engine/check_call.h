// What a call must be before it is announced. Pure logic.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "engine/engine.h"

namespace hvd_ext {

bool NeedsPlan(Kind kind);
Status CheckCall(const CallSpec& spec, int size, const void* input, int rank);
// A plan's units are parts of ranks where ranks have parts.
Status CheckUnits(const CallSpec& spec, int64_t units, int64_t size);

}  // namespace hvd_ext

// What a call must be before it is announced. Pure logic.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "engine/engine.h"

namespace hvd_ext {

bool NeedsPlan(Kind kind);
// Whether each rank has a part of the call's tensor, along its dimension 0.
bool IsDivided(Kind kind);
Status CheckCall(const CallSpec& spec, int size, const void* input, int rank);
// Where each rank has a part of the tensor, the plan must have a unit for each part.
Status CheckUnits(const CallSpec& spec, int64_t units, int64_t size);

}  // namespace hvd_ext

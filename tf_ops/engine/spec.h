// What a job and its channels are told by their user, as the engine keeps it: the structs of spec.def.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/transport.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace hvd_ext {

// How the positions of selected entries travel.
enum class SparseIndices : int32_t { kSmallest = 0, kRaw = 1, kDelta = 2, kBitmap = 3 };

// Whose gradients a round waits for.
enum class Sync : int32_t {
  kFull = 0,      // those of all ranks
  kSolo = 1,      // the first that comes
  kMajority = 2,  // that of a rank drawn for this round, so on average half of them
  kQuorum = 3     // the first `quorum` of them
};

// clang-format off
#define HVD_EXT_STRUCT(name, kept) struct kept {
#define HVD_EXT_FIELD(type, name) type name = 0;
#define HVD_EXT_TYPED(type, name, kept, unset) kept name = unset;
#define HVD_EXT_COUNT(type, name)
#define HVD_EXT_LIST(type, name, element, count) std::vector<element> name{};
#define HVD_EXT_END(name, kept) };
#include "engine/spec.def"
// clang-format on

}  // namespace hvd_ext

// Samples that no place of a cache has: who loads them is not the store, but the owner of the process's caches. Python
// sets its function through the C ABI (hvd_ext_cache_set_load), and the ops call it where a batch is not complete.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "cache/api.h"
#include "cache/store.h"

namespace hvd_ext {

// Has samples loaded, and waits for them. The load gets a number, by which its samples are given to it.
//   numbers: of the samples. The first `missing` of them are claimed by the caller, and are inserted by who loads them;
//     the others are pending (store.h).
//   parts: of the order that the batch is of, for who takes another sample in place of a bad one.
//   take: receives each of their records with its place in `numbers`, on the thread that gives it, perhaps more than
//     once, and several places at the same time.
// Fails as the load does; then it has given the claims back.
Status LoadAbsent(int64_t cache, const std::vector<int64_t>& numbers, int64_t missing, int64_t parts,
                  const Store::Take& take);

// Gives a load that is under way the record of one of its places, which the pieces make up one after the other.
Status GiveLoaded(int64_t load, int64_t place, const Piece* pieces, int64_t n_pieces);
// Lets a load that is under way fail.
Status FailLoad(int64_t load, Status status);

// Sets the function that loads, for all caches of the process; null: none. Loads that are under way go on.
void SetLoad(HvdExtCacheLoad load);

}  // namespace hvd_ext

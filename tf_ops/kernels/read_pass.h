// What the benchmark of top-k sets beside it: one pass over memory, and Algorithm 1 as printed. No caller in the
// engine.
#pragma once

#include <cstdint>

namespace hvd_ext {

// The sum of |x[i]|, read once with prefetched wide loads: what any selection must pay at least. The calling thread
// takes the first of `threads` equal parts (at least 1); the others are started for the call.
double ReadPass(const float* x, int64_t elements, int32_t threads);

// MSTopK, Algorithm 1 of the CommLib paper (section 3.1), line by line: |x| is stored, every trial counts over all of
// it, and nothing is guarded, so that it returns far more than k where no trial leaves at most k (ties, zeros, NaN,
// Inf). Returns how many were picked; `magnitudes`, `indices` and `values` have room for all `elements` (less than
// 2^31).
int64_t Algorithm1(const float* x, int64_t elements, int64_t k, int32_t samplings, uint64_t seed, float* magnitudes,
                   int32_t* indices, float* values);

}  // namespace hvd_ext

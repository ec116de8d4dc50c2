// Baselines of the top-k benchmark: one pass over memory, and Algorithm 1 as the paper prints it. The engine calls
// neither.
#pragma once

#include <cstdint>

namespace hvd_ext {

// Returns the sum of |x[i]|, and reads x once with prefetched wide loads: no selection can take less time. x is divided
// into `threads` equal parts (at least 1). The calling thread takes the first part, and threads that are started for
// this call take the others.
double ReadPass(const float* x, int64_t elements, int32_t threads);

// MSTopK, Algorithm 1 of the CommLib paper (section 3.1), line by line: |x| is stored, every trial counts over all of
// it, and no input gets special treatment, so that it returns far more than k elements where no trial leaves at most k
// (ties, zeros, NaN, Inf). Returns the number of picks. `magnitudes`, `indices` and `values` have room for all
// `elements`, which is less than 2^31.
int64_t Algorithm1(const float* x, int64_t elements, int64_t k, int32_t samplings, uint64_t seed, float* magnitudes,
                   int32_t* indices, float* values);

}  // namespace hvd_ext

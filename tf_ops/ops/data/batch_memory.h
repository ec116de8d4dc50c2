// Memory of batches, which is used again. What an allocator gives for a large batch is new each time, and the system
// hands new memory out zeroed, with a fault for every page: that costs more than the copy of the samples.
#pragma once

#include "ops/data/capi.h"

namespace hvd_ext {

// Below it an allocator has old memory at hand.
constexpr int64_t kLeastRecycled = 64 << 10;

// A tensor of numbers, not set. Its memory comes back with the last reference to the tensor.
TensorPointer NewBatch(TF_DataType dtype, const std::vector<int64_t>& dims);

}  // namespace hvd_ext

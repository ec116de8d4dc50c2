// Buckets in the memory of a GPU (CUDA). It is part of libhvd_ext_gpu.so; no op uses it yet.
#pragma once

#include <memory>

#include "engine/device.h"

namespace hvd_ext {

// GPU number `gpu` of those that this process sees. Throws std::runtime_error where there is none, or where it does not
// reach registered host memory at the host's addresses.
std::shared_ptr<Device> MakeGpuDevice(int gpu);

}  // namespace hvd_ext

// The device for GPUs comes from a library of its own, which is loaded where a GPU is used: no other part of the
// project needs CUDA.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "engine/device.h"

namespace hvd_ext {

// The device of GPU number `gpu` of those that this process sees, by libhvd_ext_gpu.so at this path.
Status LoadGpuDevice(const std::string& library, int gpu, std::shared_ptr<Device>* device);

}  // namespace hvd_ext

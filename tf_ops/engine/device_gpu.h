// Buckets in the memory of a GPU (CUDA); a part of libhvd_ext_gpu.so.
#pragma once

#include <memory>

#include "engine/device.h"

namespace hvd_ext {

// GPU number `gpu` of those that this process sees. Throws std::runtime_error where there is none, or where it does not
// reach registered host memory at the host's addresses.
std::shared_ptr<Device> MakeGpuDevice(int gpu);

// Counts the changes of what the library shares with the engine and the ops: Device, and the functions and structs of
// kernels/*_gpu.h.
constexpr int64_t kGpuVersion = 1;

}  // namespace hvd_ext

extern "C" int64_t hvd_ext_gpu_version(void);

// For LoadGpuDevice: the same without an exception. Returns null, or why there is no device; the text is this thread's,
// until its next call.
extern "C" const char* hvd_ext_gpu_device(int gpu, std::shared_ptr<hvd_ext::Device>* device);

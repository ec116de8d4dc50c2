#include "engine/device_library.h"

#include <dlfcn.h>

#include <string>

#include "engine/device_gpu.h"

namespace hvd_ext {

Status LoadGpuDevice(const std::string& library, int gpu, std::shared_ptr<Device>* device) {
  // It stays loaded: its device may live as long as the process.
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return Invalid(std::string("buckets on the GPU: the library does not load: ") + dlerror());
  using Make = const char*(int, std::shared_ptr<Device>*);
  auto* make = reinterpret_cast<Make*>(dlsym(loaded, "hvd_ext_gpu_device"));
  auto* version = reinterpret_cast<int64_t (*)()>(dlsym(loaded, "hvd_ext_gpu_version"));
  if (make == nullptr || version == nullptr || version() != kGpuVersion) {
    return Invalid("buckets on the GPU: " + library + " is of another version; build hvd_ext again");
  }
  const char* error = make(gpu, device);
  return error == nullptr ? Status::Ok()
                          : Invalid("buckets on the GPU: GPU " + std::to_string(gpu) + " cannot be used: " + error);
}

}  // namespace hvd_ext

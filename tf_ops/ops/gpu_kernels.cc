#include "ops/gpu_kernels.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "engine/device_gpu.h"

namespace hvd_ext {
namespace {

struct Loaded {
  GpuKernels kernels{};
  absl::Status status;
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// The path of a file beside this library.
std::string Beside(const char* name) {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&Beside), &info);
  const std::string here = info.dli_fname == nullptr ? "" : info.dli_fname;
  return here.substr(0, here.rfind('/') + 1) + name;
}

Loaded Load() {
  Loaded loaded;
  const std::string path = Beside("libhvd_ext_gpu.so");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.status = absl::UnimplementedError(absl::StrCat(
        "the kernels for GPUs do not load, which a build with nvcc makes (python -m hvd_ext build): ", dlerror()));
    return loaded;
  }
  GpuKernels& k = loaded.kernels;
  decltype(&hvd_ext_gpu_version) version = nullptr;
  const bool all = Find(library, "hvd_ext_gpu_version", &version) && version() == kGpuVersion &&
                   Find(library, "hvd_ext_topk_gpu_workspace", &k.topk_workspace) &&
                   Find(library, "hvd_ext_topk_gpu", &k.topk) &&
                   Find(library, "hvd_ext_norms_gpu_workspace", &k.norms_workspace) &&
                   Find(library, "hvd_ext_norms_gpu", &k.norms) &&
                   Find(library, "hvd_ext_layerwise_gpu_workspace", &k.layerwise_workspace) &&
                   Find(library, "hvd_ext_lars_gpu", &k.lars) && Find(library, "hvd_ext_lamb_gpu", &k.lamb) &&
                   Find(library, "hvd_ext_move_gpu", &k.move) && Find(library, "hvd_ext_layerwise_gpu_error", &k.error);
  if (!all) {
    loaded.status =
        absl::UnimplementedError(absl::StrCat(path, " is of another version; build again: python -m hvd_ext build"));
  }
  return loaded;
}

}  // namespace

absl::Status FindGpuKernels(const GpuKernels** kernels) {
  static const Loaded* loaded = new Loaded(Load());  // kept: ops may run while the process ends
  *kernels = &loaded->kernels;
  return loaded->status;
}

}  // namespace hvd_ext

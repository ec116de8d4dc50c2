#include "cache/absent.h"

#include <atomic>
#include <string>

namespace hvd_ext {
namespace {

std::atomic<HvdExtCacheLoad> the_load{nullptr};

}  // namespace
}  // namespace hvd_ext

// What one load gives.
struct HvdExtCacheLoaded {
  int64_t n = 0;
  const hvd_ext::Store::Take& take;
  bool answered = false;
  hvd_ext::Status status;
};

namespace hvd_ext {

void SetLoad(HvdExtCacheLoad load) { the_load.store(load); }

Status LoadAbsent(int64_t cache, const std::vector<int64_t>& numbers, int64_t missing, int64_t parts,
                  const Store::Take& take) {
  const HvdExtCacheLoad load = the_load.load();
  const std::string subject = "cache (" + std::to_string(cache) + ")";
  if (load == nullptr) return Internal(subject + ": nobody loads samples in this process");
  const int64_t n = static_cast<int64_t>(numbers.size());
  HvdExtCacheLoaded loaded{n, take, false, Status::Ok()};
  load(cache, numbers.data(), missing, n - missing, parts, &loaded);
  if (!loaded.answered) return Internal(subject + ": the load has neither given samples nor failed");
  return loaded.status;
}

}  // namespace hvd_ext

extern "C" {

int hvd_ext_cache_set_load(HvdExtCacheLoad load) {
  hvd_ext::SetLoad(load);
  return 0;
}

int hvd_ext_cache_give(HvdExtCacheLoaded* loaded, const void* records, const int64_t* nbytes) {
  const char* data = static_cast<const char*>(records);
  for (int64_t place = 0; place < loaded->n; data += nbytes[place++]) loaded->take(place, data, nbytes[place]);
  loaded->answered = true;
  return 0;
}

int hvd_ext_cache_fail(HvdExtCacheLoaded* loaded, int32_t code, const char* words) {
  loaded->status = {static_cast<hvd_ext::Code>(code), words};
  loaded->answered = true;
  return 0;
}

}  // extern "C"

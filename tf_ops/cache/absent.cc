#include "cache/absent.h"

#include <atomic>
#include <string>

#include "base/mutex.h"
#include "cache/numbered.h"

namespace hvd_ext {
namespace {

std::atomic<HvdExtCacheLoad> the_load{nullptr};

// A load that is under way. Its places are given by any number of threads, each of them its own.
struct Loading {
  const Store::Take& take;
  std::vector<char> given;
  Mutex mutex;
  Status status HVD_EXT_GUARDED_BY(mutex);
};

Numbered<Loading*>& Loadings() {
  static auto* loadings = new Numbered<Loading*>;
  return *loadings;
}

Status NotUnderWay(int64_t load) { return Invalid("load (" + std::to_string(load) + "): must be one under way"); }

}  // namespace

void SetLoad(HvdExtCacheLoad load) { the_load.store(load); }

Status LoadAbsent(int64_t cache, const std::vector<int64_t>& numbers, int64_t missing, int64_t parts,
                  const Store::Take& take) {
  const HvdExtCacheLoad load = the_load.load();
  const std::string subject = "cache (" + std::to_string(cache) + ")";
  if (load == nullptr) return Internal(subject + ": no sample loader is registered in this process");
  const int64_t n = static_cast<int64_t>(numbers.size());
  Loading loading{take, std::vector<char>(numbers.size()), {}, Status::Ok()};
  const int64_t number = Loadings().Add(&loading);
  load(cache, numbers.data(), missing, n - missing, parts, number);
  Loadings().Remove(number);
  MutexLock lock(&loading.mutex);
  HVD_EXT_RETURN_IF_ERROR(loading.status);
  for (char given : loading.given) {
    if (!given) return Internal(subject + ": the load has neither given all samples nor failed");
  }
  return Status::Ok();
}

Status GiveLoaded(int64_t load, int64_t place, const Piece* pieces, int64_t n_pieces) {
  Loading* loading = Loadings().Find(load);
  if (loading == nullptr) return NotUnderWay(load);
  if (place < 0 || place >= static_cast<int64_t>(loading->given.size())) {
    return Invalid("place (" + std::to_string(place) + "): must be one of the " +
                   std::to_string(loading->given.size()) + " of the load");
  }
  if (n_pieces == 1) {
    loading->take(place, static_cast<const char*>(pieces->data), pieces->nbytes);
  } else {
    std::vector<char> record;
    for (int64_t i = 0; i < n_pieces; ++i) {
      const char* data = static_cast<const char*>(pieces[i].data);
      record.insert(record.end(), data, data + pieces[i].nbytes);
    }
    loading->take(place, record.data(), static_cast<int64_t>(record.size()));
  }
  loading->given[static_cast<size_t>(place)] = 1;
  return Status::Ok();
}

Status FailLoad(int64_t load, Status status) {
  Loading* loading = Loadings().Find(load);
  if (loading == nullptr) return NotUnderWay(load);
  MutexLock lock(&loading->mutex);
  loading->status = std::move(status);
  return Status::Ok();
}

}  // namespace hvd_ext

#include "cache/absent.h"

#include <atomic>
#include <string>
#include <unordered_map>

#include "base/mutex.h"

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

struct Loadings {
  Mutex mutex;
  int64_t last HVD_EXT_GUARDED_BY(mutex) = 0;
  std::unordered_map<int64_t, Loading*> by_number HVD_EXT_GUARDED_BY(mutex);

  Loading* Find(int64_t number) {
    MutexLock lock(&mutex);
    auto found = by_number.find(number);
    return found == by_number.end() ? nullptr : found->second;
  }
};

Loadings& TheLoadings() {
  static Loadings* loadings = new Loadings;
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
  Loadings& loadings = TheLoadings();
  int64_t number = 0;
  {
    MutexLock lock(&loadings.mutex);
    number = ++loadings.last;
    loadings.by_number[number] = &loading;
  }
  load(cache, numbers.data(), missing, n - missing, parts, number);
  {
    MutexLock lock(&loadings.mutex);
    loadings.by_number.erase(number);
  }
  MutexLock lock(&loading.mutex);
  HVD_EXT_RETURN_IF_ERROR(loading.status);
  for (char given : loading.given) {
    if (!given) return Internal(subject + ": the load has neither given all samples nor failed");
  }
  return Status::Ok();
}

Status GiveLoaded(int64_t load, int64_t place, const Piece* pieces, int64_t n_pieces) {
  Loading* loading = TheLoadings().Find(load);
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
  Loading* loading = TheLoadings().Find(load);
  if (loading == nullptr) return NotUnderWay(load);
  MutexLock lock(&loading->mutex);
  loading->status = std::move(status);
  return Status::Ok();
}

}  // namespace hvd_ext

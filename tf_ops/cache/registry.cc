// The stores of this process by number. Lookups of batches ask for theirs: a lock a batch costs nothing.
#include <map>
#include <utility>

#include "base/mutex.h"
#include "cache/store.h"

namespace hvd_ext {
namespace {

// Never destroyed: threads of TensorFlow may still look a batch up while the process ends.
struct Stores {
  Mutex mutex;
  int64_t next HVD_EXT_GUARDED_BY(mutex) = 1;
  std::map<int64_t, std::shared_ptr<Store>> stores HVD_EXT_GUARDED_BY(mutex);
};

Stores& TheStores() {
  static Stores* stores = new Stores;
  return *stores;
}

}  // namespace

int64_t RegisterStore(std::shared_ptr<Store> store) {
  Stores& all = TheStores();
  MutexLock lock(&all.mutex);
  all.stores[all.next] = std::move(store);
  return all.next++;
}

std::shared_ptr<Store> FindStore(int64_t cache) {
  Stores& all = TheStores();
  MutexLock lock(&all.mutex);
  auto found = all.stores.find(cache);
  return found == all.stores.end() ? nullptr : found->second;
}

bool ForgetStore(int64_t cache) {
  std::shared_ptr<Store> last;  // ends after the lock
  Stores& all = TheStores();
  MutexLock lock(&all.mutex);
  auto found = all.stores.find(cache);
  if (found == all.stores.end()) return false;
  last = std::move(found->second);
  all.stores.erase(found);
  return true;
}

}  // namespace hvd_ext

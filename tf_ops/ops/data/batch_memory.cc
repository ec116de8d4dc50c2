#include "ops/data/batch_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <deque>

#include "base/mutex.h"

namespace hvd_ext {
namespace {

constexpr size_t kAlignment = 64;  // of TensorFlow's tensors: others it would copy
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kMostBytes = size_t{64} << 20;  // that wait to be used again

struct Block {
  void* data = nullptr;
  size_t nbytes = 0;
};

// Never destroyed: tensors may live until the process ends.
struct Free {
  Mutex mutex;
  size_t nbytes HVD_EXT_GUARDED_BY(mutex) = 0;
  std::deque<Block> blocks HVD_EXT_GUARDED_BY(mutex);  // the one that came last is the first
};

Free& TheFree() {
  static Free* free = new Free;
  return *free;
}

void* TakeBack(size_t nbytes) {
  Free& free = TheFree();
  MutexLock lock(&free.mutex);
  for (auto block = free.blocks.begin(); block != free.blocks.end(); ++block) {
    if (block->nbytes != nbytes) continue;
    void* data = block->data;
    free.blocks.erase(block);
    free.nbytes -= nbytes;
    return data;
  }
  return nullptr;
}

void GiveBack(void* data, size_t nbytes, void*) {
  std::vector<void*> ended;
  {
    Free& free = TheFree();
    MutexLock lock(&free.mutex);
    free.blocks.push_front({data, nbytes});
    free.nbytes += nbytes;
    while (free.nbytes > kMostBytes) {
      ended.push_back(free.blocks.back().data);
      free.nbytes -= free.blocks.back().nbytes;
      free.blocks.pop_back();
    }
  }
  for (void* one : ended) std::free(one);
}

void* Allocate(size_t nbytes) {
  void* data = nullptr;
  if (posix_memalign(&data, nbytes < kHuge ? kAlignment : kHuge, nbytes) != 0) return nullptr;
  // It faults once for 2 MiB then. It is a hint, and its failure changes nothing.
  if (nbytes >= kHuge) madvise(data, nbytes / kHuge * kHuge, MADV_HUGEPAGE);
  return data;
}

}  // namespace

TensorPointer NewBatch(TF_DataType dtype, const std::vector<int64_t>& dims) {
  size_t nbytes = TF_DataTypeSize(dtype);
  for (int64_t dim : dims) nbytes *= static_cast<size_t>(dim);
  void* data = TakeBack(nbytes);
  if (data == nullptr) data = Allocate(nbytes);
  if (data == nullptr) return nullptr;
  return TensorPointer(
      TF_NewTensor(dtype, dims.data(), static_cast<int>(dims.size()), data, nbytes, GiveBack, nullptr));
}

}  // namespace hvd_ext

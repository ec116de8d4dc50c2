#include "ops/data/batch_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <deque>

#include "base/mutex.h"

namespace hvd_ext {
namespace {

constexpr size_t kAlignment = 64;  // of TensorFlow's tensors: others it would copy
constexpr size_t kHuge = size_t{2} << 20;

struct Block {
  void* data = nullptr;
  size_t nbytes = 0;
};

// At most as many bytes wait to be used again as are in use, beside the block that came last: so a pipeline has what
// its next batch takes, and one that has ended leaves a block. Never destroyed: tensors may live until the process
// ends.
struct Memory {
  Mutex mutex;
  size_t used HVD_EXT_GUARDED_BY(mutex) = 0, free HVD_EXT_GUARDED_BY(mutex) = 0;  // bytes
  std::deque<Block> blocks HVD_EXT_GUARDED_BY(mutex);  // that are free; the one that came last is the first
};

Memory& TheMemory() {
  static Memory* memory = new Memory;
  return *memory;
}

void* TakeBack(size_t nbytes) {
  Memory& memory = TheMemory();
  MutexLock lock(&memory.mutex);
  memory.used += nbytes;
  for (auto block = memory.blocks.begin(); block != memory.blocks.end(); ++block) {
    if (block->nbytes != nbytes) continue;
    void* data = block->data;
    memory.blocks.erase(block);
    memory.free -= nbytes;
    return data;
  }
  return nullptr;
}

void GiveBack(void* data, size_t nbytes, void*) {
  std::vector<void*> ended;
  {
    Memory& memory = TheMemory();
    MutexLock lock(&memory.mutex);
    memory.used -= nbytes;
    memory.free += nbytes;
    memory.blocks.push_front({data, nbytes});
    while (memory.free > memory.used && memory.blocks.size() > 1) {
      ended.push_back(memory.blocks.back().data);
      memory.free -= memory.blocks.back().nbytes;
      memory.blocks.pop_back();
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
  if (data == nullptr) {
    Memory& memory = TheMemory();
    MutexLock lock(&memory.mutex);
    memory.used -= nbytes;
    return nullptr;
  }
  return TensorPointer(
      TF_NewTensor(dtype, dims.data(), static_cast<int>(dims.size()), data, nbytes, GiveBack, nullptr));
}

}  // namespace hvd_ext

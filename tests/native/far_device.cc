#include "far_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

namespace hvd_ext::test {
namespace {

constexpr int64_t kPage = 4096;
// An operation in four sleeps before it runs, at the longest for this time.
constexpr unsigned kSleeps = 4, kLongest_us = 150;

struct Errors {
  std::mutex mutex;
  std::string words;
};

Errors& TheErrors() {
  static auto* errors = new Errors;
  return *errors;
}

struct Devices {
  std::mutex mutex;
  std::vector<FarDevice*> all;
};

Devices& TheDevices() {
  static auto* devices = new Devices;
  return *devices;
}

struct Named {
  FarDevice* device;
  char* block;
};

char* Reserve(int64_t nbytes) {
  void* space =
      mmap(nullptr, static_cast<size_t>(nbytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(space);
}

uint64_t SumOf(const char* data, int64_t nbytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < nbytes; ++i) sum = sum * 1099511628211u + static_cast<unsigned char>(data[i]);
  return sum;
}

int64_t NbytesOf(DType dtype, int64_t elements) { return elements * static_cast<int64_t>(SizeOf(dtype)); }

}  // namespace

class FarQueue : public Queue {
 public:
  FarQueue(FarDevice* device, int number) : device_(device), number_(number) {}

  int64_t Last() override { return device_->Last(number_); }
  bool Done(int64_t number) override { return device_->Done(number_, number); }

  void Follow(void*) override {}  // it has no streams
  void Lead(void*) override {}
  void Copy(void* to, const void* from, int64_t nbytes) override {
    Push({Writes(to, nbytes), Reads(from, nbytes)},
         [=] { std::memcpy(device_->At(to), device_->At(from), static_cast<size_t>(nbytes)); });
  }
  void Combine(ReduceOp op, DType dtype, void* data, const void* message, int64_t elements) override {
    const int64_t nbytes = NbytesOf(dtype, elements);
    Push({Changes(data, nbytes), Reads(message, nbytes)},
         [=] { hvd_ext::Combine(op, dtype, device_->At(data), device_->At(message), elements); });
  }
  void Divide(DType dtype, void* data, int64_t divisor, int64_t elements) override {
    Push({Changes(data, NbytesOf(dtype, elements))},
         [=] { hvd_ext::Divide(dtype, device_->At(data), divisor, elements); });
  }
  void Narrow(DType wire, void* message, float* data, int64_t elements, float scale) override {
    Push({Writes(message, 2 * elements), Changes(data, 4 * elements)},
         [=] { hvd_ext::Narrow(wire, device_->At(message), Floats(data), elements, scale); });
  }
  void Widen(DType wire, float* data, const void* message, int64_t elements, float scale) override {
    Push({Writes(data, 4 * elements), Reads(message, 2 * elements)},
         [=] { hvd_ext::Widen(wire, Floats(data), device_->At(message), elements, scale); });
  }
  void AddWidened(DType wire, float* data, const void* message, int64_t elements, float scale) override {
    Push({Changes(data, 4 * elements), Reads(message, 2 * elements)},
         [=] { hvd_ext::AddWidened(wire, Floats(data), device_->At(message), elements, scale); });
  }
  void CombineWidened(ReduceOp op, DType wire, float* data, const void* message, int64_t elements) override {
    Push({Changes(data, 4 * elements), Reads(message, 2 * elements)},
         [=] { hvd_ext::CombineWidened(op, wire, Floats(data), device_->At(message), elements); });
  }
  void Round(DType wire, float* data, int64_t elements, float scale) override {
    Push({Changes(data, 4 * elements)}, [=] { hvd_ext::Round(wire, Floats(data), elements, scale); });
  }
  void Clear(void* data, int64_t nbytes) override {
    Push({Writes(data, nbytes)}, [=] { std::memset(device_->At(data), 0, static_cast<size_t>(nbytes)); });
  }
  void AddEntries(float* data, int64_t elements, int64_t base, const int32_t* positions, const float* values,
                  int64_t count) override {
    Push({Changes(data, count == 0 ? 0 : 4 * elements), Reads(positions, 4 * count), Reads(values, 4 * count)},
         [=] { HostDevice()->inputs()->AddEntries(Floats(data), elements, base, positions, values, count); });
  }
  void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated) override {
    std::vector<Use> uses = UsesOf(feedback, elements);
    uses.push_back(Writes(accumulated, 4 * elements));
    Push(std::move(uses),
         [=] { hvd_ext::Accumulate(There(feedback), elements, Floats(accumulated), /*parallel_for=*/nullptr); });
  }
  void TopKErrorFeedback(const Selection& selection, TopKScratch*, char* workspace, int64_t* counts, int32_t* positions,
                         float* values, int32_t* non_finite) override {
    const int64_t picks = selection.picks();
    for (size_t s = 0; s < selection.segments.size(); ++s) counts[s] = selection.segments[s].k;
    std::vector<Use> uses = UsesOf(selection.feedback, selection.elements());
    for (void* message : {static_cast<void*>(positions), static_cast<void*>(values)}) {
      uses.push_back(Writes(message, 4 * picks));
    }
    uses.push_back(Writes(non_finite, 4));
    uses.push_back(Writes(workspace, kWorkspaceNbytes));
    Push(std::move(uses), [=] {
      Selection there = selection;
      there.feedback = There(selection.feedback);
      std::vector<int64_t> all(there.segments.size());
      TopKScratch scratch;
      HostDevice()->inputs()->TopKErrorFeedback(there, &scratch, nullptr, all.data(), positions, values, non_finite);
    });
  }

 private:
  using Use = FarDevice::Use;
  static Use Reads(const void* data, int64_t nbytes) { return {static_cast<const char*>(data), nbytes, true, false}; }
  static Use Writes(const void* data, int64_t nbytes) { return {static_cast<const char*>(data), nbytes, false, true}; }
  static Use Changes(const void* data, int64_t nbytes) { return {static_cast<const char*>(data), nbytes, true, true}; }
  static std::vector<Use> UsesOf(const ErrorFeedback& feedback, int64_t elements) {
    const int64_t nbytes = 4 * elements;
    std::vector<Use> uses{Reads(feedback.gradient, nbytes), Reads(feedback.residual, nbytes),
                          Writes(feedback.next_residual, nbytes)};
    if (feedback.velocity == nullptr) return uses;
    uses.push_back(Reads(feedback.velocity, nbytes));
    uses.push_back(Writes(feedback.next_velocity, nbytes));
    return uses;
  }
  ErrorFeedback There(ErrorFeedback feedback) {
    feedback.gradient = Floats(feedback.gradient);
    feedback.residual = Floats(feedback.residual);
    feedback.next_residual = Floats(feedback.next_residual);
    if (feedback.velocity == nullptr) return feedback;
    feedback.velocity = Floats(feedback.velocity);
    feedback.next_velocity = Floats(feedback.next_velocity);
    return feedback;
  }
  float* Floats(const float* data) { return reinterpret_cast<float*>(device_->At(data)); }
  void Push(std::vector<Use> uses, std::function<void()> run) {
    device_->Push(number_, std::move(uses), std::move(run));
  }

  static constexpr int64_t kWorkspaceNbytes = FarDevice::kWorkspaceNbytes;

  FarDevice* const device_;
  const int number_;
};

FarDevice::FarDevice(uint32_t seed) : space_(Reserve(kSpaceNbytes)), random_(seed) {
  for (int i = 0; i < kQueues; ++i) queues_.push_back(std::make_unique<FarQueue>(this, i));
  thread_ = std::thread([this] { Run(); });
  std::lock_guard<std::mutex> lock(TheDevices().mutex);
  TheDevices().all.push_back(this);
}

FarDevice::~FarDevice() {
  {
    std::lock_guard<std::mutex> lock(TheDevices().mutex);
    std::vector<FarDevice*>& all = TheDevices().all;
    all.erase(std::find(all.begin(), all.end(), this));
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
    const auto left =
        std::count_if(blocks_.begin(), blocks_.end(), [](const auto& block) { return !block.second.is_freed; });
    if (left > 0) Note("a device ends while " + std::to_string(left) + " blocks are allocated");
  }
  changed_.notify_all();
  thread_.join();
  munmap(space_, static_cast<size_t>(kSpaceNbytes));
}

void FarDevice::Hold(bool holds) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    holds_ = holds;
  }
  changed_.notify_all();
}

std::string FarDevice::TakeErrors() {
  std::lock_guard<std::mutex> lock(TheErrors().mutex);
  return std::exchange(TheErrors().words, std::string());
}

void FarDevice::Note(const std::string& words) {
  if (error_.empty()) error_ = words;
  std::lock_guard<std::mutex> lock(TheErrors().mutex);
  TheErrors().words += words + "\n";
}

void FarDevice::Fail(const std::string& words) {
  Note(words);
  throw std::runtime_error(words);
}

// An address is never given out twice, and a page that is never given out follows each block.
char* FarDevice::Allocate(int64_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t rounded = (std::max<int64_t>(nbytes, 1) + 2 * kPage - 1) / kPage * kPage;
  if (rounded > kSpaceNbytes - taken_nbytes_) throw std::bad_alloc();
  char* data = space_ + std::exchange(taken_nbytes_, taken_nbytes_ + rounded);
  const size_t size = static_cast<size_t>(nbytes);
  blocks_[data] = {nbytes, std::unique_ptr<char[]>(new char[size]), std::vector<char>(size)};
  return data;
}

bool FarDevice::IsQueued(const Use& use) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& queue) {
    return std::any_of(queue.operations.begin(), queue.operations.end(), [&](const Operation& operation) {
      return std::any_of(operation.uses.begin(), operation.uses.end(),
                         [&](const Use& each) { return each.Meets(use); });
    });
  });
}

void FarDevice::Free(char* data) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return Note("memory is freed that is not allocated");  // the caller is a destructor
  changed_.wait(lock, [&] { return !IsQueued({data, found->second.nbytes, true, true}); });
  found->second.is_freed = true;
  if (!found->second.shares) blocks_.erase(found);
}

bool FarDevice::Share(const void* data, BlockName* name, int64_t* offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  const char* at = static_cast<const char*>(data);
  Block* block = BlockOf(at, 0, offset);
  if (block == nullptr) return false;
  block->shares = true;
  const Named named{this, const_cast<char*>(at - *offset)};
  std::memcpy(name->bytes.data(), &named, sizeof(named));
  return true;
}

void FarDevice::Unshare(const BlockName& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  Named named{};
  std::memcpy(&named, name.bytes.data(), sizeof(named));
  const auto found = blocks_.find(named.block);
  if (found == blocks_.end()) return Note("a block is given back that is not shared");
  if (found->second.reached > 0) Note("a block is given back that another device reaches");
  found->second.shares = false;
  if (found->second.is_freed) blocks_.erase(found);
}

char* FarDevice::Reach(const BlockName& name) {
  Named named{};
  std::memcpy(&named, name.bytes.data(), sizeof(named));
  std::lock_guard<std::mutex> lock(named.device->mutex_);
  ++named.device->blocks_[named.block].reached;
  return named.block;
}

void FarDevice::Leave(char* reached) {
  FarDevice* owner = OwnerOf(reached);
  std::lock_guard<std::mutex> lock(owner->mutex_);
  --owner->blocks_[reached].reached;
}

FarDevice* FarDevice::OwnerOf(const char* data) const {
  if (IsFar(data)) return nullptr;
  std::lock_guard<std::mutex> lock(TheDevices().mutex);
  for (FarDevice* device : TheDevices().all) {
    if (device->IsFar(data)) return device;
  }
  return nullptr;
}

void FarDevice::Lend(const Use& use) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t offset = 0;
  const Block* block = BlockOf(use.data, use.nbytes, &offset);
  if (block == nullptr || block->reached == 0) Fail("memory of another device is used that was not reached");
  if (use.writes) Fail("memory of another device is written");
  for (const Waiting& queue : waiting_) {
    for (const auto& [number, ours] : queue.unseen) {
      if (std::none_of(ours.begin(), ours.end(), [&](const Use& each) { return each.Meets(use); })) continue;
      Fail("a device reads memory that an operation of another one writes, which is not known to have ended");
    }
  }
  CheckRead(use);
  lent_.push_back(use);
}

void FarDevice::TakeBack(const Use& use) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto same = [&](const Use& lent) { return lent.data == use.data && lent.nbytes == use.nbytes; };
  lent_.erase(std::find_if(lent_.begin(), lent_.end(), same));
}

void FarDevice::Pin(char* data, int64_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (reinterpret_cast<uintptr_t>(data) % kPage != 0 || nbytes % kPage != 0) Fail("parts of pages are pinned");
  pinned_[data] = nbytes;
}

void FarDevice::Unpin(char* data) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = pinned_.find(data);
  if (found == pinned_.end()) return Note("memory is unpinned that is not pinned");
  changed_.wait(lock, [&] { return !IsQueued({data, found->second, true, true}); });
  pinned_.erase(found);
}

void FarDevice::Forget(const char* data, int64_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t offset = 0;
  if (Block* block = BlockOf(data, nbytes, &offset)) {
    const Use whole{data, nbytes, true, true};
    if (std::any_of(lent_.begin(), lent_.end(), [&](const Use& lent) { return lent.Meets(whole); })) {
      Note("memory is given back that another device reads");
    }
    std::fill_n(block->written.begin() + offset, nbytes, 0);
  } else if (!IsQueued({data, nbytes, true, true})) {
    std::memset(const_cast<char*>(data), kPoison, static_cast<size_t>(nbytes));
  }
}

int64_t FarDevice::Last(int queue) {
  std::lock_guard<std::mutex> lock(mutex_);
  return waiting_[static_cast<size_t>(queue)].last;
}

bool FarDevice::Done(int number_of_queue, int64_t number) {
  std::vector<Use> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Waiting& queue = waiting_[static_cast<size_t>(number_of_queue)];
    if (!error_.empty()) throw std::runtime_error(error_);
    if (queue.done < number) return false;
    queue.seen = std::max(queue.seen, number);
    while (!queue.unseen.empty() && queue.unseen.front().first <= queue.seen) {
      for (const Use& use : queue.unseen.front().second) ended.push_back(use);
      queue.unseen.pop_front();
    }
  }
  for (const Use& use : ended) {
    if (FarDevice* owner = OwnerOf(use.data)) owner->TakeBack(use);
  }
  return true;
}

FarDevice::Block* FarDevice::BlockOf(const char* data, int64_t nbytes, int64_t* offset) {
  auto after = blocks_.upper_bound(data);
  if (after == blocks_.begin()) return nullptr;
  auto& [begin, block] = *std::prev(after);
  *offset = data - begin;
  return *offset + nbytes <= block.nbytes ? &block : nullptr;
}

bool FarDevice::IsPinned(const char* data, int64_t nbytes) const {
  auto range = pinned_.upper_bound(data);
  while (nbytes > 0) {  // ranges may lie one after the other
    if (range == pinned_.begin()) return false;
    const auto& [begin, length] = *std::prev(range);
    const int64_t inside = begin + length - data;
    if (inside <= 0) return false;
    data += inside;
    nbytes -= inside;
    range = pinned_.upper_bound(data);
  }
  return true;
}

void FarDevice::CheckRead(const Use& use) {
  int64_t offset = 0;
  Block* block = BlockOf(use.data, use.nbytes, &offset);
  if (block == nullptr) return;
  const auto begin = block->written.begin() + offset;
  if (use.reads && std::find(begin, begin + use.nbytes, 0) != begin + use.nbytes)
    Fail("memory is read before it is written");
  if (use.writes) std::fill_n(begin, use.nbytes, 1);
}

void FarDevice::Push(int number_of_queue, std::vector<Use> uses, std::function<void()> run) {
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](const Use& use) { return use.nbytes == 0; }), uses.end());
  if (uses.empty()) return;  // of no elements
  std::set<const char*> lent;
  for (const Use& use : uses) {
    FarDevice* owner = OwnerOf(use.data);
    if (owner == nullptr) continue;
    owner->Lend(use);
    lent.insert(use.data);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_.empty()) throw std::runtime_error(error_);
  Operation operation{uses, {}, std::move(run)};
  for (const Use& use : uses) {
    if (lent.count(use.data) > 0) continue;
    if (std::any_of(lent_.begin(), lent_.end(), [&](const Use& each) { return each.Meets(use); })) {
      Fail("memory is written that another device reads");
    }
    int64_t offset = 0;
    const bool far = IsFar(use.data);
    if (far && BlockOf(use.data, use.nbytes, &offset) == nullptr) Fail("memory is used that is not allocated");
    if (!far && !IsPinned(use.data, use.nbytes)) Fail("host memory is used that is not pinned");
    for (int other = 0; other < kQueues; ++other) {
      if (other == number_of_queue) continue;
      for (const auto& [number, theirs] : waiting_[static_cast<size_t>(other)].unseen) {
        if (std::none_of(theirs.begin(), theirs.end(), [&](const Use& each) { return each.Meets(use); })) continue;
        Fail("queue " + std::to_string(number_of_queue) + " uses memory that operation " + std::to_string(number) +
             " of queue " + std::to_string(other) + " uses, which is not known to have ended");
      }
    }
    if (far || IsQueued({use.data, use.nbytes, true, true})) continue;
    if (use.writes) std::memset(const_cast<char*>(use.data), kPoison, static_cast<size_t>(use.nbytes));
  }
  for (const Use& use : uses) CheckRead(use);
  for (const Use& use : uses) {
    const bool summed =
        lent.count(use.data) == 0 && !use.writes && !IsFar(use.data) && !IsQueued({use.data, use.nbytes, true, true});
    operation.sums.push_back(summed ? SumOf(use.data, use.nbytes) : 0);
  }
  Waiting& queue = waiting_[static_cast<size_t>(number_of_queue)];
  queue.unseen.emplace_back(++queue.last, std::move(uses));
  queue.operations.push_back(std::move(operation));
  changed_.notify_all();
}

char* FarDevice::At(const void* data) {
  char* at = static_cast<char*>(const_cast<void*>(data));
  if (FarDevice* owner = OwnerOf(at)) return owner->At(at);
  if (!IsFar(at)) return at;
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t offset = 0;
  Block* block = BlockOf(at, 0, &offset);
  return block->memory.get() + offset;
}

void FarDevice::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    std::vector<Waiting*> queues;
    for (Waiting& queue : waiting_) {
      if (!queue.operations.empty() && !holds_) queues.push_back(&queue);
    }
    if (queues.empty()) {
      if (stops_) return;
      changed_.wait(lock);
      continue;
    }
    Waiting* queue = queues[random_() % queues.size()];
    Operation& operation = queue->operations.front();
    const unsigned delay_us = random_() % kSleeps == 0 ? random_() % kLongest_us : 0;
    lock.unlock();
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    bool changed = false;
    for (size_t i = 0; i < operation.uses.size(); ++i) {
      const Use& use = operation.uses[i];
      changed |= operation.sums[i] != 0 && operation.sums[i] != SumOf(use.data, use.nbytes);
    }
    operation.run();
    lock.lock();
    if (changed) Note("host memory was changed while an operation was to read it");
    queue->operations.pop_front();
    ++queue->done;
    changed_.notify_all();
  }
}

}  // namespace hvd_ext::test

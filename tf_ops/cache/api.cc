#include "cache/api.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/absent.h"
#include "cache/crc32c.h"
#include "cache/free_memory.h"
#include "cache/store.h"

namespace hvd_ext {
namespace {

std::string& Error() {
  thread_local std::string error;
  return error;
}

int Report(const Status& status) {
  Error() = status.message;
  return static_cast<int>(status.code);
}

std::string Text(const char* words) { return words == nullptr ? "" : words; }

Status NotOpen(int64_t cache) {
  return Invalid("cache (" + std::to_string(cache) + "): must be the number of an open cache");
}

StoreOptions OptionsOf(const HvdExtCacheOptions& options) {
  StoreOptions native;
  native.name = Text(options.name);
  native.fingerprint = {options.fingerprint[0], options.fingerprint[1]};
  native.samples = options.samples;
  native.memory_bytes = options.memory_bytes;
  native.keep = Text(options.keep);
  native.disk = Text(options.disk);
  native.disk_bytes = options.disk_bytes;
  if (options.memory_root != nullptr) native.memory_root = options.memory_root;
  if (options.claim_s != 0) native.claim_s = options.claim_s;
  return native;
}

// Returns from a function of the C ABI unless `cache` is open.
#define HVD_EXT_FIND_STORE(cache, store)           \
  std::shared_ptr<Store> store = FindStore(cache); \
  if (store == nullptr) return Report(NotOpen(cache))

}  // namespace
}  // namespace hvd_ext

using namespace hvd_ext;  // NOLINT: what follows is the C ABI

extern "C" {

int64_t hvd_ext_cache_abi_version(void) { return HVD_EXT_CACHE_ABI_VERSION; }

const char* hvd_ext_cache_error(void) { return Error().c_str(); }

int hvd_ext_cache_open(const HvdExtCacheOptions* options, int64_t* cache) {
  std::shared_ptr<Store> store;
  Status status = Store::Open(OptionsOf(*options), &store);
  if (status.ok()) *cache = RegisterStore(std::move(store));
  return Report(status);
}

int hvd_ext_cache_close(int64_t cache) { return Report(ForgetStore(cache) == nullptr ? NotOpen(cache) : Status::Ok()); }

int hvd_ext_cache_memory_address(int64_t cache, HvdExtCacheAddress* address) {
  HVD_EXT_FIND_STORE(cache, store);
  ArenaAddress native = store->memory_address();
  *address = {native.pid, native.fd, native.capacity, {native.token[0], native.token[1]}};
  return Report(Status::Ok());
}

int hvd_ext_cache_share(int64_t cache, const HvdExtCacheAddress* addresses, int64_t n, int64_t* taken) {
  HVD_EXT_FIND_STORE(cache, store);
  std::vector<ArenaAddress> native;
  for (int64_t i = 0; i < n; ++i) {
    const HvdExtCacheAddress& a = addresses[i];
    native.push_back({a.pid, a.fd, a.capacity, {a.token[0], a.token[1]}});
  }
  return Report(store->ShareMemory(native, taken));
}

int hvd_ext_cache_lookup(int64_t cache, const int64_t* numbers, int64_t n, int32_t wait, void* const* to,
                         const int64_t* room, int64_t* nbytes) {
  HVD_EXT_FIND_STORE(cache, store);
  std::vector<int64_t> missing, pending;
  auto take = [&](int64_t place, const char* data, int64_t length) {
    nbytes[place] = length;
    if (to != nullptr && length > 0 && length <= room[place]) {
      std::memcpy(to[place], data, static_cast<size_t>(length));
    }
  };
  Status status = store->Lookup(numbers, n, wait != 0, take, &missing, &pending);
  if (status.ok()) {
    for (int64_t place : missing) nbytes[place] = -1;
    for (int64_t place : pending) nbytes[place] = -2;
  }
  return Report(status);
}

int hvd_ext_cache_insert(int64_t cache, int64_t number, const void* data, int64_t nbytes, int32_t* stored) {
  HVD_EXT_FIND_STORE(cache, store);
  Piece piece{data, nbytes};
  bool done = false;
  Status status = store->Insert(number, &piece, 1, &done);
  if (stored != nullptr) *stored = done ? 1 : 0;
  return Report(status);
}

int hvd_ext_cache_release(int64_t cache, const int64_t* numbers, int64_t n) {
  HVD_EXT_FIND_STORE(cache, store);
  if (numbers == nullptr) {
    store->ReleaseAll();
  } else {
    store->Release(numbers, n);
  }
  return Report(Status::Ok());
}

int hvd_ext_cache_set_load(HvdExtCacheLoad load) {
  SetLoad(load);
  return Report(Status::Ok());
}

int hvd_ext_cache_give(int64_t load, const int64_t* places, int64_t n, const void* records, const int64_t* nbytes) {
  const char* data = static_cast<const char*>(records);
  Status status;
  for (int64_t i = 0; i < n && status.ok(); data += nbytes[i++]) {
    const Piece piece{data, nbytes[i]};
    status = GiveLoaded(load, places[i], &piece, 1);
  }
  return Report(status);
}

int hvd_ext_cache_fail(int64_t load, int32_t code, const char* words) {
  return Report(FailLoad(load, {static_cast<Code>(code), Text(words)}));
}

int hvd_ext_cache_statistics(int64_t cache, HvdExtCacheStatistics* statistics) {
  HVD_EXT_FIND_STORE(cache, store);
  *statistics = store->Statistics();
  return Report(Status::Ok());
}

const char* hvd_ext_cache_warning(int64_t cache) {
  thread_local std::string words;
  std::shared_ptr<Store> store = FindStore(cache);
  return store != nullptr && store->NextWarning(&words) ? words.c_str() : nullptr;
}

int hvd_ext_cache_verify(int64_t cache, int32_t (*progress)(int64_t done, int64_t total), int64_t counts[6]) {
  HVD_EXT_FIND_STORE(cache, store);
  Verified memory, disk;
  auto go_on = [&](int64_t done, int64_t total) { return progress == nullptr || progress(done, total) != 0; };
  Status status = store->Verify(go_on, &memory, &disk);
  int64_t seen[6] = {memory.records, memory.bytes, memory.damaged, disk.records, disk.bytes, disk.damaged};
  std::memcpy(counts, seen, sizeof(seen));
  return Report(status);
}

int hvd_ext_cache_about(const char* path, HvdExtCacheAbout* about) { return Report(LookAtIndex(Text(path), about)); }

int hvd_ext_cache_free_memory(const char* memory_root, int64_t* nbytes) {
  FreeMemory free = LookAtFreeMemory(memory_root == nullptr ? "/" : memory_root);
  *nbytes = free.left;
  if (free.known) return Report(Status::Ok());
  return Report(Internal("free memory: /proc/meminfo must say MemAvailable"));
}

uint32_t hvd_ext_cache_crc32c(uint32_t crc, const void* data, int64_t nbytes) { return Crc32c(crc, data, nbytes); }

}  // extern "C"

// The C ABI of the data cache's store: Python calls it through ctypes. Every function that returns int returns a Code
// (status.h); on failure hvd_ext_cache_error() gives the words, per calling thread. A `cache` is the number that open
// has given; store.h says what the calls do.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HVD_EXT_CACHE_ABI_VERSION 3

// StoreOptions of store.h. Null stands for "" (for memory_root: "/"), and claim_s of 0 for 30 s.
typedef struct {
  const char* name;
  uint64_t fingerprint[2];
  int64_t samples;
  int64_t memory_bytes;
  const char* keep;
  const char* disk;
  int64_t disk_bytes;
  const char* memory_root;
  double claim_s;
} HvdExtCacheOptions;

// ArenaAddress of shm/arena.h.
typedef struct {
  int64_t pid, fd, capacity;  // fd -1: nothing to map
  uint64_t token[2];
} HvdExtCacheAddress;

// What this process has done since it opened the store, but for the last four, which are what the places hold now. All
// are int64_t.
typedef struct {
  int64_t memory_hits, memory_hit_bytes;
  int64_t disk_hits, disk_hit_bytes;
  int64_t misses;  // samples that a lookup has left to its caller to load
  int64_t memory_inserted, memory_inserted_bytes;
  int64_t disk_inserted, disk_inserted_bytes;
  int64_t passed_through;                // samples that an insert could store in no place
  int64_t damaged;                       // records that were not what was written
  int64_t taken_over;                    // claims of processes that had ended or took too long
  int64_t waits, waited_ns;              // for claims of others
  int64_t memory_ns, disk_ns;            // of the calling threads in each place, summed over lookups
  int64_t memory_open, disk_open;        // 1: the place takes records
  int64_t memory_records, disk_records;  // that are ready
} HvdExtCacheStatistics;

// What a file that holds an index (the file `index` of a folder, or memory that stays) says of itself.
typedef struct {
  uint64_t fingerprint[2];
  int64_t samples;
  int64_t records;       // that are ready
  int64_t record_bytes;  // that they take in their place, heads and gaps included
} HvdExtCacheAbout;

int64_t hvd_ext_cache_abi_version(void);
const char* hvd_ext_cache_error(void);

int hvd_ext_cache_open(const HvdExtCacheOptions* options, int64_t* cache);
// Calls that are running end as if it were open; the memory is given back when the last of them has ended.
int hvd_ext_cache_close(int64_t cache);

int hvd_ext_cache_memory_address(int64_t cache, HvdExtCacheAddress* address);
int hvd_ext_cache_share(int64_t cache, const HvdExtCacheAddress* addresses, int64_t n, int64_t* taken);

// nbytes[i] becomes the length of the record of numbers[i], or -1 where it is missing (the caller loads it), or -2
// where it is pending. The record is copied to to[i] if room[i] bytes are enough for it; else its length is all that
// the caller learns. `to` may be null: then no record is copied.
int hvd_ext_cache_lookup(int64_t cache, const int64_t* numbers, int64_t n, int32_t wait, void* const* to,
                         const int64_t* room, int64_t* nbytes);
// One record of one piece. *stored may be null.
int hvd_ext_cache_insert(int64_t cache, int64_t number, const void* data, int64_t nbytes, int32_t* stored);
// numbers null: all claims that calls of this process hold in this cache.
int hvd_ext_cache_release(int64_t cache, const int64_t* numbers, int64_t n);

// Loads samples for a batch: absent.h has the rules. Before it returns, every sample is given to `load`, or it fails.
typedef void (*HvdExtCacheLoad)(int64_t cache, const int64_t* numbers, int64_t missing, int64_t pending, int64_t parts,
                                int64_t load);
// For all caches of the process; null: none.
int hvd_ext_cache_set_load(HvdExtCacheLoad load);
// The records of n places of its numbers, one after the other, and the bytes of each.
int hvd_ext_cache_give(int64_t load, const int64_t* places, int64_t n, const void* records, const int64_t* nbytes);
// A Code other than 0, and why.
int hvd_ext_cache_fail(int64_t load, int32_t code, const char* words);

int hvd_ext_cache_statistics(int64_t cache, HvdExtCacheStatistics* statistics);
// The oldest warning that has not been fetched, or null; valid until this thread asks for the next one.
const char* hvd_ext_cache_warning(int64_t cache);

// counts becomes the records, bytes and damaged records of memory, then those of the disk. progress may be null; it
// returns 0 to end the verification early.
int hvd_ext_cache_verify(int64_t cache, int32_t (*progress)(int64_t done, int64_t total), int64_t counts[6]);
// Of the file `index` in a cache's folder, or of memory that stays; nothing is opened or changed.
int hvd_ext_cache_about(const char* path, HvdExtCacheAbout* about);

// What the host can give without pressing others: the smaller of what is left to this process's cgroups and to the
// machine, in bytes. memory_root as in the options.
int hvd_ext_cache_free_memory(const char* memory_root, int64_t* nbytes);

// CRC-32C of data, continuing from `crc` (0 at first).
uint32_t hvd_ext_cache_crc32c(uint32_t crc, const void* data, int64_t nbytes);

#ifdef __cplusplus
}
#endif

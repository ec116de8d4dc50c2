// The store of a data cache: samples as bytes, each under its number, in two places behind the source that they are
// read from first: memory that all ranks of a host share, and a folder on the host's disk that stays.
//
// Words. A sample has a *number*, 0 .. samples - 1. A *record* is a sample's bytes in a place. A *claim* is the word of
// a process that it is loading a sample, so that others wait for it in place of loading it too. A *place* is open until
// it is full, or the host has no more memory or disk to give: from then on it takes no record, and those it has stay.
//
// A record is complete before its entry says so, and an entry is one atomic word: readers take no lock that another
// process could hold, and a process that is killed at any instant leaves whole records or nothing. Bytes that a job did
// not write itself (all on disk, and those of memory that stays) are checked before they are used; a record that is
// damaged is counted, forgotten and loaded again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/api.h"
#include "shm/arena.h"

namespace hvd_ext {

struct StoreOptions {
  std::string name;                       // for messages
  std::array<uint64_t, 2> fingerprint{};  // of what the records are
  int64_t samples = 0;                    // numbers are 0 .. samples - 1
  int64_t memory_bytes = 0;               // of records in memory, at most; 0: no memory
  std::string keep;                       // the path of memory that stays when the job ends; "": without a name
  std::string disk;                       // a folder of this cache alone, which is made if need be; "": no disk
  int64_t disk_bytes = 0;                 // of records on disk, at most; 0: no limit
  std::string memory_root = "/";          // the folder with proc/ and sys/fs/cgroup/; tests make one up
  double claim_s = 30;                    // a claim that is older may be taken over
};

// A part of a record.
struct Piece {
  const void* data = nullptr;
  int64_t nbytes = 0;
};

using StoreStatistics = HvdExtCacheStatistics;
using StoreAbout = HvdExtCacheAbout;

// What Verify has seen in one place.
struct Verified {
  int64_t records = 0, bytes = 0, damaged = 0;
};

class Store {
 public:
  // Opens the places, and makes what is not there. Fails with kInvalid where the options are wrong, where the folder
  // or the memory that stays is of other data (fingerprint, number of samples), or belongs to another user or is open
  // to others. Where a file is damaged or of another version of the format, the place starts empty with a warning;
  // where the system does not give a place, the store does without it, with a warning.
  static Status Open(const StoreOptions& options, std::shared_ptr<Store>* store);
  virtual ~Store() = default;

  // Of this process's own memory, for the other processes of the host. Its fd is -1 where there is nothing to map:
  // there is no memory, or it has a name and every process opens it itself.
  virtual ArenaAddress memory_address() const = 0;
  // Maps the first of the addresses that can be mapped, in their order, in place of its own memory; the ranks of a host
  // all call it with the addresses of all ranks in one order. *taken becomes its place in `addresses`, or -1 where none
  // can be mapped or the memory has a name, and then the store keeps what it has. It must come before the first Lookup
  // and Insert.
  virtual Status ShareMemory(const std::vector<ArenaAddress>& addresses, int64_t* taken) = 0;

  // Receives a record; `data` is valid during the call only, and not aligned.
  using Take = std::function<void(int64_t place, const char* data, int64_t nbytes)>;
  // Looks n numbers up. `take` is called once, on the calling thread, for each place in `numbers` whose record is
  // there. The other places come back in one of two lists, in ascending order:
  //   missing: the caller loads the sample and inserts it. If a place is open the store has claimed the number for
  //     this process: Insert ends the claim, and Release gives it back where the load has failed.
  //   pending: another call, here or in another process, is loading it. Look it up again with `wait`, after what is
  //     missing has been inserted: who waits must hold no claims, or two may wait for each other.
  // With `wait` the call sleeps until every pending number is there, or its claim is given back, or is older than
  // claim_s, or its process has ended; what is then not there comes back in `missing`, and `pending` is empty. Without
  // `wait`, a number that is given twice and not there is missing once and pending once.
  // Any number of threads may call it at the same time. Fails with kInvalid if a number is not one of the store.
  virtual Status Lookup(const int64_t* numbers, int64_t n, bool wait, const Take& take, std::vector<int64_t>* missing,
                        std::vector<int64_t>* pending) = 0;

  // Stores a record, which the pieces make up one after the other, in every open place that has no record of this
  // number, and ends the claim on it. *stored: some place has it now. A record that finds no room is no error, and
  // closes the place with a warning; one that is larger than a segment is not stored, with one warning.
  virtual Status Insert(int64_t number, const Piece* pieces, int64_t n_pieces, bool* stored) = 0;

  // Gives claims of this process back, so that no process waits for them. Numbers without such a claim are left as they
  // are.
  virtual void Release(const int64_t* numbers, int64_t n) = 0;
  // Gives back all claims that calls of this store object hold: for a new pass over the data after one that was left
  // in the middle.
  virtual void ReleaseAll() = 0;

  virtual StoreStatistics Statistics() const = 0;
  // Moves the oldest warning that has not been fetched into *words, and returns whether there was one.
  virtual bool NextWarning(std::string* words) = 0;

  // Reads every record of both places and forgets the damaged ones. `progress` is called now and then with the numbers
  // looked at so far and in all; where it returns false the verification ends, with what was seen.
  virtual Status Verify(const std::function<bool(int64_t done, int64_t total)>& progress, Verified* memory,
                        Verified* disk) = 0;
};

// Fails with kInvalid where it is no such file, or of another version of the format.
Status LookAtIndex(const std::string& path, StoreAbout* about);

// The stores of this process by the number that the C ABI gives; the ops find theirs here. FindStore returns null if
// no open store has the number, and so does ForgetStore.
int64_t RegisterStore(std::shared_ptr<Store> store);
std::shared_ptr<Store> FindStore(int64_t cache);
std::shared_ptr<Store> ForgetStore(int64_t cache);

}  // namespace hvd_ext

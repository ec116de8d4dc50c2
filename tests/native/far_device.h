// A device that finds missing copies and waits. A plain load or store of its memory ends the process. Its operations
// run on a thread of its own, late, and those of different queues in a random order.
//
// A call throws std::runtime_error, and TakeErrors gives the words, where an operation
// - uses memory that is not allocated or not pinned, or reads memory that was not written since it was allocated or
//   forgotten;
// - uses memory that an operation of another queue uses, of which no call of Done has said that it has ended, and one
// of
//   them writes there;
// - reads host memory that has changed since the operation was queued;
// - uses memory of another device that was not reached, or that an operation there uses of which no call of Done has
// said
//   that it has ended; or writes memory that an operation of another device reads, likewise.
// Host memory that an operation is going to write, or that is forgotten, is filled with kPoison meanwhile.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/device.h"

namespace hvd_ext::test {

class FarDevice : public Device {
 public:
  static constexpr char kPoison = '\xcb';
  static constexpr int64_t kWorkspaceNbytes = 24;  // of any selection

  explicit FarDevice(uint32_t seed);
  ~FarDevice() override;

  Queue* queue(int number) override { return queues_[static_cast<size_t>(number)].get(); }
  int64_t WorkspaceNbytes(const Selection&) override { return kWorkspaceNbytes; }
  char* Allocate(int64_t nbytes) override;
  void Free(char* data) override;
  void Pin(char* data, int64_t nbytes) override;
  void Unpin(char* data) override;
  bool Share(const void* data, BlockName* name, int64_t* offset) override;
  void Unshare(const BlockName& name) override;
  char* Reach(const BlockName& name) override;
  void Leave(char* reached) override;
  void Forget(const char* data, int64_t nbytes) override;

  // No operation begins while `holds`.
  void Hold(bool holds);

  // The errors of all devices since the last call, one a line.
  static std::string TakeErrors();

 private:
  friend class FarQueue;
  struct Use {
    const char* data;
    int64_t nbytes;
    bool reads, writes;

    bool Meets(const Use& other) const {
      return data < other.data + other.nbytes && other.data < data + nbytes && (writes || other.writes);
    }
  };
  struct Operation {
    std::vector<Use> uses;
    std::vector<uint64_t> sums;  // of each use that reads host memory alone
    std::function<void()> run;
  };
  struct Waiting {
    std::deque<Operation> operations;  // that have not ended; the first may be running
    int64_t last = 0, done = 0, seen = 0;
    std::deque<std::pair<int64_t, std::vector<Use>>>
        unseen;  // of operations of which Done has not said that they ended
  };
  struct Block {
    int64_t nbytes;
    std::unique_ptr<char[]> memory;
    std::vector<char> written{};  // by byte
    bool shares = false, is_freed = false;
    int reached = 0;  // by other devices
  };

  int64_t Last(int queue);
  bool Done(int queue, int64_t number);
  void Push(int queue, std::vector<Use> uses, std::function<void()> run);
  // The memory behind a pointer.
  char* At(const void* data);

  // The device that has memory, if it is another one.
  FarDevice* OwnerOf(const char* data) const;
  // An operation of another device reads memory of this one, from when it is queued until it is known to have ended.
  void Lend(const Use& use);
  void TakeBack(const Use& use);

  // These need the lock.
  [[noreturn]] void Fail(const std::string& words);
  void Note(const std::string& words);
  bool IsFar(const char* data) const { return data >= space_ && data < space_ + kSpaceNbytes; }
  Block* BlockOf(const char* data, int64_t nbytes, int64_t* offset);
  bool IsPinned(const char* data, int64_t nbytes) const;
  bool IsQueued(const Use& use) const;
  void CheckRead(const Use& use);
  void Run();

  static constexpr int64_t kSpaceNbytes = int64_t{1} << 34;

  char* const space_;
  int64_t taken_nbytes_ = 0;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<const char*, Block> blocks_;
  std::map<const char*, int64_t> pinned_;
  std::vector<Use> lent_;
  std::vector<Waiting> waiting_{kQueues};
  std::string error_;
  std::mt19937 random_;
  bool stops_ = false, holds_ = false;
  std::thread thread_;
};

// Each with a seed of its own.
inline std::shared_ptr<Device> MakeFarDevice() {
  static std::atomic<uint32_t> made{0};
  return std::make_shared<FarDevice>(++made);
}

}  // namespace hvd_ext::test

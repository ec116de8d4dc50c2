// Where buckets lie, and what works on them there: the host, or a device whose memory plain loads and stores do not
// reach, and whose operations end later.
//
// Operations of one queue run in the order in which they were queued; those of different queues run in any order, and
// at once. A queue numbers its operations. What the host reads, and what an operation of another queue uses, needs
// Done of the operation's number first.
//
// Messages lie in host memory: operations copy between them and the device's memory, and add them to it. Between ranks
// of a host they may stay in the sender's device memory, which the receiver's operations reach.
//
// Any thread may call these. No call waits, but for Free and Unpin. Where the device fails, a call throws
// std::runtime_error.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace hvd_ext {

// A selection with error feedback (kernels/topk.h) from arrays in the device's memory; the segments cover them.
struct Selection {
  TopKOptions options;
  ErrorFeedback feedback;
  std::vector<TopKSegment> segments;

  int64_t elements() const { return segments.empty() ? 0 : segments.back().begin + segments.back().elements; }
  int64_t picks() const {
    int64_t sum = 0;
    for (const TopKSegment& segment : segments) sum += segment.k;
    return sum;
  }
};

// What joins this rank's device and that of another rank of its host. Memory of the same device counts as NVLink.
enum class Medium : int32_t {
  kNone,        // a rank has no device, or the ranks are on two hosts
  kNvlink,      // operations reach the other's memory, at a rate near that of their own
  kPcie,        // they reach it across the bus
  kHostMemory,  // they do not, and messages lie in the host's memory
};

inline bool Reaches(Medium medium) { return medium == Medium::kNvlink || medium == Medium::kPcie; }

class Queue {
 public:
  virtual ~Queue() = default;

  // The number of the newest operation, and whether it and those before it have ended.
  virtual int64_t Last() = 0;
  virtual bool Done(int64_t number) = 0;

  // What is queued here from now on comes after the work that is in a stream of the device now, and the other way
  // around: the work that is put into the stream from now on comes after what is queued here now.
  virtual void Follow(void* stream) = 0;
  virtual void Lead(void* stream) = 0;

  // `to` and `from` are memory of the device, or of a BufferPool of messages, or memory that Reach gave. So is what is
  // called a message below.
  virtual void Copy(void* to, const void* from, int64_t nbytes) = 0;
  // As the kernels of these names. `data` is memory of the device.
  virtual void Combine(ReduceOp op, DType dtype, void* data, const void* message, int64_t elements) = 0;
  virtual void Divide(DType dtype, void* data, int64_t divisor, int64_t elements) = 0;
  virtual void Narrow(DType wire, void* message, float* data, int64_t elements, float scale) = 0;
  virtual void Widen(DType wire, float* data, const void* message, int64_t elements, float scale) = 0;
  virtual void AddWidened(DType wire, float* data, const void* message, int64_t elements, float scale) = 0;
  virtual void CombineWidened(ReduceOp op, DType wire, float* data, const void* message, int64_t elements) = 0;
  virtual void Round(DType wire, float* data, int64_t elements, float scale) = 0;

  // `data` becomes 0.
  virtual void Clear(void* data, int64_t nbytes) = 0;
  // data[positions[i] - base] += values[i]; the positions differ, and they and the values are messages.
  virtual void AddEntries(float* data, int64_t elements, int64_t base, const int32_t* positions, const float* values,
                          int64_t count) = 0;
  // As the kernels of these names; their arrays are memory of the device. The picks, and whether one is not finite (1
  // or 0), become messages; `counts` is plain memory, which is written when the call returns. `workspace` is memory of
  // the device, of WorkspaceNbytes.
  virtual void Accumulate(const ErrorFeedback& feedback, int64_t elements, float* accumulated) = 0;
  virtual void TopKErrorFeedback(const Selection& selection, TopKScratch* scratch, char* workspace, int64_t* counts,
                                 int32_t* positions, float* values, int32_t* non_finite) = 0;
};

class Device {
 public:
  static constexpr int kQueues = 5;

  virtual ~Device() = default;

  // Whether plain loads and stores reach its memory and operations have ended when they return.
  virtual bool IsHost() const { return false; }
  // The first queue takes what is submitted; the others take segments.
  virtual Queue* queue(int number) = 0;
  Queue* inputs() { return queue(0); }
  Queue* OfSegment(int64_t tag) { return queue(1 + static_cast<int>(tag % (kQueues - 1))); }

  // Whether TopKErrorFeedback of its queues has a selector, and the bytes of workspace that a selection needs.
  virtual bool Selects(Selector selector) const { return selector == Selector::kExact; }
  virtual int64_t WorkspaceNbytes(const Selection& /*selection*/) { return 0; }

  // Memory of the device, 64-byte aligned. Throws std::bad_alloc. Free waits for the operations that use the memory.
  virtual char* Allocate(int64_t nbytes) = 0;
  virtual void Free(char* data) = 0;
  // Whole pages of the host, which operations may use until Unpin; it waits for those that do.
  virtual void Pin(char* data, int64_t nbytes) = 0;
  virtual void Unpin(char* data) = 0;

  // How another process of this host, or another engine of this one, names a block of Allocate.
  struct BlockName {
    std::array<char, 88> bytes{};

    bool operator<(const BlockName& other) const { return bytes < other.bytes; }
  };
  // The name of the block in which `data` lies, and where in it. Until Unshare, Free keeps the block. False where it
  // cannot be shared.
  virtual bool Share(const void* /*data*/, BlockName* /*name*/, int64_t* /*offset*/) { return false; }
  virtual void Unshare(const BlockName& /*name*/) {}
  // The begin of a shared block as operations of this device reach it, until Leave; null where they do not. The owner
  // may free the block after that.
  virtual char* Reach(const BlockName& /*name*/) { return nullptr; }
  // The device among those of the host, as its processes name it; empty where they do not.
  virtual std::string Name() const { return ""; }
  // What joins this device and another one, which has memory that Reach gave.
  virtual Medium MediumTo(const char* /*reached*/) { return Medium::kPcie; }
  virtual void Leave(char* /*reached*/) {}

  // What lies there is not used any more, by operations that are queued later. For devices that check their use.
  virtual void Forget(const char* /*data*/, int64_t /*nbytes*/) {}
};

const std::shared_ptr<Device>& HostDevice();

}  // namespace hvd_ext

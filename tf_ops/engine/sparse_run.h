// The rows of sparse plans (plan/ir.def), for one run: its vectors, the messages that carry them, and its local rows.
// The executor calls it, on the engine's thread.
//
// A round sends its dense messages, then the heads in the order of the rows, then in the same order the bodies that are
// not empty. A receiver posts its receives in that order too: the heads at once, and a body when all heads of its peer
// before it have come, so that the bodies before it are posted.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/buffer_pool.h"
#include "engine/codec.h"
#include "engine/error_feedback.h"
#include "engine/transport.h"
#include "kernels/topk.h"
#include "plan/plan.h"

namespace hvd_ext {

struct SparseCounters {
  std::atomic<int64_t> entries{0}, value_nbytes{0}, index_nbytes{0}, head_nbytes{0};
};

// What a run works with.
struct SparseWork {
  Transport* transport;
  BufferPool* pool;
  TopKScratch* scratch;
  std::atomic<int64_t>*bytes_sent, *bytes_received;
  const Plan* plan;
  Label label;
  Device* device;    // for local rows: where the bucket lies, and
  BufferPool* near;  // memory there;
  Queue* queue;      // what works on it,
  float* data;       // and the bucket from element `first` on
  int64_t first;
  int64_t elements;  // of the bucket

  int64_t ElementAt(int64_t unit) const { return UnitBegin(unit, plan->units, elements); }
};

class SparseRun {
 public:
  // `step` makes the random selections of steps differ.
  SparseRun(std::shared_ptr<Feedback> feedback, const TopKStep& topk, int64_t step,
            std::shared_ptr<SparseCounters> counters)
      : feedback_(feedback),
        topk_(topk),
        step_(step),
        counters_(std::move(counters)),
        vector_(MakeVectorCodec(std::move(feedback))) {}

  // False while another run uses the bucket's residual; else none other does until Leave.
  bool Enter() { return feedback_->Enter(); }
  void Leave() { feedback_->Leave(); }

  // Posts the messages of vectors in the rows [first, end) of a round; Test moves them on.
  Status Post(const SparseWork& work, size_t first, size_t end);
  Status Test(const SparseWork& work, bool* moved);
  size_t waiting() const { return waiting_; }  // messages that have not ended
  void AddPeers(std::vector<int>* peers) const;

  // Whether a local row works on the host's memory, though the bucket lies on this device.
  bool NeedsHost(const Device* device, const Row& row) const {
    return feedback_->device() != device || row.opcode == Opcode::PACK;
  }
  // Queues the work of a local row. When that of SELECT has ended, Selected is called before anything else.
  Status RunLocal(const SparseWork& work, const Row& row);
  void Selected(const SparseWork& work) { vector_->Selected(VectorWorkOf(work)); }

 private:
  struct Message {
    const Row* row;
    int64_t begin, elements;
    bool sends;
    std::shared_ptr<VectorMessage> content;  // several sends may share it
    Buffer head;
    std::vector<std::unique_ptr<Request>> requests;  // under way
    bool headless = false;                           // a receive whose head has not come
    bool done = false;
  };
  struct Piece {
    int64_t count;  // units
    std::shared_ptr<VectorMessage> content;
  };

  // Posts one request for a piece of a message, and counts its bytes.
  static Status PostPiece(const SparseWork& work, Message* message, char* data, int64_t nbytes);
  static Status PostBody(const SparseWork& work, Message* message);
  Status TestRequests(const SparseWork& work, Message* message, bool* moved);
  Status TakeHead(const SparseWork& work, Message* message);
  void Keep(Message* message);
  void Count(const Message& message) const;
  VectorWork VectorWorkOf(const SparseWork& work) const;
  const VectorMessage* Find(const Row& row) const;

  const std::shared_ptr<Feedback> feedback_;
  const TopKStep topk_;
  const int64_t step_;
  const std::shared_ptr<SparseCounters> counters_;
  const std::unique_ptr<VectorCodec> vector_;     // this rank's
  std::map<int, std::map<int64_t, Piece>> came_;  // by peer, then first unit
  std::vector<Message> messages_;                 // of the round under way
  std::vector<char> blocked_;  // by peer, in Test: the head of an earlier message of this peer has not come
  size_t waiting_ = 0;
};

}  // namespace hvd_ext

// Runs plans on buffers. A lane is a sequence of runs; a run is one bucket or call and is cut into segments; a segment
// goes through the rows of its plan round by round. At most `window` segments of a lane are in flight, and they start
// in order.
//
// Tags: segment s of lane l uses l * window + s % window, and starts only when segment s - window of its lane has ended
// on this rank. All messages of s - window have then been posted here before those of s, and the transport keeps the
// order of one (sender, receiver, tag), so that tags repeat and messages never meet the wrong segment. That needs all
// ranks to count alike: a run has the same number of segments on every rank, also on one that has no elements in it.
// Every message also carries its run and its segment, which the receiver compares with its own (Label).
//
// All members need the progress role, except statistics().
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/arriving.h"
#include "engine/buffer_pool.h"
#include "engine/codec.h"
#include "engine/device.h"
#include "engine/progress_role.h"
#include "engine/sparse_run.h"
#include "engine/trace.h"
#include "engine/transport.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"
#include "plan/plan.h"

namespace hvd_ext {

// Refuses a lane whose tags are above the transport's largest. A lane is never used again: a rank opens the next one
// without asking the others, so it cannot know that all of them have ended the one before.
Status CheckLane(int64_t lane, int64_t window, int64_t largest_tag);

struct Run {
  std::string what;  // for messages: "allreduce 'x'"
  std::shared_ptr<const Plan> plan;
  DType dtype = DType::kFloat32;
  std::optional<DType> wire;     // float16 or bfloat16, in which float32 travels; it is added as float32
  ReduceOp op = ReduceOp::kSum;  // what RECV_REDUCE does
  int64_t divisor = 1;           // each segment is divided by it when it has ended
  std::shared_ptr<Buffer> buffer;
  std::shared_ptr<Buffer> result;            // becomes a copy of the buffer where it is another one; may be null
  std::shared_ptr<const Arriving> arriving;  // what is still copied into the buffer; a segment starts when it is there
  int64_t elements = 0;
  int64_t segment_nbytes = 0;               // 0: one segment
  std::shared_ptr<SparseRun> sparse;        // of a bucket with error feedback, which is one segment
  std::vector<int64_t> unit_begins;         // where units of unequal size begin, and the end: one segment; or empty
  int64_t id = 0, part = 0;                 // for the trace: the step and its bucket, or the call
  std::function<void(const Status&)> done;  // called once, with the progress role
};

// A lane that has work, for the stall watch.
struct LaneView {
  int64_t lane;
  int64_t run;  // the oldest that has not ended; runs of a lane are numbered from 0
  std::string what;
  double progress_s;       // when something last moved
  std::vector<int> peers;  // the peers whose messages it waits for, or who have not taken its own
};

struct ExecutorStatistics {
  std::atomic<int64_t> segments{0}, bytes_sent{0}, bytes_received{0};
};

class Executor {
 public:
  // `messages`: a pool of host memory that the device's operations may use.
  Executor(Transport* transport, BufferPool* messages, int64_t window, Trace* trace = nullptr,
           std::shared_ptr<Device> device = HostDevice());
  // Memory of messages that are still under way is kept for ever: the transport may still use it.
  ~Executor() HVD_EXT_UNCHECKED;

  // Where the lane has failed, `done` is called at once.
  void Enqueue(int64_t lane, Run run, double now_s) HVD_EXT_REQUIRES(progress_role);

  // Makes one pass over all lanes with runs. An error is the transport's, and the caller fails everything.
  Status Progress(double now_s, bool* moved) HVD_EXT_REQUIRES(progress_role);

  // Ends all runs of the lane, and all later ones, with `status`. The first failure of a lane stays.
  void Fail(int64_t lane, const Status& status) HVD_EXT_REQUIRES(progress_role);
  void FailAll(const Status& status) HVD_EXT_REQUIRES(progress_role);

  bool busy() const HVD_EXT_REQUIRES(progress_role) { return open_runs_ > 0; }
  // Whether the last pass has left operations of the device that had not ended: no doorbell rings for them.
  bool polls() const HVD_EXT_REQUIRES(progress_role) { return polls_; }
  // Whether runs were cut off while messages of theirs were under way.
  bool abandoned() const HVD_EXT_REQUIRES(progress_role) { return abandoned_; }
  int64_t runs(int64_t lane) const HVD_EXT_REQUIRES(progress_role);  // enqueued so far
  std::vector<LaneView> Views() const HVD_EXT_REQUIRES(progress_role);
  const ExecutorStatistics& statistics() const { return statistics_; }

 private:
  struct RoundSpan {
    double begin_s = -1, end_s = -1;
  };
  struct OpenRun {
    Run run;
    std::unique_ptr<const DenseCodec> codec;
    int64_t index = 0;
    int64_t segments = 0, started = 0, ended = 0;
    double begin_s = -1;            // when its first segment started; only while a trace runs
    std::vector<RoundSpan> rounds;  // by round; only while a trace runs
  };
  struct Transfer {
    const Row* row;
    int64_t begin, elements;
    std::unique_ptr<Request> request{};  // null before it is posted and when it has ended
    Buffer scratch{};                    // the message where it is not the buffer's memory, or a peer's
    const char* message = nullptr;       // that has arrived and is not added or read yet; of a send, what is sent
    int64_t operation = 0;               // of a send: the newest that writes the message
  };
  struct Segment {
    explicit Segment(const Label& label) : label(label) {}
    OpenRun* open = nullptr;
    std::shared_ptr<const Plan> plan;  // this and the next two outlive a run that was abandoned
    std::shared_ptr<Buffer> buffer;
    std::shared_ptr<SparseRun> sparse;
    Label label;
    int64_t begin = 0, elements = 0;
    Queue* queue = nullptr;  // its operations on the buffer
    int64_t operation = 0;   // the newest
    size_t next_row = 0;
    int64_t round = -1;               // the one under way
    std::vector<int32_t> terms;       // by unit: how many ranks' values are added up in it; or empty
    std::vector<Transfer> transfers;  // of the round under way
    size_t first_row = 0;             // of the round under way
    size_t waiting = 0;               // transfers that have not ended
    size_t sent = 0;                  // of those before this one, the sends are posted
    bool vectors = false;             // the round's vectors are still to be posted, after the sends
    size_t reduced = 0;               // transfers before this one are reduced
    bool local = false;               // local rows of the round have not all run
    bool selects = false;             // the next row is SELECT, whose work is queued
    Buffer staged;                    // for local rows: the units of the round, in the host's memory
    int64_t staged_first = 0;         // the first of its elements
    bool finished = false;            // the operations behind the last row are queued
    // Messages on the devices of peers, each until operation `first` on it has ended.
    std::deque<std::pair<int64_t, std::unique_ptr<Request>>> held;
  };
  struct Lane {
    explicit Lane(int64_t n) : number(n) {}

    const int64_t number;
    std::deque<std::unique_ptr<OpenRun>> runs;
    std::vector<std::unique_ptr<Segment>> slots;        // segment s is in slot s % window
    std::deque<std::pair<int64_t, std::string>> ended;  // the last runs that have ended, and their names
    int64_t enqueued = 0;
    int64_t next_segment = 0;
    double progress_s = 0;
    Status failure;
  };

  Lane& LaneOf(int64_t number) HVD_EXT_REQUIRES(progress_role);
  Status StartSegments(Lane* lane, bool* moved) HVD_EXT_REQUIRES(progress_role);
  Status StartRound(Segment* segment) HVD_EXT_REQUIRES(progress_role);
  void Finish(Segment* segment) const;
  bool IsDone(Queue* queue, int64_t operation) HVD_EXT_REQUIRES(progress_role);
  Status Advance(Segment* segment, bool* ended, bool* moved) HVD_EXT_REQUIRES(progress_role);
  Status TestTransfers(Segment* segment, bool* moved) HVD_EXT_REQUIRES(progress_role);
  Status PostReceive(Segment* segment, Transfer* transfer) HVD_EXT_REQUIRES(progress_role);
  void WriteMessage(Segment* segment, Transfer* transfer) HVD_EXT_REQUIRES(progress_role);
  Status PostWritten(Segment* segment, size_t end) HVD_EXT_REQUIRES(progress_role);
  void ReduceInOrder(Segment* segment);
  void NoteTerms(Segment* segment, const Transfer& transfer, int32_t terms) const;
  // Whether the messages of a row lie in memory of the device, the sender's or this rank's.
  bool OnDevice(const OpenRun& open, const Row& row) const {
    return !device_->IsHost() && !open.codec->CountsTerms() && transport_->ReachesDevice(row.peer);
  }
  BufferPool* MessagesOf(const OpenRun& open, const Row& row) { return OnDevice(open, row) ? &near_ : messages_; }
  void GiveBack(Segment* segment, Transfer* transfer) const;
  // Whether messages lie in memory of their own, unless they are on the device.
  bool HasMessages(const OpenRun& open) const { return !open.codec->IsPlain() || !device_->IsHost(); }
  bool Combines(const OpenRun& open, const Row& row) const;
  bool ReceivesZeroCopy(const OpenRun& open, const Row& row) const;
  void Combine(Segment* segment, const Transfer& transfer) const;
  static bool IsSentFrom(const Segment& segment, const Transfer& reduction);
  void EndRuns(Lane* lane) HVD_EXT_REQUIRES(progress_role);
  static bool IsWaiting(const Segment& segment) {
    return segment.waiting > 0 || (segment.sparse != nullptr && segment.sparse->waiting() > 0);
  }
  static char* DataOf(const Segment& segment, int64_t element) {
    return segment.buffer->data() + element * static_cast<int64_t>(SizeOf(segment.open->run.dtype));
  }
  // executor_sparse.cc
  SparseWork WorkOf(const Segment& segment) HVD_EXT_REQUIRES(progress_role);
  Status PostVectors(Segment* segment) HVD_EXT_REQUIRES(progress_role);
  Status TestVectors(Segment* segment, bool* moved) HVD_EXT_REQUIRES(progress_role);
  Status RunLocalRows(Segment* segment) HVD_EXT_REQUIRES(progress_role);
  static void NoteRound(const Segment& segment, bool ended);
  void Record(int64_t number, const OpenRun& open);
  void Abandon(std::unique_ptr<Segment> segment) HVD_EXT_REQUIRES(progress_role);
  int64_t UnitAt(const Segment& segment, int64_t unit) const;
  std::string NameOf(const Label& label) const HVD_EXT_REQUIRES(progress_role);

  Transport* transport_;
  BufferPool* messages_;
  int64_t window_;
  Trace* trace_;
  const std::shared_ptr<Device> device_;
  BufferPool near_;  // memory of the device, for messages that stay there
  std::map<int64_t, Lane> lanes_ HVD_EXT_GUARDED_BY(progress_role);
  std::vector<Lane*> busy_ HVD_EXT_GUARDED_BY(progress_role);  // the lanes with runs, by number
  Status failure_ HVD_EXT_GUARDED_BY(progress_role);
  int64_t open_runs_ HVD_EXT_GUARDED_BY(progress_role) = 0;
  bool abandoned_ HVD_EXT_GUARDED_BY(progress_role) = false;
  bool polls_ HVD_EXT_GUARDED_BY(progress_role) = false;
  ExecutorStatistics statistics_;
  TopKScratch scratch_ HVD_EXT_GUARDED_BY(progress_role);
};

}  // namespace hvd_ext

// The engine: one thread that runs plans on buffers. It knows no algorithm by name, no TensorFlow and no Python.
//
// Two kinds of work meet here:
//   channels   an optimizer's buckets in a fixed order, agreed when the channel is opened; no negotiation per step.
//   Bucket i
//              starts when its tensors are submitted and bucket i - 1 has started.
//   calls      collectives and exchanges that a user makes by name, in any order on each rank; rank 0 matches them (by
//   name
//              and n-th use of the name), compares what must agree, and gives all ranks one order.
// Both run on lanes: a lane is a sequence of segments with tags of its own, at most `window` of them in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/trace.h"
#include "engine/transport.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace hvd_ext {

enum class Kind : int32_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 3,
  kExchange = 4,
  kReducescatter = 5,
  kAlltoall = 6
};

struct Config {
  double stall_warn_s = 60;    // a peer stays away: warn after this time, and again each time it has passed; 0 never
  double stall_fatal_s = 0;    // fail the collective after this time; 0 never
  int64_t segment_nbytes = 0;  // 0: the caller's (each bucket and call carries its own)
  int64_t window = 8;          // segments of one lane in flight
  double leave_grace_s = 3;    // a peer has left: what it sent before may take this long without progress to arrive
  double drain_s = 1;          // Stop: work under way may take this long without progress (and three times this in all)
  double farewell_s = 2;       // Stop: the peers may take this long to say farewell
  double idle_s = 10e-3;       // between looks at what wakes nobody (MPI) while nothing is under way, at most
  std::vector<int> numbers{};  // the ranks' numbers in messages; empty: their own
};

// How the positions of selected entries travel.
enum class SparseIndices : int32_t { kSmallest = 0, kRaw = 1, kDelta = 2, kBitmap = 3 };

// How a bucket's entries are selected, and how they travel: a bucket with error feedback, whose plan has a SELECT or a
// FOLD. The residual and the velocity of an element lie on the rank whose plan selects it, and sum up what the bucket
// holds there at that row. A step changes them only when EndStep commits it.
struct SparseSpec {
  TopKOptions selection{};
  std::optional<MomentumCorrection> correction{};
  bool per_tensor = false;             // each tensor's part of the units gets its share of k; else all of them have one
  int64_t dense_plan = 0;              // its FOLD covers the units that the bucket's plan selects from
  double dense_above = 1;              // steps of this density and above use dense_plan
  DType value_wire = DType::kFloat32;  // in which selected values travel; what rounding takes stays in the residual
  SparseIndices indices = SparseIndices::kSmallest;
};

struct BucketSpec {
  DType dtype;
  ReduceOp op;
  int64_t plan;                        // from AddPlan
  int64_t segment_nbytes;              // pipelining grain; a bucket is cut into ceil(nbytes / segment_nbytes) segments
  std::vector<int64_t> tensors;        // indices of the channel's tensors, in their order in the buffer
  std::optional<DType> wire{};         // float32 only: it travels as float16 or bfloat16; segment_nbytes counts these
  std::optional<SparseSpec> sparse{};  // float32 only; segment_nbytes is not used
};

struct ChannelSpec {
  std::string name;                       // for messages: "Adam"
  std::vector<std::string> tensor_names;  // for messages
  std::vector<int64_t> elements;          // per tensor; 0 is allowed
  std::vector<BucketSpec> buckets;        // every tensor in exactly one
};

struct CallSpec {
  Kind kind;
  std::string name;  // empty: refused
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;                // broadcast
  std::vector<int64_t> shape;  // allgather, alltoall: dimension 0 may differ from rank to rank
  int64_t plan = 0;            // allreduce, allgather, broadcast; its digest is compared over the ranks
  int64_t plan_digest = 0;
  int64_t segment_nbytes = 0;
  std::optional<std::vector<int64_t>> splits;  // alltoall: rows for each rank; none: equal parts
  // alltoall: becomes the rows from each rank, before Allocate; null: unasked
  std::vector<int64_t>* received = nullptr;
  std::optional<DType> wire;  // allreduce of float32: as in BucketSpec; compared over the ranks
  // What the engine does not know and all ranks must give alike, one item a line. The first line is what the user has
  // called, for messages. Empty: nothing is compared, and messages have the kind's name.
  std::string signature;
  std::string users_dtype;  // for messages and comparisons, where the tensor travels in another dtype; empty: dtype
  bool counted = false;     // the name comes from a counter, so that two calls at once on one rank have no order
};

// Gives the memory of a call's result, whose shape is known only when all ranks have come. Called on the engine's
// thread, once, before `done`, when the result is there; not where the call fails. An error ends the call on this rank
// alone.
using Allocate = std::function<Status(const std::vector<int64_t>& shape, void** memory)>;
// Refuses what cannot travel so; `where` begins the words.
Status CheckWire(const std::string& where, DType dtype, std::optional<DType> wire);

// Ends a call. Called once, on the engine's thread or, where the call is refused at once, on the caller's.
using Done = std::function<void(const Status&)>;
// Ends a collect: `data` points to the reduced tensor and is valid during the call only; null unless ok. Called once,
// on the engine's thread or, where the result is there or the collect is refused, on the caller's before Collect
// returns.
using Deliver = std::function<void(const Status&, const void* data)>;
// Ends an exchange with every rank's payload, by rank.
using Exchanged = std::function<void(const Status&, const std::vector<std::string>& payloads)>;

// The part of a sparse bucket whose residual and velocity lie on this rank: elements [begin, begin + elements).
struct FeedbackShard {
  int64_t begin = 0, elements = 0;
  bool has_velocity = false;
};
enum class FeedbackArray : int32_t { kResidual = 0, kVelocity = 1 };

struct SparseStatistics {
  int64_t entries = 0, value_nbytes = 0, index_nbytes = 0, head_nbytes = 0;  // sent
  int64_t committed = 0, dropped = 0;                                        // steps
};

struct Statistics {
  int64_t buckets = 0, calls = 0, segments = 0, bytes_sent = 0, bytes_received = 0;
};

class Engine {
 public:
  // Starts the thread. `generation` makes handles of different engines of a process differ: a handle (plan, channel) is
  // generation * 2^32 + index, and one of another generation is answered with kStopped and words.
  static Status Start(std::shared_ptr<Transport> transport, const Config& config, int64_t generation,
                      std::shared_ptr<Engine>* engine);
  ~Engine();

  int rank() const;
  int size() const;
  int64_t generation() const;

  // May be called from a callback: then the thread ends by itself afterwards, and the answer is not yet known.
  // Tells the peers farewell, waits at most a few seconds for work under way, fails what is left with kStopped, joins
  // the thread. Idempotent. True if this rank went down alone: work was cut off, or the transport was broken.
  bool Stop();
  // The first part of Stop: returns at once, so that several engines stop at the same time.
  void StopSoon();
  // After Stop: nothing had failed, nothing was cut off, and all peers have said farewell.
  bool quiet() const;

  Status AddPlan(const int64_t* rows, int64_t n_rows, int64_t units, int64_t* plan);
  Status RemovePlan(int64_t plan);  // kInvalid while a channel uses it

  Status OpenChannel(ChannelSpec spec, int64_t* channel);  // all ranks open their channels in the same order
  Status CloseChannel(int64_t channel);                    // waits for nothing: collects still open get kStopped

  // A new step of the channel: fails if the step before was left half-way (tensors submitted, others not), and lets the
  // next step start afresh where nothing of the broken step has been sent; else the channel stays failed.
  Status BeginStep(int64_t channel);
  // In place of BeginStep where some buckets are sparse: the step's density, in [0, 1]. Rank by rank the number of
  // entries that is selected from the elements [b, e) of a bucket is K(e) - K(b), K(x) = floor(density x + 1/2). A
  // step that has not been ended is dropped.
  Status BeginSparseStep(int64_t channel, double density);
  // The step under way is done, and its buckets keep what it has made of their residuals and velocities (commit, when
  // all of them have ended well), or what they had before it.
  Status EndStep(int64_t channel, bool commit);
  Status HasSparse(int64_t channel, bool* has);
  // Between steps only.
  Status GetFeedback(int64_t channel, int64_t bucket, FeedbackShard* shard);
  Status ReadFeedback(int64_t channel, int64_t bucket, FeedbackArray which, float* to);
  Status WriteFeedback(int64_t channel, int64_t bucket, FeedbackArray which, const float* from);
  Status GetSparseStatistics(int64_t channel, SparseStatistics* statistics);
  // Copies the tensor into its bucket's buffer; returns at once. `ticket` is the step it belongs to.
  Status Submit(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, int64_t* ticket);
  // Once per tensor and step; it may come before the submit. Results of the last two steps are kept, older ones
  // dropped.
  void Collect(int64_t channel, int64_t tensor, int64_t ticket, Deliver deliver);

  // `input` stays valid until `done`.
  void Call(CallSpec spec, const void* input, Allocate allocate, Done done);
  void Exchange(std::string name, std::string payload, Exchanged done);
  // This rank's use of the name is refused before it was made: the others, who make it, get a mismatch with these
  // words. Call does so itself where it refuses.
  void Refuse(const std::string& name, const std::string& why);

  Statistics GetStatistics() const;
  // Records from now on, the newest `capacity` of them, what was recorded before is forgotten; and until StopTrace,
  // which waits until what the engine's thread is doing is recorded.
  Status StartTrace(int64_t capacity);
  void StopTrace();
  const Trace& trace() const;

  class CallerProgress;

  // One of the engines that the C ABI (api.h) has started in this process: by its generation, where 0 stands for the
  // job's; or that of a plan's or channel's handle. kStopped with words where it does not run.
  static Status Find(int64_t generation, std::shared_ptr<Engine>* engine);
  static Status OfPlan(int64_t plan, std::shared_ptr<Engine>* engine);
  static Status OfChannel(int64_t channel, std::shared_ptr<Engine>* engine);

 private:
  Status Begin(int64_t channel, std::optional<double> density);

  Engine();
  class State;
  std::shared_ptr<State> state_;  // the thread holds it too: the last reference to an engine may go away on its thread
};

// The progress lock of an engine, held by a caller that is going to wait: it makes the engine's progress itself, which
// spares waking two threads. It is taken before the work is given to the engine, and the engine's thread stands aside
// until it is given back. Callbacks then come on this thread. Does nothing where another caller makes progress already,
// or in a callback.
class Engine::CallerProgress {
 public:
  explicit CallerProgress(Engine* engine) HVD_EXT_UNCHECKED;
  ~CallerProgress() HVD_EXT_UNCHECKED;
  CallerProgress(const CallerProgress&) = delete;
  CallerProgress& operator=(const CallerProgress&) = delete;

  // Makes one pass. A caller that takes long before it waits calls it from time to time, for nobody else can.
  void Once() HVD_EXT_UNCHECKED;
  // Makes passes until `ended`, which a callback sets, then gives the lock back. Returns at once or early where it
  // cannot make progress: the caller then waits.
  void Until(const std::atomic<bool>& ended) HVD_EXT_UNCHECKED;

 private:
  const std::shared_ptr<State> state_;
  bool has_lock_;
};

}  // namespace hvd_ext

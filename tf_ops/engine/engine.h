// The engine: it runs plans on buffers, on a thread of its own. It knows no algorithm by name, no TensorFlow and no
// Python.
//
// It does two kinds of work:
// - Channels reduce an optimizer's buckets in a fixed order, which is agreed when the channel is opened, so that a step
//   needs no negotiation. Bucket i starts when its tensors are submitted and bucket i - 1 has started.
// - Calls are collectives and exchanges that a user makes by name, in any order on each rank. Rank 0 matches them (by
//   name and n-th use of the name), compares what must agree, and gives all ranks one order.
// Both run on lanes: a lane is a sequence of segments with tags of its own, at most `window` of them in flight.
//
// What is called on the engine's thread may also be called on the thread of a caller that makes the engine's progress
// while it waits (CallerProgress): one of them at a time does so.
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
#include "engine/interrupt.h"
#include "engine/spec.h"
#include "engine/trace.h"
#include "engine/transport.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace hvd_ext {

class Device;

enum class Kind : int32_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 3,
  kExchange = 4,
  kReducescatter = 5,
  kAlltoall = 6
};

struct Config : JobSpec {
  int64_t segment_nbytes = 0;   // for all buckets and calls; 0: each has its own
  double leave_grace_s = 3;     // a peer has left: how long what it sent before may make no progress
  double drain_s = 1;           // Stop: how long work under way may make no progress; it has three times this in all
  double handshake_s = 2;       // Stop: how long the peers may take to answer that they shut down too
  bool tcp_inside_too = false;  // TcpOptions::inside_too
  std::vector<int> numbers{};   // the ranks' numbers in words for people; empty: their own
  std::shared_ptr<Device> device{};  // where buckets lie; null: the host
};

// What the ranks say alike of a step of a channel with sparse buckets.
struct TopKStep {
  double density = 1;               // in [0, 1]
  std::optional<float> momentum{};  // in [0, 1), in place of that of the buckets' corrections
};

// What the ranks of a call compare, and rank 0 needs to start it.
struct CallTerms {
  std::string name;  // empty: refused
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kSum;
  int64_t root = 0;  // broadcast
  int64_t plan_digest = 0;
  int64_t segment_nbytes = 0;
  std::optional<DType> wire;  // allreduce of float32: as in BucketSpec
  // exchange: a rank that has joined agrees with the others, and has an empty payload; else it is refused
  bool agrees = false;
  bool counted = false;        // the name comes from a counter, so that two calls at once on one rank have no order
  std::vector<int64_t> shape;  // allgather, alltoall: dimension 0 may differ from rank to rank
  std::optional<std::vector<int64_t>> splits;  // alltoall: rows for each rank; none: equal parts
  // What the engine does not know and all ranks must give alike, one item a line. The first line is what the user has
  // called, for messages. Empty: nothing is compared, and messages have the kind's name.
  std::string signature;
  std::string users_dtype;  // for messages and comparisons, where the tensor travels in another dtype; empty: dtype
};

struct CallSpec : CallTerms {
  int64_t plan = 0;  // not of a barrier; its digest is compared over the ranks
  // alltoall: becomes the rows from each rank, before Allocate is called; null: not wanted
  std::vector<int64_t>* received = nullptr;
};

// Gives the memory for a call's result, whose shape is known only when all ranks have come. Called once, on the
// engine's thread, when the result is there and before `done`; not called where the call fails. An error ends the call
// on this rank only.
using Allocate = std::function<Status(const std::vector<int64_t>& shape, void** memory)>;
// Refuses a dtype that cannot travel as `wire`; `where` is the beginning of the words.
Status CheckWire(const std::string& where, DType dtype, std::optional<DType> wire);

// Ends a call. Called once, on the engine's thread or, where the call is refused at once, on the caller's.
using Done = std::function<void(const Status&)>;
// Keeps memory of the engine valid.
using Memory = std::shared_ptr<const void>;
// Ends a collect: `data` points to the reduced tensor, in memory of the device if the channel says so, and is valid and
// the caller's own for as long as the caller keeps `memory`, which holds the whole bucket; null unless ok. Called once,
// on the engine's thread or, where the result is there or the collect is refused, on the caller's before Collect
// returns.
using Deliver = std::function<void(const Status&, const void* data, const Memory& memory)>;
// Ends an exchange with every rank's payload, by rank.
using Exchanged = std::function<void(const Status&, const std::vector<std::string>& payloads)>;

// How far a rank is with a channel. Runs are counted alike on all ranks, also where a step was given up.
struct StepPlace {
  int64_t runs = 0;                  // of all steps before the newest
  double density = 1;                // of the newest step: TopKStep
  std::optional<double> momentum{};  // the same
  bool ended = false;                // of a channel whose steps have a density: the newest step has been ended
  bool committed = false;            // and committed
  bool committed_before = false;     // the step before it was committed
};

// Ends a join: which rank was the last one, and every rank's payload, by rank.
using JoinEnded = std::function<void(const Status&, int last, const std::vector<std::string>& payloads)>;

// A plan that a rank has for calls of others, when it has joined.
struct KnownPlan {
  int64_t digest = 0, plan = 0;
};

// The part of a sparse bucket whose residual and velocity lie on this rank: elements [begin, begin + elements).
struct FeedbackShard {
  int64_t begin = 0, elements = 0;
  bool has_velocity = false;
};
enum class FeedbackArray : int32_t { kResidual = 0, kVelocity = 1 };

struct TopKStatistics {
  int64_t entries = 0, value_nbytes = 0, index_nbytes = 0, head_nbytes = 0;  // sent
  int64_t committed = 0, dropped = 0;                                        // steps
};

// When a complete step began and its last bucket ended, by NowSeconds(), and how long after its begin each tensor came.
struct StepTimes {
  int64_t step = 0;
  double begin_s = 0, end_s = 0;
  std::vector<double> arrival_offset_s;
};

// A round of a partial channel that is over, by NowSeconds().
struct RoundInfo {
  int64_t round = 0;
  double begin_s = 0, over_s = 0;  // on this rank
  double waited_s = 0;             // how long before its end this rank asked for its result; 0: after it
  std::vector<int64_t> arrived;    // of each rank the newest step whose gradient is in this round or in one before it
  std::vector<int64_t> flags;      // of each rank
  // On rank 0: when the word came that the gradient of this step is there, of each rank; 0: not yet. Elsewhere empty.
  std::vector<double> announced_s;
};

// Ends a wait for the round of this rank's next step: false where all ranks have left, and there is no such round.
using NextRound = std::function<void(const Status&, bool more)>;

struct Statistics {
  int64_t buckets = 0, calls = 0, segments = 0, bytes_sent = 0, bytes_received = 0;
};

class Engine {
 public:
  class CallerProgress;

  // Starts the thread. `generation` makes handles of different engines of a process differ: a handle (plan, channel) is
  // generation * 2^32 + index, and one of another generation is answered with kStopped and words.
  static Status Start(std::shared_ptr<Transport> transport, const Config& config, int64_t generation,
                      std::shared_ptr<Engine>* engine);
  ~Engine();

  int rank() const;
  int size() const;
  int64_t generation() const;
  const char* between() const;                    // Transport::between_hosts
  const std::shared_ptr<Device>& device() const;  // where buckets lie
  Medium MediumTo(int rank) const;                // Transport::MediumTo

  // Waits at most a few seconds for work under way, fails what is left with kStopped, tells the peers and joins the
  // thread. Returns true if this rank went down alone: work was cut off, or the transport was broken. Idempotent. May
  // be called from a callback: then the thread ends by itself afterwards, and the answer is not yet known.
  bool Stop();
  // Begins what Stop does and returns at once, so that several engines stop at the same time.
  void StopSoon();
  // After Stop: nothing had failed, nothing was cut off, and all peers shut down too.
  bool quiet() const;
  // Why nothing works any more, or ok.
  Status Usable() const;

  Status AddPlan(const int64_t* rows, int64_t n_rows, int64_t units, int64_t* plan);
  Status RemovePlan(int64_t plan);  // kInvalid while a channel uses it

  Status OpenChannel(ChannelSpec spec, int64_t* channel);  // all ranks open their channels in the same order
  Status CloseChannel(int64_t channel);                    // waits for nothing: collects still open get kStopped

  // All ranks switch before the same step: the next step of the channel has the buckets of `spec`, which must have the
  // channel's tensors. A step that has begun keeps its own. See Channel::Switch.
  Status SwitchLayout(int64_t channel, const ChannelSpec& spec);
  // See Channel::AtStep. `call` may use the engine, and may wait for other ranks that call alike.
  Status AtStep(int64_t channel, int64_t step, std::function<void(int64_t step)> call);
  // Whether the next BeginStep makes such a call, which may take long.
  bool HasCallBeforeStep(int64_t channel);
  Status GetTimes(int64_t channel, int64_t most, std::vector<StepTimes>* times);

  // Begins a step of the channel. Fails if some tensors of the step before were submitted and others were not: then the
  // next step starts afresh where nothing of the broken step has been sent, and else the channel stays failed.
  Status BeginStep(int64_t channel);
  // In place of BeginStep where the channel was opened with sparse buckets, also while it has none. On each rank,
  // K(e) - K(b) entries are selected from the elements [b, e) of a sparse bucket, with K(x) = floor(density x + 1/2). A
  // step that has not been ended is dropped.
  Status BeginTopKStep(int64_t channel, double density, std::optional<float> momentum = std::nullopt);
  // Ends the step under way. With `commit`, which needs all buckets to have ended well, their residuals and velocities
  // become what the step has made of them; else they stay what they were before it.
  Status EndStep(int64_t channel, bool commit);
  Status HasDensity(int64_t channel, bool* has);
  // The residual and velocity of a sparse bucket on this rank; between steps only.
  Status GetFeedback(int64_t channel, int64_t bucket, FeedbackShard* shard);
  Status ReadFeedback(int64_t channel, int64_t bucket, FeedbackArray which, float* to);
  Status WriteFeedback(int64_t channel, int64_t bucket, FeedbackArray which, const float* from);
  Status GetTopKStatistics(int64_t channel, TopKStatistics* statistics);
  // Copies the tensor into its bucket's buffer and returns. `ticket` is the step that it belongs to. A caller that
  // makes progress does so during the copy, too.
  Status Submit(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, int64_t* ticket,
                CallerProgress* progress = nullptr);
  // The same for a tensor in memory of the engine's device, of a channel with `on_device`. The copy comes after the
  // work that is in `stream` now, and what is put there from now on comes after the copy.
  Status SubmitOnDevice(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, void* stream,
                        int64_t* ticket);
  // Called once per tensor and step, also before the submit. Results of the last two steps are kept, older ones are
  // dropped.
  void Collect(int64_t channel, int64_t tensor, int64_t ticket, Deliver deliver);

  // The next collect of the tensor takes this value, whatever its step: of a channel whose user takes each result one
  // step late, the result that an earlier job has not taken. Not of partial channels, and not of those with
  // `on_device`.
  Status GiveResult(int64_t channel, int64_t tensor, const void* data, int64_t nbytes);

  // Of partial channels. A step without a gradient of this rank, whose round must be over; *ticket: for Collect.
  Status SkipStep(int64_t channel, int64_t* ticket);
  // The round of this rank's gradient after the next `ahead` - 1 ones takes the gradients of all ranks.
  Status Flush(int64_t channel, int64_t ahead);
  // Until all ranks have left, this one gives no gradients, and no round waits for it. AwaitRound tells it of rounds.
  Status Leave(int64_t channel);
  void AwaitRound(int64_t channel, NextRound done);
  // Of all channels: the newest step that this rank has begun, and the newest round, or step, that is over.
  Status Progress(int64_t channel, int64_t* step, int64_t* over);
  Status SetQuorum(int64_t channel, int64_t quorum);  // on rank 0; of rounds that are not open yet
  // Bits, below 2^31, that travel with this rank's part of each round that begins from now on.
  Status SetFlags(int64_t channel, int64_t flags);
  // The rounds that are over, from round `first` on, at most `most`; the newest 10,000 are kept.
  Status GetRounds(int64_t channel, int64_t first, int64_t most, std::vector<RoundInfo>* rounds);
  // What this rank holds of a tensor; *held: whether it holds anything. `to` may be null. Between steps only.
  Status ReadHeld(int64_t channel, int64_t tensor, void* to, bool* held);
  Status WriteHeld(int64_t channel, int64_t tensor, const void* from);

  // `input` stays valid until `done`.
  void Call(CallSpec spec, const void* input, Allocate allocate, Done done);
  void Exchange(std::string name, std::string payload, Exchanged done, bool agrees = false);
  // Until all ranks have joined, this one gives zeros to the steps and sums of the others (joining.h). `plans`: those
  // of calls, with the digests by which the ranks compare them.
  void Join(const std::vector<KnownPlan>& plans, std::string payload, JoinEnded done);
  // Tells the other ranks that this one has refused its use of the name: their calls end with a mismatch and these
  // words. Call does so itself where it refuses.
  void Refuse(const std::string& name, const std::string& why);

  Statistics GetStatistics() const;
  // Forgets what was recorded, and records until StopTrace; the newest `capacity` records are kept. StopTrace waits
  // until what the engine's thread is doing is recorded.
  Status StartTrace(int64_t capacity);
  void StopTrace();
  const Trace& trace() const;

  // Finds one of the engines that the C ABI (api.h) has started in this process: by its generation, where 0 stands for
  // the job's engine, or by the handle of a plan or a channel. kStopped with words where it does not run.
  static Status Find(int64_t generation, std::shared_ptr<Engine>* engine);
  static Status OfPlan(int64_t plan, std::shared_ptr<Engine>* engine);
  static Status OfChannel(int64_t channel, std::shared_ptr<Engine>* engine);

  // Graphs outlive engines: a job whose ranks have changed goes on with another engine. From Succeed on, the ops of a
  // graph that know the channel of an engine that has stopped use another one, with the same tensors.
  static void Succeed(int64_t stopped, int64_t channel);
  // `call` is called when a step of a stopped channel without a successor begins; it may wait for other ranks, and may
  // make one. Null: none is called.
  static void OnStopped(std::function<void(int64_t channel)> call);
  // Finds the engine of a channel or of its successor, which *channel becomes.
  static Status OfSuccessor(int64_t* channel, std::shared_ptr<Engine>* engine);
  // The same when a step begins: makes a successor where one is missing.
  static Status OfStep(int64_t* channel, std::shared_ptr<Engine>* engine);
  // Whether the begin of a step may take long: something is called before it.
  static bool WaitsAtStep(int64_t channel);

 private:
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

  // Whether this caller makes the progress.
  bool has_lock() const { return has_lock_; }
  // The caller has copied so many bytes. Every now and then a pass is made: no other thread can.
  void Copied(int64_t nbytes) HVD_EXT_UNCHECKED;
  // Makes passes until `ended`, which a callback sets, then gives the lock back. Returns at once or early where it
  // cannot make progress, or where the wait takes more than `most_s`: the caller then waits, and looks for signals.
  void Until(const std::atomic<bool>& ended, double most_s = kLookForSignals_s) HVD_EXT_UNCHECKED;

 private:
  const std::shared_ptr<State> state_;
  bool has_lock_;
  int64_t copied_nbytes_ = 0;  // since the last pass
};

}  // namespace hvd_ext

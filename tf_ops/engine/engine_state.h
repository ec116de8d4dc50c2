// What an engine holds, shared by engine.cc (public calls, any thread), engine_thread.cc (the loop), engine_calls.cc
// and engine_stalls.cc (both on the engine's thread).
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/channel.h"
#include "engine/coordinator.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/message.h"
#include "engine/stall.h"
#include "engine/trace.h"

namespace hvd_ext {

constexpr int64_t kCallsLane = 0;  // channel i has lane 1 + i

// The answer to a handle whose engine does not run (any more); `what` is "plan" or "channel".
Status OfStopped(const std::string& what, int64_t handle);

// A call or exchange that this rank has made and that has not started.
struct OpenCall {
  CallSpec spec;
  std::shared_ptr<const Plan> plan;
  const void* input = nullptr;
  std::string payload;
  Allocate allocate;
  std::function<void(const Status&, std::vector<std::string>)> done;
  double since_s = 0;
  double heard_s = 0;    // when rank 0 last said that it knows of the wait
  bool silence = false;  // rank 0's was named

  std::string name() const { return NameOfCall(spec); }
};

class Engine::State : public std::enable_shared_from_this<Engine::State> {
 public:
  State(std::shared_ptr<Transport> transport, const Config& config, int64_t generation);

  // --- any thread; the mutex guards this group
  std::mutex mutex;
  std::vector<std::function<void()>> inbox;  // work for the engine's thread
  bool stopping = false;
  Status failure;                                  // everything has failed
  int gone = -1;                                   // the first peer that has left
  std::vector<std::shared_ptr<const Plan>> plans;  // null: removed
  std::vector<std::shared_ptr<Channel>> channels;  // null: closed
  std::map<int64_t, Status> lane_failures;

  Status Usable() const;
  Status FindPlan(int64_t handle, std::shared_ptr<const Plan>* plan) const;
  Status FindChannel(int64_t handle, std::shared_ptr<Channel>* channel) const;
  void Post(std::function<void()> work);

  // For messages: a rank's number, and "rank 2 has shut down: ...".
  int Number(int peer) const { return NumberOf(config.numbers, peer); }
  std::string HasLeft(int peer) const { return hvd_ext::HasLeft(Number(peer)); }

  // --- any thread, without the mutex
  const std::shared_ptr<Transport> transport;
  const Config config;
  const int64_t generation;
  const int rank, size;
  BufferPool pool;
  Trace trace;
  std::atomic<int64_t> buckets{0}, calls{0};
  Executor executor;  // the engine's thread only, except statistics()

  std::mutex join_mutex;
  std::thread thread;
  std::atomic<std::thread::id> mover{};  // who has the turn
  std::atomic<bool> alone{false};
  std::atomic<bool> quiet{false};  // at the end

  int64_t HandleOf(size_t index) const { return generation * (int64_t{1} << 32) + static_cast<int64_t>(index); }

  // A caller that waits does the work of the engine's thread meanwhile (Engine::Helper): any thread. Help needs what
  // BeginHelp has taken.
  bool BeginHelp();
  void Help(const std::atomic<bool>& ended);
  void EndHelp();
  bool IsMover() const { return mover.load() == std::this_thread::get_id(); }

  // --- the engine's thread only, or rather whoever has the turn (engine_thread.cc)
  void Loop();
  void Send(int peer, const ControlMessage& message);
  void SendToOthers(const ControlMessage& message);
  void FailEverything(const Status& status, bool tell);
  void FailLane(int64_t lane, const Status& status, bool tell);

  // engine_calls.cc
  void AnnounceCall(std::shared_ptr<OpenCall> call);
  void StartBucket(const std::shared_ptr<Channel>& channel, const std::shared_ptr<ChannelStep>& step, int64_t bucket);
  void CloseLane(int64_t lane);

 private:
  struct Inquiry {
    int asker;
    int64_t lane, run;
    double waited_s, since_s;
    std::string what;
    std::vector<LaneReport> reports;
  };
  struct LaneWatch {
    double progress_s = -1;
    int quiet = 0;  // looks at the lane since it last moved
    int64_t warnings = 0;
    double asked_s = -1;  // a question to rank 0 is open since then
    bool fatal = false;   // ... and its answer ends everything
  };
  struct Closed {
    int64_t runs;
    int rank;
  };
  // What was said of a lane that stands still: in which run, and when the first of it was.
  struct Printed {
    int64_t run;
    double at_s;
    std::set<std::string> who;
  };

  // engine_thread.cc
  bool Pass(bool running);
  bool TakeInbox();
  bool ReceiveMessages();
  void Handle(int peer, ControlMessage message);
  void HandleLeave(int peer);
  bool Expecting() const;
  bool TakeTurn(bool wait);
  void EndTurn();
  double Pause(bool moved) const;
  void Sleep(uint32_t seen, double pause_s, Doorbell::Who who);
  bool StopRequested();
  void Drain();
  void Farewell();

  // engine_calls.cc
  void SendAll(const std::vector<Outgoing>& out);
  std::shared_ptr<OpenCall> TakeCall(int64_t id);
  void StartCall(const CallStart& start);
  void RefuseCall(const CallRefusal& refusal);
  void EndCalls(const Status& status);
  void CheckClosed(int64_t lane);

  // engine_stalls.cc
  void Watch();
  void WatchLanes();
  void WatchCalls();
  void WatchInquiries();
  bool LostByLeave(const LaneView& view, const LaneWatch& watch);
  void Ask(const LaneView& view, LaneWatch* watch, double waited_s);
  void HandleQuestion(int peer, const StallQuestion& question);
  void HandleProbe(const StallProbe& probe);
  void HandleReport(int peer, const StallReport& report);
  void HandleVerdict(const StallVerdict& verdict);
  void Answer(const Inquiry& inquiry);
  void PrintForLane(int64_t lane, int64_t run, double since_s, const std::string& who, const std::string& text);
  void FailByStall(const std::string& text);

  std::mutex turn_;         // whoever holds it moves the work; taken before `mutex`
  double now_s_ = 0;        // of this pass
  uint32_t looked_at_ = 0;  // the doorbell, before this pass
  double moved_s_ = 0, received_s_ = 0, watched_s_ = 0;
  std::deque<ControlMessage> to_self_;
  Status broken_;                                            // an error of this pass, for FailEverything
  bool whole_ = false;                                       // nothing had failed when it was stopped
  std::map<int, double> left_s_;                             // peers that have left, and when
  std::map<int64_t, std::shared_ptr<OpenCall>> open_calls_;  // announced, not started; by number
  int64_t next_call_ = 0;
  std::unique_ptr<Coordinator> coordinator_;  // rank 0
  std::map<int64_t, Closed> closed_;          // by lane
  std::map<int64_t, LaneWatch> watches_;      // by lane
  std::map<int64_t, Inquiry> inquiries_;      // rank 0, by number
  std::map<int64_t, Printed> printed_;        // by lane
  int64_t next_inquiry_ = 0;
};

}  // namespace hvd_ext

#include "engine/engines.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "engine/device_library.h"
#include "engine/registry.h"
#include "engine/transport.h"

namespace hvd_ext {
namespace {

struct Started {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Transport> transport;
  int64_t parent = 0;  // 0: it is the job's
};

// Never destroyed: at exit an engine's thread may still run, and Python may still call.
struct Process {
  std::mutex making;  // one set is made at a time; taken before `life`
  std::mutex life;    // one start or stop at a time
  Mutex mutex;
  std::map<int64_t, Started> engines HVD_EXT_GUARDED_BY(mutex);  // by generation
  int64_t job HVD_EXT_GUARDED_BY(mutex) = 0;                     // the generation of the job's engine; 0: none runs
  int64_t last HVD_EXT_GUARDED_BY(mutex) = 0;                    // the generation of the newest engine
  std::atomic<pid_t> started_by{0};                              // the process; read without a lock
};

Process& TheProcess() {
  static Process* process = new Process;
  return *process;
}

// A forked child has the parent's memory and none of its threads, and would write into what the parent shares with the
// other ranks. This is asked before a lock is taken, because the thread that held it may not exist in the child.
bool IsForked() {
  pid_t started_by = TheProcess().started_by;
  return started_by != 0 && started_by != getpid();
}

constexpr const char* kForked =
    "this process was forked from a rank and has no engine: only the rank itself can take part in its job";

Status NoneRuns() {
  return Stopped(IsForked() ? kForked : "hvd_ext is not running: no engine runs; call init() first");
}

// The caller holds `life`, and has checked that the engine may start.
Status Start(std::shared_ptr<Transport> transport, const Config& config, int64_t parent,
             std::shared_ptr<Engine>* engine) {
  Process& process = TheProcess();
  int64_t generation = 0;
  {
    MutexLock lock(&process.mutex);
    generation = process.last + 1;
  }
  HVD_EXT_RETURN_IF_ERROR(Engine::Start(transport, config, generation, engine));
  MutexLock lock(&process.mutex);
  process.last = generation;
  if (parent == 0) process.job = generation;
  process.started_by = getpid();
  process.engines[generation] = {*engine, std::move(transport), parent};
  return Status::Ok();
}

// Puts in front of a transport what the configuration wants between hosts and inside a host.
Status WithPaths(std::shared_ptr<Transport> base, const Config& config, std::shared_ptr<Transport>* transport) {
  TcpOptions tcp;
  tcp.use = config.tcp;
  // Connections that carry control messages are never the faster ones, and to measure them takes a slow link long.
  if (base->Watches() && tcp.use == TcpOptions::kMeasured) tcp.use = TcpOptions::kAlways;
  tcp.interfaces = config.interfaces;
  tcp.congestion = config.congestion;
  tcp.inside_too = config.tcp_inside_too;
  std::shared_ptr<Transport> between;
  HVD_EXT_RETURN_IF_ERROR(MakeTcpTransport(std::move(base), tcp, &between));
  std::shared_ptr<Arena> arena;
  int64_t capacity = Arena::DefaultCapacity();
  bool wanted = config.shared_memory && capacity > 0 && between->size() > 1;
  if (wanted) Arena::Make(capacity, &arena);  // without one `between` carries everything
  return MakeHostTransport(std::move(between), std::move(arena), config.device, transport);
}

// The entry of an engine that runs, or an empty one; 0: the job's.
Started Entry(int64_t generation) {
  Process& process = TheProcess();
  MutexLock lock(&process.mutex);
  auto found = process.engines.find(generation == 0 ? process.job : generation);
  return found == process.engines.end() ? Started() : found->second;
}

// Finds an engine by its generation, 0 being the job's. `gone` says what to answer where only others run.
template <typename Gone>
Status FindOr(int64_t generation, const Gone& gone, std::shared_ptr<Engine>* engine) {
  if (IsForked()) return NoneRuns();
  *engine = Entry(generation).engine;
  if (*engine != nullptr) return Status::Ok();
  return Entry(0).engine == nullptr ? NoneRuns() : gone();
}

Status OfHandle(const char* what, int64_t handle, std::shared_ptr<Engine>* engine) {
  const int64_t generation = handle >> 32;  // 0, which no engine has, would find the job's
  return FindOr(generation == 0 ? -1 : generation, [&] { return OfStopped(what, handle); }, engine);
}

}  // namespace

Status OfStopped(const std::string& what, int64_t handle) {
  return Stopped(what + " (" + std::to_string(handle) +
                 ") belongs to an engine that has been shut down, with the job or with its process set; " +
                 (what == "plan" ? "prepare" : "open") + " it again (a traced function must be traced again) after " +
                 "init()");
}

Status StartJob(Config config, const MakeBase& make, std::shared_ptr<Engine>* engine) {
  if (IsForked()) return Invalid(kForked);
  if (!config.gpu_library.empty()) {
    HVD_EXT_RETURN_IF_ERROR(LoadGpuDevice(config.gpu_library, static_cast<int>(config.gpu), &config.device));
  }
  Process& process = TheProcess();
  std::lock_guard<std::mutex> life(process.life);
  if (Entry(0).engine != nullptr) return Invalid("an engine runs already in this process; call shutdown() first");
  std::shared_ptr<Transport> transport;
  if (make != nullptr) {
    std::shared_ptr<Transport> world;
    HVD_EXT_RETURN_IF_ERROR(make(&world));
    HVD_EXT_RETURN_IF_ERROR(WithPaths(std::move(world), config, &transport));
  } else {
    transport = MakeThreadTransports(1)[0];
  }
  return Start(std::move(transport), config, 0, engine);
}

Status StartSet(int64_t parent, const std::vector<int>& ranks, int tag, Config config,
                std::shared_ptr<Engine>* engine) {
  if (IsForked()) return Invalid(kForked);
  Process& process = TheProcess();
  // `life` is not taken yet: where another rank does not come, this waits for ever, and the job must still be able to
  // stop.
  std::lock_guard<std::mutex> making(process.making);
  Started of = Entry(parent);
  if (of.engine == nullptr) return NoneRuns();
  bool ascend = std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<int>());
  bool inside = !ranks.empty() && ascend && ranks.front() >= 0 && ranks.back() < of.engine->size();
  if (!inside || !std::binary_search(ranks.begin(), ranks.end(), of.engine->rank())) {
    return Invalid("set of " + std::to_string(ranks.size()) + " ranks: they must be ascending, in [0, " +
                   std::to_string(of.engine->size()) + "), each once, and rank " + std::to_string(of.engine->rank()) +
                   ", which starts it, must be one of them");
  }
  config.device = of.engine->device();
  std::shared_ptr<Transport> transport;
  if (ranks.size() == 1) {
    transport = MakeThreadTransports(1)[0];
  } else {
    std::shared_ptr<Transport> subset;
    HVD_EXT_RETURN_IF_ERROR(of.transport->Subset(ranks, tag, &subset));
    HVD_EXT_RETURN_IF_ERROR(WithPaths(std::move(subset), config, &transport));
  }
  for (int rank : ranks) config.numbers.push_back(rank);
  std::lock_guard<std::mutex> life(process.life);
  if (Entry(parent).engine != of.engine) return NoneRuns();  // it has stopped meanwhile
  return Start(std::move(transport), config, of.engine->generation(), engine);
}

Status StopEngine(int64_t generation, bool together, bool* alone) {
  *alone = false;
  if (IsForked()) return Status::Ok();
  Process& process = TheProcess();
  std::lock_guard<std::mutex> life(process.life);
  std::set<int64_t> stops = {generation};  // and its sets, and theirs, which are younger: these first, at the same time
  {
    MutexLock lock(&process.mutex);
    for (const auto& [number, started] : process.engines) {
      if (stops.count(started.parent) == 0) continue;
      stops.insert(number);
      started.engine->StopSoon();
    }
  }
  for (auto at = stops.rbegin(); at != stops.rend(); ++at) {
    int64_t number = *at;
    Started stopped = Entry(number);
    if (stopped.engine == nullptr) continue;
    if (stopped.engine->Stop()) *alone = true;
    if (together && stopped.engine->quiet()) stopped.transport->Release();
    MutexLock lock(&process.mutex);
    process.engines.erase(number);
    if (number == process.job) process.job = 0;
  }
  return Status::Ok();
}

void AbortJob(int code) {
  if (IsForked()) return;
  std::shared_ptr<Transport> transport = Entry(0).transport;
  if (transport != nullptr) transport->Abort(code);
}

void FinishJob(bool failed, int code) {
  // A thread that still makes an engine, with ranks that do not come, would go on to call MPI.
  Process& process = TheProcess();
  std::unique_lock<std::mutex> making(process.making, std::try_to_lock);
  std::unique_lock<std::mutex> life(process.life, std::try_to_lock);
  FinishMpi(failed || !making.owns_lock() || !life.owns_lock(), code);
}

Status Engine::Find(int64_t generation, std::shared_ptr<Engine>* engine) {
  auto gone = [generation] {
    return Stopped("engine " + std::to_string(generation) +
                   " has been shut down (its process set was removed, or it is from before init()); a traced function "
                   "must be traced again");
  };
  return FindOr(generation, gone, engine);
}

Status Engine::OfPlan(int64_t plan, std::shared_ptr<Engine>* engine) { return OfHandle("plan", plan, engine); }

namespace {

// Never destroyed, as Process.
struct Successors {
  std::mutex making;             // one is made at a time
  std::atomic<bool> any{false};  // read without the lock, in each step
  Mutex mutex;
  std::map<int64_t, int64_t> by_stopped HVD_EXT_GUARDED_BY(mutex);
  std::function<void(int64_t)> call HVD_EXT_GUARDED_BY(mutex);
};

Successors& TheSuccessors() {
  static Successors* successors = new Successors;
  return *successors;
}

}  // namespace

void Engine::Succeed(int64_t stopped, int64_t channel) {
  Successors& successors = TheSuccessors();
  MutexLock lock(&successors.mutex);
  for (auto& [_, last] : successors.by_stopped) {
    if (last == stopped) last = channel;  // so each has its newest successor, which a step finds at once
  }
  successors.by_stopped[stopped] = channel;
  successors.any = true;
}

void Engine::OnStopped(std::function<void(int64_t)> call) {
  Successors& successors = TheSuccessors();
  MutexLock lock(&successors.mutex);
  successors.call = std::move(call);
  successors.any = true;
}

Status Engine::OfSuccessor(int64_t* channel, std::shared_ptr<Engine>* engine) {
  Successors& successors = TheSuccessors();
  if (successors.any) {
    MutexLock lock(&successors.mutex);
    auto newest = successors.by_stopped.find(*channel);
    if (newest != successors.by_stopped.end()) *channel = newest->second;
  }
  return OfChannel(*channel, engine);
}

Status Engine::OfStep(int64_t* channel, std::shared_ptr<Engine>* engine) {
  Status status = OfSuccessor(channel, engine);
  if (status.code != Code::kStopped || !WaitsAtStep(*channel)) return status;
  Successors& successors = TheSuccessors();
  std::lock_guard<std::mutex> making(successors.making);
  status = OfSuccessor(channel, engine);
  if (status.code != Code::kStopped) return status;
  std::function<void(int64_t)> call;
  {
    MutexLock lock(&successors.mutex);
    call = successors.call;
  }
  call(*channel);
  status = OfSuccessor(channel, engine);
  if (status.code != Code::kStopped) return status;
  std::shared_ptr<Engine> job = Entry(0).engine;  // it may have failed meanwhile, which says more
  const Status usable = job == nullptr ? Status::Ok() : job->Usable();
  return usable.ok() ? status : usable;
}

bool Engine::WaitsAtStep(int64_t channel) {
  std::shared_ptr<Engine> engine;
  if (OfSuccessor(&channel, &engine).ok()) return engine->HasCallBeforeStep(channel);
  Successors& successors = TheSuccessors();
  MutexLock lock(&successors.mutex);
  return successors.call != nullptr;
}

Status Engine::OfChannel(int64_t channel, std::shared_ptr<Engine>* engine) {
  return OfHandle("channel", channel, engine);
}

}  // namespace hvd_ext

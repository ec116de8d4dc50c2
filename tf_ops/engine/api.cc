#include "engine/api.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/transport.h"
#include "kernels/reduce.h"
#include "plan/ir.def"  // for HVD_EXT_PLAN_VERSION
#include "plan/plan.h"

namespace hvd_ext {
namespace {

// Never destroyed: at exit the engine's thread may still run, and Python may still call.
struct Process {
  std::mutex life;   // one start or stop at a time
  std::mutex mutex;  // guards what follows
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Transport> transport;
  int64_t generation = 0;
  pid_t started_by = 0;  // the process
};

Process& TheProcess() {
  static Process* process = new Process;
  return *process;
}

// A forked child has the parent's memory and none of its threads: it would write into what the parent shares with the
// other ranks.
bool IsForked() {
  const Process& process = TheProcess();
  return process.started_by != 0 && process.started_by != getpid();
}

std::string& Error() {
  thread_local std::string error;
  return error;
}

int Report(const Status& status) {
  Error() = status.message;
  return static_cast<int>(status.code);
}

constexpr const char* kForked =
    "this process was forked from a rank and has no engine: only the rank itself can take part in its job";

// The engine that runs, or null with *status set.
std::shared_ptr<Engine> Running(Status* status) {
  std::shared_ptr<Engine> engine = Engine::Current();
  if (engine == nullptr) *status = Stopped(IsForked() ? kForked : "no engine runs; call init() first");
  return engine;
}

Status Start(const HvdExtConfig* config, const std::function<Status(std::shared_ptr<Transport>*)>& make) {
  Process& process = TheProcess();
  std::lock_guard<std::mutex> life(process.life);
  if (IsForked()) return Invalid(kForked);
  if (Engine::Current() != nullptr) return Invalid("an engine runs already in this process; call shutdown() first");
  std::shared_ptr<Transport> transport;
  HVD_EXT_RETURN_IF_ERROR(make(&transport));
  Config native;
  native.stall_warn_s = config->stall_warn_s;
  native.stall_fatal_s = config->stall_fatal_s;
  if (config->window > 0) native.window = config->window;
  std::shared_ptr<Engine> engine;
  HVD_EXT_RETURN_IF_ERROR(Engine::Start(transport, native, process.generation + 1, &engine));
  std::lock_guard<std::mutex> lock(process.mutex);
  ++process.generation;
  process.started_by = getpid();
  process.engine = std::move(engine);
  process.transport = std::move(transport);
  return Status::Ok();
}

// MPI, with shared memory in front of it between the ranks of a host if it is wanted.
Status MakeTransport(bool shared_memory, std::shared_ptr<Transport>* transport) {
  std::shared_ptr<Transport> mpi;
  HVD_EXT_RETURN_IF_ERROR(MakeMpiTransport(&mpi));
  std::shared_ptr<Arena> arena;
  int64_t capacity = Arena::DefaultCapacity();
  if (shared_memory && capacity > 0 && mpi->size() > 1) Arena::Make(capacity, &arena);  // without one MPI does it all
  return MakeHostTransport(std::move(mpi), std::move(arena), transport);
}

struct ExchangeResult {
  std::string data;
  std::vector<int64_t> offsets;
};

// What a waiting caller and the engine's thread share.
struct Waiting {
  explicit Waiting(int64_t expected) : open(expected) {}

  std::mutex mutex;
  std::condition_variable wake;
  int64_t open;   // ends that have not come
  Status status;  // the first failure
  std::vector<std::string> payloads;
  std::atomic<bool> ended{false};

  void End(const Status& s) {
    std::lock_guard<std::mutex> lock(mutex);
    if (status.ok()) status = s;
    if (--open > 0) return;
    ended = true;
    wake.notify_one();
  }

  Status Wait(Engine::Helper* helper) {
    helper->Until(ended);
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait(lock, [&] { return open == 0; });
    return status;
  }
};

}  // namespace

std::shared_ptr<Engine> Engine::Current() {
  if (IsForked()) return nullptr;
  Process& process = TheProcess();
  std::lock_guard<std::mutex> lock(process.mutex);
  return process.engine;
}

}  // namespace hvd_ext

using namespace hvd_ext;  // NOLINT: the functions below are C

extern "C" {

int64_t hvd_ext_abi_version(void) { return HVD_EXT_ABI_VERSION; }

int64_t hvd_ext_plan_version(void) { return HVD_EXT_PLAN_VERSION; }

const char* hvd_ext_error(void) { return Error().c_str(); }

int hvd_ext_start_mpi(const HvdExtConfig* config, int32_t* rank, int32_t* size) {
  Status status = Start(config, [config](std::shared_ptr<Transport>* transport) {
    return MakeTransport(config->shared_memory != 0, transport);
  });
  std::shared_ptr<Engine> engine = status.ok() ? Running(&status) : nullptr;
  if (engine != nullptr) {
    *rank = engine->rank();
    *size = engine->size();
  }
  return Report(status);
}

int hvd_ext_start_local(const HvdExtConfig* config) {
  return Report(Start(config, [](std::shared_ptr<Transport>* transport) {
    *transport = MakeThreadTransports(1)[0];
    return Status::Ok();
  }));
}

int hvd_ext_stop(int32_t* alone) {
  Process& process = TheProcess();
  std::lock_guard<std::mutex> life(process.life);
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  *alone = 0;
  if (engine == nullptr) return Report(Status::Ok());
  *alone = engine->Stop() ? 1 : 0;
  std::lock_guard<std::mutex> lock(process.mutex);
  process.engine.reset();
  process.transport.reset();
  return Report(Status::Ok());
}

int hvd_ext_generation(int64_t* generation) {
  Process& process = TheProcess();
  std::lock_guard<std::mutex> lock(process.mutex);
  *generation = process.generation;
  return Report(process.engine != nullptr ? Status::Ok() : Stopped("no engine runs; call init() first"));
}

void hvd_ext_finish_mpi(int32_t failed, int32_t code) { FinishMpi(failed != 0, code); }

void hvd_ext_abort(int32_t code) {
  std::shared_ptr<Transport> transport;
  {
    Process& process = TheProcess();
    std::lock_guard<std::mutex> lock(process.mutex);
    transport = process.transport;
  }
  if (transport != nullptr) transport->Abort(code);
}

int hvd_ext_plan_add(const int64_t* rows, int64_t n_rows, int64_t units, int64_t* plan) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  return Report(engine != nullptr ? engine->AddPlan(rows, n_rows, units, plan) : status);
}

int hvd_ext_plan_remove(int64_t plan) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  return Report(engine != nullptr ? engine->RemovePlan(plan) : status);
}

int hvd_ext_channel_open(const char* name, int64_t n_tensors, const char* const* tensor_names, const int64_t* elements,
                         int64_t n_buckets, const int64_t* bucket_sizes, const int64_t* bucket_tensors,
                         const int32_t* dtypes, const int32_t* wires, const int32_t* ops, const int64_t* plans,
                         const int64_t* segment_nbytes, int64_t* channel) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  if (engine == nullptr) return Report(status);
  ChannelSpec spec;
  spec.name = name;
  spec.tensor_names.assign(tensor_names, tensor_names + n_tensors);
  spec.elements.assign(elements, elements + n_tensors);
  for (int64_t i = 0; i < n_buckets; ++i) {
    spec.buckets.push_back({static_cast<DType>(dtypes[i]), static_cast<ReduceOp>(ops[i]), plans[i], segment_nbytes[i],
                            std::vector<int64_t>(bucket_tensors, bucket_tensors + bucket_sizes[i])});
    if (wires[i] >= 0) spec.buckets.back().wire = static_cast<DType>(wires[i]);
    bucket_tensors += bucket_sizes[i];
  }
  return Report(engine->OpenChannel(std::move(spec), channel));
}

int hvd_ext_channel_close(int64_t channel) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  return Report(engine != nullptr ? engine->CloseChannel(channel) : status);
}

int hvd_ext_channel_begin_step(int64_t channel) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  return Report(engine != nullptr ? engine->BeginStep(channel) : status);
}

int hvd_ext_channel_reduce(int64_t channel, int64_t n_tensors, const void* const* inputs, void* const* outputs,
                           const int64_t* nbytes) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  if (engine == nullptr) return Report(status);
  Engine::Helper helper(engine.get());
  status = engine->BeginStep(channel);
  int64_t ticket = 0;
  for (int64_t i = 0; i < n_tensors && status.ok(); ++i) {
    status = engine->Submit(channel, i, inputs[i], nbytes[i], &ticket);
  }
  if (!status.ok()) return Report(status);
  auto waiting = std::make_shared<Waiting>(n_tensors);
  for (int64_t i = 0; i < n_tensors; ++i) {
    engine->Collect(channel, i, ticket, [=](const Status& s, const void* data) {
      if (s.ok()) std::memcpy(outputs[i], data, static_cast<size_t>(nbytes[i]));
      waiting->End(s);
    });
  }
  return Report(n_tensors > 0 ? waiting->Wait(&helper) : Status::Ok());
}

int hvd_ext_refuse(const char* name, const char* why) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  if (engine != nullptr) engine->Refuse(name, why);
  return Report(status);
}

int hvd_ext_exchange(const char* name, const void* payload, int64_t nbytes, void** result, const char** data,
                     const int64_t** offsets) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  if (engine == nullptr) return Report(status);
  auto waiting = std::make_shared<Waiting>(1);
  Engine::Helper helper(engine.get());
  engine->Exchange(name, std::string(static_cast<const char*>(payload), static_cast<size_t>(nbytes)),
                   [waiting](const Status& s, const std::vector<std::string>& payloads) {
                     waiting->payloads = payloads;
                     waiting->End(s);
                   });
  status = waiting->Wait(&helper);
  if (!status.ok()) return Report(status);
  auto* exchanged = new ExchangeResult;
  exchanged->offsets.push_back(0);
  for (const std::string& part : waiting->payloads) {
    exchanged->data += part;
    exchanged->offsets.push_back(static_cast<int64_t>(exchanged->data.size()));
  }
  *result = exchanged;
  *data = exchanged->data.data();
  *offsets = exchanged->offsets.data();
  return Report(Status::Ok());
}

void hvd_ext_exchange_free(void* result) { delete static_cast<ExchangeResult*>(result); }

int hvd_ext_statistics(int64_t values[5]) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  if (engine == nullptr) return Report(status);
  Statistics statistics = engine->GetStatistics();
  values[0] = statistics.buckets;
  values[1] = statistics.calls;
  values[2] = statistics.segments;
  values[3] = statistics.bytes_sent;
  values[4] = statistics.bytes_received;
  return Report(Status::Ok());
}

int hvd_ext_trace_start(int64_t capacity) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  return Report(engine != nullptr ? engine->StartTrace(capacity) : status);
}

int hvd_ext_trace_stop(void) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  if (engine != nullptr) engine->StopTrace();
  return Report(status);
}

int hvd_ext_trace_read(void* records, int64_t most, int64_t* count, int64_t* dropped) {
  Status status;
  std::shared_ptr<Engine> engine = Running(&status);
  if (engine == nullptr) return Report(status);
  *count = engine->trace().Read(static_cast<TraceRecord*>(records), most, dropped);
  return Report(Status::Ok());
}

int hvd_ext_test_add(int32_t dtype, void* accumulator, const void* x, int64_t elements) {
  DType type = static_cast<DType>(dtype);
  if (SizeOf(type) == 0 || type == DType::kBytes)
    return Report(Invalid("dtype (" + std::to_string(dtype) + ") cannot be summed"));
  Add(type, accumulator, x, elements);
  return Report(Status::Ok());
}

int hvd_ext_test_divide(int32_t dtype, void* data, int64_t divisor, int64_t elements) {
  DType type = static_cast<DType>(dtype);
  if (SizeOf(type) == 0 || type == DType::kBytes)
    return Report(Invalid("dtype (" + std::to_string(dtype) + ") cannot be divided"));
  if (divisor == 0) return Report(Invalid("divisor (0) must not be zero"));
  Divide(type, data, divisor, elements);
  return Report(Status::Ok());
}

int hvd_ext_test_decode(const int64_t* rows, int64_t n_rows, int64_t units, int32_t rank, int32_t size) {
  Plan plan;
  return Report(Decode(rows, n_rows, units, rank, size, &plan));
}

}  // extern "C"

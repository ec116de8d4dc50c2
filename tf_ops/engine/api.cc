#include "engine/api.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/engines.h"
#include "engine/interrupt.h"
#include "kernels/read_pass.h"
#include "kernels/reduce.h"
#include "plan/ir.def"  // for HVD_EXT_PLAN_VERSION
#include "plan/plan.h"

namespace hvd_ext {
namespace {

std::string& Error() {
  thread_local std::string error;
  return error;
}

constexpr int64_t kJob = 0;  // for Engine::Find

int Report(const Status& status) {
  Error() = status.message;
  return static_cast<int>(status.code);
}

// Of the structs of the C ABI it makes those that the engine keeps (spec.def). The functions use each other in any
// order, hence the class.
struct Reader {
  template <typename From, typename To>
  static void Read(const From& from, int64_t, To* to) {
    *to = static_cast<To>(from);
  }
  static void Read(const char* from, int64_t, std::string* to) {
    if (from != nullptr) *to = from;
  }
  static void Read(int32_t dtype, int64_t, std::optional<DType>* to) {
    if (dtype >= 0) *to = static_cast<DType>(dtype);
  }
  template <typename From, typename To>
  static void Read(const From* from, int64_t ranks, std::optional<To>* to) {
    if (from != nullptr) Read(*from, ranks, &to->emplace());
  }
  template <typename From, typename To>
  static void ReadList(const From* from, int64_t count, int64_t ranks, std::vector<To>* to) {
    to->resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) Read(from[i], ranks, &(*to)[static_cast<size_t>(i)]);
  }

  // clang-format off
#define HVD_EXT_STRUCT(name, kept) static void Read(const name& from, [[maybe_unused]] int64_t ranks, kept* to) {
#define HVD_EXT_FIELD(type, name) to->name = from.name;
#define HVD_EXT_TYPED(type, name, kept, unset) Read(from.name, ranks, &to->name);
#define HVD_EXT_COUNT(type, name) const int64_t name = from.name;
#define HVD_EXT_LIST(type, name, element, count) ReadList(from.name, count, ranks, &to->name);
#define HVD_EXT_END(name, kept) }
#include "engine/spec.def"
  // clang-format on
};

Config ConfigOf(const HvdExtConfig& config) {
  Config native;
  Reader::Read(config, 0, static_cast<JobSpec*>(&native));
  if (native.window <= 0) native.window = JobSpec().window;
  return native;
}

ChannelSpec SpecOf(const HvdExtChannel& channel, int ranks) {
  ChannelSpec spec;
  Reader::Read(channel, ranks, &spec);
  return spec;
}

// Reports what `work` gives on an engine, which `find` finds by the handle.
template <typename Work>
int On(Status (*find)(int64_t, std::shared_ptr<Engine>*), int64_t handle, const Work& work) {
  std::shared_ptr<Engine> found;
  Status status = find(handle, &found);
  return Report(status.ok() ? work(found.get()) : status);
}

template <typename Work>
int OnEngine(int64_t engine, const Work& work) {
  return On(Engine::Find, engine, work);
}

template <typename Work>
int OnChannel(int64_t channel, const Work& work) {
  return On(Engine::OfChannel, channel, work);
}

// Gives a started engine to the caller, who may not ask for its rank.
int ReportStart(const Status& status, const std::shared_ptr<Engine>& started, int64_t* engine, int32_t* rank) {
  if (!status.ok()) return Report(status);
  *engine = started->generation();
  if (rank != nullptr) *rank = started->rank();
  return Report(status);
}

struct ExchangeResult {
  std::string data;
  std::vector<int64_t> offsets;
};

// Gives a caller of the C ABI the payloads of all ranks.
void Give(const std::vector<std::string>& payloads, void** result, const char** data, const int64_t** offsets) {
  auto* exchanged = new ExchangeResult;
  exchanged->offsets.push_back(0);
  for (const std::string& part : payloads) {
    exchanged->data += part;
    exchanged->offsets.push_back(static_cast<int64_t>(exchanged->data.size()));
  }
  *result = exchanged;
  *data = exchanged->data.data();
  *offsets = exchanged->offsets.data();
}

// What a waiting caller and the engine's thread share.
struct Waiting {
  explicit Waiting(int64_t expected) : open(expected) {}

  std::mutex mutex;
  std::condition_variable wake;
  int64_t open;   // ends that have not come
  Status status;  // the first failure
  std::vector<std::string> payloads;
  std::atomic<bool> ended{false};

  bool interrupted = false;  // the caller has gone, and what it gave to receive results with it

  // `receive` runs with the lock, so that the caller does not go meanwhile.
  template <typename Receive>
  void End(const Status& s, const Receive& receive) {
    std::lock_guard<std::mutex> lock(mutex);
    if (s.ok() && !interrupted) receive();
    if (status.ok()) status = s;
    if (--open > 0) return;
    ended = true;
    wake.notify_one();
  }

  void End(const Status& s) {
    End(s, [] {});
  }

  Status Wait(Engine::CallerProgress* progress) {
    if (progress != nullptr) progress->Until(ended);
    const auto ended_all = [this] { return open == 0; };
    std::unique_lock<std::mutex> lock(mutex);
    while (!wake.wait_for(lock, std::chrono::duration<double>(kLookForSignals_s), ended_all)) {
      lock.unlock();
      const bool raises = Interrupts::HandlerRaises();
      lock.lock();
      if (!raises || ended_all()) continue;
      interrupted = true;
      return Stopped(Interrupted("hvd_ext"));
    }
    return status;
  }
};

// Waits for the results of a step, and takes each with receive(i, data), a Status. `progress` may be null.
template <typename Receive>
Status CollectAll(Engine* engine, int64_t channel, int64_t ticket, int64_t n_tensors, Engine::CallerProgress* progress,
                  const Receive& receive) {
  if (n_tensors == 0) return Status::Ok();
  auto waiting = std::make_shared<Waiting>(n_tensors);
  for (int64_t i = 0; i < n_tensors; ++i) {
    engine->Collect(channel, i, ticket, [=](const Status& s, const void* data, const Memory&) {
      waiting->End(s, [&] {
        const Status received = receive(i, data);
        if (waiting->status.ok()) waiting->status = received;
      });
    });
  }
  return waiting->Wait(progress);
}

// Does a step: submit(i, &ticket, &progress) gives tensor i, and receive(i, data) takes its result.
template <typename Submit, typename Receive>
Status ReduceAll(Engine* engine, int64_t channel, int64_t n_tensors, const Submit& submit, const Receive& receive) {
  bool begun = false;  // by hvd_ext_channel_begin_topk_step
  HVD_EXT_RETURN_IF_ERROR(engine->HasDensity(channel, &begun));
  if (!begun) HVD_EXT_RETURN_IF_ERROR(engine->BeginStep(channel));
  Engine::CallerProgress progress(engine);  // not before: what is called before a step may wait for the engine
  int64_t ticket = 0;
  for (int64_t i = 0; i < n_tensors; ++i) HVD_EXT_RETURN_IF_ERROR(submit(i, &ticket, &progress));
  return CollectAll(engine, channel, ticket, n_tensors, &progress, receive);
}

// Takes results to outputs[i], nbytes[i] long.
auto CopyTo(void* const* outputs, const int64_t* nbytes) {
  return [=](int64_t i, const void* data) {
    std::memcpy(outputs[i], data, static_cast<size_t>(nbytes[i]));
    return Status::Ok();
  };
}

// Does what a device may fail to do.
template <typename Work>
Status OnDevice(const Work& work) {
  try {
    work();
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Internal("the device has no memory left");
  } catch (const std::exception& error) {
    return Internal(error.what());
  }
}

Status AwaitInputs(Engine* engine) {
  return OnDevice([engine] {
    Queue* inputs = engine->device()->inputs();
    for (const int64_t last = inputs->Last(); !inputs->Done(last);) std::this_thread::yield();
  });
}

Status CheckNumbers(int32_t dtype, const char* used) {
  const DType type = static_cast<DType>(dtype);
  if (SizeOf(type) > 0 && type != DType::kBytes) return Status::Ok();
  return Invalid("dtype (" + std::to_string(dtype) + ") cannot be " + used);
}

}  // namespace
}  // namespace hvd_ext

using namespace hvd_ext;  // NOLINT: the functions below are C

extern "C" {

int64_t hvd_ext_abi_version(void) { return HVD_EXT_ABI_VERSION; }

const char* hvd_ext_between(int64_t engine) {
  std::shared_ptr<Engine> found;
  return Engine::Find(engine, &found).ok() ? found->between() : "";
}

int hvd_ext_media(int64_t engine, int64_t size, int32_t* media) {
  return OnEngine(engine, [&](Engine* found) {
    if (size != found->size()) return Invalid("media: there must be room for one of each rank");
    for (int64_t rank = 0; rank < size; ++rank) {
      media[rank] = static_cast<int32_t>(found->MediumTo(static_cast<int>(rank)));
    }
    return Status::Ok();
  });
}

int64_t hvd_ext_plan_version(void) { return HVD_EXT_PLAN_VERSION; }

const char* hvd_ext_error(void) { return Error().c_str(); }

int hvd_ext_start_mpi(const HvdExtConfig* config, int64_t* engine, int32_t* rank, int32_t* size) {
  std::shared_ptr<Engine> started;
  Status status = StartJob(ConfigOf(*config), MakeMpiTransport, &started);
  if (status.ok()) *size = started->size();
  return ReportStart(status, started, engine, rank);
}

int hvd_ext_start_local(const HvdExtConfig* config, int64_t* engine) {
  std::shared_ptr<Engine> started;
  Status status = StartJob(ConfigOf(*config), nullptr, &started);
  return ReportStart(status, started, engine, nullptr);
}

int hvd_ext_start_mesh(const HvdExtConfig* config, int32_t rank, const int32_t* sockets, int64_t size,
                       int64_t* engine) {
  std::shared_ptr<Transport> mesh;  // it has the sockets, whatever follows
  std::shared_ptr<Engine> started;
  Status status = MakeMeshTransport(rank, std::vector<int>(sockets, sockets + size), &mesh);
  auto give = [&mesh](std::shared_ptr<Transport>* transport) {
    *transport = mesh;
    return Status::Ok();
  };
  if (status.ok()) status = StartJob(ConfigOf(*config), give, &started);
  return ReportStart(status, started, engine, nullptr);
}

int hvd_ext_start_set(int64_t parent, const int32_t* ranks, int64_t n_ranks, int32_t number, const HvdExtConfig* config,
                      int64_t* engine, int32_t* rank) {
  std::shared_ptr<Engine> started;
  Status status = StartSet(parent, std::vector<int>(ranks, ranks + n_ranks), number, ConfigOf(*config), &started);
  return ReportStart(status, started, engine, rank);
}

int hvd_ext_stop(int64_t engine, int32_t together, int32_t* alone) {
  bool went_alone = false;
  Status status = StopEngine(engine, together != 0, &went_alone);
  *alone = went_alone ? 1 : 0;
  return Report(status);
}

void hvd_ext_finish_mpi(int32_t failed, int32_t code) { FinishJob(failed != 0, code); }

void hvd_ext_abort(int32_t code) { AbortJob(code); }

int hvd_ext_plan_add(int64_t engine, const int64_t* rows, int64_t n_rows, int64_t units, int64_t* plan) {
  return OnEngine(engine, [&](Engine* found) { return found->AddPlan(rows, n_rows, units, plan); });
}

int hvd_ext_plan_remove(int64_t plan) {
  return On(Engine::OfPlan, plan, [&](Engine* engine) { return engine->RemovePlan(plan); });
}

int hvd_ext_channel_open(int64_t engine, const HvdExtChannel* spec, int64_t* channel) {
  return OnEngine(engine, [&](Engine* found) { return found->OpenChannel(SpecOf(*spec, found->size()), channel); });
}

int hvd_ext_channel_switch(int64_t channel, const HvdExtChannel* spec) {
  return OnChannel(channel,
                   [&](Engine* engine) { return engine->SwitchLayout(channel, SpecOf(*spec, engine->size())); });
}

int hvd_ext_channel_at_step(int64_t channel, int64_t step, void (*call)(int64_t channel, int64_t step)) {
  return OnChannel(channel, [&](Engine* engine) {
    return engine->AtStep(channel, step, [=](int64_t begun) { call(channel, begun); });
  });
}

void hvd_ext_channel_succeed(int64_t stopped, int64_t channel) { Engine::Succeed(stopped, channel); }

void hvd_ext_on_stopped(void (*call)(int64_t channel)) { Engine::OnStopped(call); }

int hvd_ext_channel_times(int64_t channel, int64_t most, int64_t n_tensors, int64_t* steps, double* begins_s,
                          double* ends_s, double* arrival_offset_s, int64_t* count) {
  return OnChannel(channel, [&](Engine* engine) {
    std::vector<StepTimes> times;
    HVD_EXT_RETURN_IF_ERROR(engine->GetTimes(channel, most, &times));
    *count = static_cast<int64_t>(times.size());
    for (const StepTimes& of_step : times) {
      *steps++ = of_step.step;
      *begins_s++ = of_step.begin_s;
      *ends_s++ = of_step.end_s;
      if (arrival_offset_s == nullptr) continue;
      if (static_cast<int64_t>(of_step.arrival_offset_s.size()) != n_tensors) {
        return Invalid("times of a channel: it has " + std::to_string(of_step.arrival_offset_s.size()) +
                       " tensors, not " + std::to_string(n_tensors));
      }
      arrival_offset_s = std::copy(of_step.arrival_offset_s.begin(), of_step.arrival_offset_s.end(), arrival_offset_s);
    }
    return Status::Ok();
  });
}

int hvd_ext_channel_close(int64_t channel) {
  return OnChannel(channel, [&](Engine* engine) { return engine->CloseChannel(channel); });
}

int hvd_ext_channel_begin_step(int64_t channel) {
  return OnChannel(channel, [&](Engine* engine) { return engine->BeginStep(channel); });
}

int hvd_ext_channel_reduce(int64_t channel, int64_t n_tensors, const void* const* inputs, void* const* outputs,
                           const int64_t* nbytes) {
  return OnChannel(channel, [&](Engine* engine) {
    return ReduceAll(
        engine, channel, n_tensors,
        [=](int64_t i, int64_t* ticket, Engine::CallerProgress* progress) {
          return engine->Submit(channel, i, inputs[i], nbytes[i], ticket, progress);
        },
        CopyTo(outputs, nbytes));
  });
}

int hvd_ext_channel_reduce_on_device(int64_t channel, int64_t n_tensors, const void* const* inputs,
                                     void* const* outputs, const int64_t* nbytes) {
  return OnChannel(channel, [&](Engine* engine) {
    Queue* queue = engine->device()->inputs();
    HVD_EXT_RETURN_IF_ERROR(ReduceAll(
        engine, channel, n_tensors,
        [=](int64_t i, int64_t* ticket, Engine::CallerProgress*) {
          return engine->SubmitOnDevice(channel, i, inputs[i], nbytes[i], nullptr, ticket);
        },
        [=](int64_t i, const void* data) { return OnDevice([&] { queue->Copy(outputs[i], data, nbytes[i]); }); }));
    return AwaitInputs(engine);
  });
}

int hvd_ext_device_allocate(int64_t engine, int64_t nbytes, void** data) {
  return OnEngine(engine, [&](Engine* found) {
    HVD_EXT_RETURN_IF_ERROR(OnDevice([&] {
      *data = found->device()->Allocate(nbytes);
      found->device()->inputs()->Clear(*data, nbytes);
    }));
    return AwaitInputs(found);
  });
}

int hvd_ext_device_free(int64_t engine, void* data) {
  return OnEngine(engine,
                  [&](Engine* found) { return OnDevice([&] { found->device()->Free(static_cast<char*>(data)); }); });
}

int hvd_ext_channel_submit(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, int64_t* ticket) {
  return OnChannel(channel, [&](Engine* engine) { return engine->Submit(channel, tensor, data, nbytes, ticket); });
}

int hvd_ext_channel_collect(int64_t channel, int64_t ticket, int64_t n_tensors, void* const* outputs,
                            const int64_t* nbytes) {
  return OnChannel(channel, [&](Engine* engine) {
    return CollectAll(engine, channel, ticket, n_tensors, nullptr, CopyTo(outputs, nbytes));
  });
}

int hvd_ext_channel_begin_topk_step(int64_t channel, double density, float momentum) {
  return OnChannel(channel, [&](Engine* engine) {
    return momentum == -1 ? engine->BeginTopKStep(channel, density) : engine->BeginTopKStep(channel, density, momentum);
  });
}

int hvd_ext_channel_end_step(int64_t channel, int32_t commit) {
  return OnChannel(channel, [&](Engine* engine) { return engine->EndStep(channel, commit != 0); });
}

int hvd_ext_channel_state(int64_t channel, int64_t bucket, int64_t values[4]) {
  return OnChannel(channel, [&](Engine* engine) {
    FeedbackShard shard;
    HVD_EXT_RETURN_IF_ERROR(engine->GetFeedback(channel, bucket, &shard));
    const int64_t found[4] = {shard.begin, shard.elements, shard.has_velocity ? 1 : 0, 0};
    std::copy_n(found, 4, values);
    return Status::Ok();
  });
}

int hvd_ext_channel_state_read(int64_t channel, int64_t bucket, int32_t which, float* to) {
  return OnChannel(channel, [&](Engine* engine) {
    return engine->ReadFeedback(channel, bucket, static_cast<FeedbackArray>(which), to);
  });
}

int hvd_ext_channel_state_write(int64_t channel, int64_t bucket, int32_t which, const float* from) {
  return OnChannel(channel, [&](Engine* engine) {
    return engine->WriteFeedback(channel, bucket, static_cast<FeedbackArray>(which), from);
  });
}

int hvd_ext_channel_topk_statistics(int64_t channel, int64_t values[6]) {
  return OnChannel(channel, [&](Engine* engine) {
    TopKStatistics statistics;
    HVD_EXT_RETURN_IF_ERROR(engine->GetTopKStatistics(channel, &statistics));
    const int64_t counted[6] = {statistics.entries,     statistics.value_nbytes, statistics.index_nbytes,
                                statistics.head_nbytes, statistics.committed,    statistics.dropped};
    std::copy_n(counted, 6, values);
    return Status::Ok();
  });
}

int hvd_ext_channel_give_result(int64_t channel, int64_t tensor, const void* data, int64_t nbytes) {
  return OnChannel(channel, [&](Engine* engine) { return engine->GiveResult(channel, tensor, data, nbytes); });
}

int hvd_ext_channel_skip_step(int64_t channel, int64_t* ticket) {
  return OnChannel(channel, [&](Engine* engine) { return engine->SkipStep(channel, ticket); });
}

int hvd_ext_channel_flush(int64_t channel, int64_t ahead) {
  return OnChannel(channel, [&](Engine* engine) { return engine->Flush(channel, ahead); });
}

int hvd_ext_channel_leave(int64_t channel) {
  return OnChannel(channel, [&](Engine* engine) { return engine->Leave(channel); });
}

int hvd_ext_channel_next_round(int64_t channel, int32_t* more) {
  return OnChannel(channel, [&](Engine* engine) {
    auto waiting = std::make_shared<Waiting>(1);
    auto found_more = std::make_shared<bool>(false);
    engine->AwaitRound(channel, [=](const Status& s, bool answer) {
      *found_more = answer;
      waiting->End(s);
    });
    Status status = waiting->Wait(nullptr);
    *more = *found_more ? 1 : 0;
    return status;
  });
}

int hvd_ext_channel_progress(int64_t channel, int64_t* step, int64_t* over) {
  return OnChannel(channel, [&](Engine* engine) { return engine->Progress(channel, step, over); });
}

int hvd_ext_channel_set_quorum(int64_t channel, int64_t quorum) {
  return OnChannel(channel, [&](Engine* engine) { return engine->SetQuorum(channel, quorum); });
}

int hvd_ext_channel_set_flags(int64_t channel, int64_t flags) {
  return OnChannel(channel, [&](Engine* engine) { return engine->SetFlags(channel, flags); });
}

int hvd_ext_channel_rounds(int64_t channel, int64_t first, int64_t most, int64_t size, int64_t* numbers,
                           double* begins_s, double* finished_s, double* waited_s, int64_t* arrived, int64_t* flags,
                           double* announced_s, int64_t* count) {
  return OnChannel(channel, [&](Engine* engine) {
    if (size != engine->size()) {
      return Invalid("rounds of a channel: it has " + std::to_string(engine->size()) + " ranks, not " +
                     std::to_string(size));
    }
    std::vector<RoundInfo> rounds;
    Status status = engine->GetRounds(channel, first, most, &rounds);
    *count = 0;
    for (const RoundInfo& round : rounds) {
      numbers[*count] = round.round;
      begins_s[*count] = round.begin_s;
      finished_s[*count] = round.over_s;
      waited_s[*count] = round.waited_s;
      std::copy(round.arrived.begin(), round.arrived.end(), arrived + *count * size);
      std::copy(round.flags.begin(), round.flags.end(), flags + *count * size);
      std::fill_n(announced_s + *count * size, size, 0.0);
      std::copy(round.announced_s.begin(), round.announced_s.end(), announced_s + *count * size);
      ++*count;
    }
    return status;
  });
}

int hvd_ext_channel_held_read(int64_t channel, int64_t tensor, void* to, int32_t* held) {
  return OnChannel(channel, [&](Engine* engine) {
    bool any = false;
    Status status = engine->ReadHeld(channel, tensor, to, &any);
    *held = any ? 1 : 0;
    return status;
  });
}

int hvd_ext_channel_held_write(int64_t channel, int64_t tensor, const void* from) {
  return OnChannel(channel, [&](Engine* engine) { return engine->WriteHeld(channel, tensor, from); });
}

int hvd_ext_refuse(int64_t engine, const char* name, const char* why) {
  return OnEngine(engine, [&](Engine* found) {
    found->Refuse(name, why);
    return Status::Ok();
  });
}

void hvd_ext_interrupt(void) { Interrupts::EndAll(); }

int32_t hvd_ext_raise_after_error(void) { return Interrupts::RaiseAfterError() ? 1 : 0; }

int hvd_ext_exchange(int64_t engine, const char* name, const void* payload, int64_t nbytes, int32_t agrees,
                     void** result, const char** data, const int64_t** offsets) {
  return OnEngine(engine, [&](Engine* found) {
    auto waiting = std::make_shared<Waiting>(1);
    Engine::CallerProgress progress(found);
    found->Exchange(
        name, std::string(static_cast<const char*>(payload), static_cast<size_t>(nbytes)),
        [waiting](const Status& s, const std::vector<std::string>& payloads) {
          waiting->End(s, [&] { waiting->payloads = payloads; });
        },
        agrees != 0);
    HVD_EXT_RETURN_IF_ERROR(waiting->Wait(&progress));
    Give(waiting->payloads, result, data, offsets);
    return Status::Ok();
  });
}

int hvd_ext_join(int64_t engine, int64_t n_plans, const int64_t* plans, const int64_t* digests, const void* payload,
                 int64_t nbytes, int32_t* last, void** result, const char** data, const int64_t** offsets) {
  return OnEngine(engine, [&](Engine* found) {
    std::vector<KnownPlan> known;
    for (int64_t i = 0; i < n_plans; ++i) known.push_back({digests[i], plans[i]});
    auto waiting = std::make_shared<Waiting>(1);
    found->Join(known, std::string(static_cast<const char*>(payload), static_cast<size_t>(nbytes)),
                [=](const Status& s, int rank, const std::vector<std::string>& payloads) {
                  waiting->End(s, [&] {
                    waiting->payloads = payloads;
                    *last = rank;
                  });
                });
    HVD_EXT_RETURN_IF_ERROR(waiting->Wait(nullptr));  // it may take long: the engine's thread makes the progress
    Give(waiting->payloads, result, data, offsets);
    return Status::Ok();
  });
}

void hvd_ext_exchange_free(void* result) { delete static_cast<ExchangeResult*>(result); }

int hvd_ext_statistics(int64_t engine, int64_t values[5]) {
  return OnEngine(engine, [&](Engine* found) {
    const Statistics statistics = found->GetStatistics();
    const int64_t counted[5] = {statistics.buckets, statistics.calls, statistics.segments, statistics.bytes_sent,
                                statistics.bytes_received};
    std::copy_n(counted, 5, values);
    return Status::Ok();
  });
}

int hvd_ext_trace_start(int64_t capacity) {
  return OnEngine(kJob, [&](Engine* engine) { return engine->StartTrace(capacity); });
}

int hvd_ext_trace_stop(void) {
  return OnEngine(kJob, [](Engine* engine) {
    engine->StopTrace();
    return Status::Ok();
  });
}

int hvd_ext_trace_read(void* records, int64_t most, int64_t* count, int64_t* dropped) {
  return OnEngine(kJob, [&](Engine* engine) {
    *count = engine->trace().Read(static_cast<TraceRecord*>(records), most, dropped);
    return Status::Ok();
  });
}

int hvd_ext_test_add(int32_t dtype, void* accumulator, const void* x, int64_t elements) {
  Status status = CheckNumbers(dtype, "summed");
  if (status.ok()) Add(static_cast<DType>(dtype), accumulator, x, elements);
  return Report(status);
}

int hvd_ext_test_divide(int32_t dtype, void* data, int64_t divisor, int64_t elements) {
  Status status = CheckNumbers(dtype, "divided");
  if (status.ok() && divisor == 0) status = Invalid("divisor (0) must not be zero");
  if (status.ok()) Divide(static_cast<DType>(dtype), data, divisor, elements);
  return Report(status);
}

int hvd_ext_test_decode(const int64_t* rows, int64_t n_rows, int64_t units, int32_t rank, int32_t size) {
  Plan plan;
  return Report(Decode(rows, n_rows, units, rank, size, &plan));
}

int hvd_ext_test_read_pass(const float* x, int64_t elements, int32_t threads, double* sum) {
  *sum = ReadPass(x, elements, threads);
  return Report(Status::Ok());
}

int hvd_ext_test_algorithm_1(const float* x, int64_t elements, int64_t k, int32_t samplings, uint64_t seed,
                             float* magnitudes, int32_t* indices, float* values, int64_t* picked) {
  *picked = Algorithm1(x, elements, k, samplings, seed, magnitudes, indices, values);
  return Report(Status::Ok());
}

}  // extern "C"

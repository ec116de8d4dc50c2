// The C ABI: the only door for Python (hvd_ext/engine/native.py, ctypes). Every function returns a Code (status.h) as
// int; on failure hvd_ext_error() gives the words, per calling thread. A process runs the engine of its job, and one
// for each process set that it is in. An `engine` is the number that its start has given; plans and channels know
// theirs.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HVD_EXT_ABI_VERSION 20

// clang-format off
#define HVD_EXT_STRUCT(name, kept) typedef struct {
#define HVD_EXT_FIELD(type, name) type name;
#define HVD_EXT_TYPED(type, name, kept, unset) type name;
#define HVD_EXT_COUNT(type, name) type name;
#define HVD_EXT_LIST(type, name, element, count) type name;
#define HVD_EXT_END(name, kept) } name;
#include "engine/spec.def"
// clang-format on

int64_t hvd_ext_abi_version(void);
int64_t hvd_ext_plan_version(void);  // HVD_EXT_PLAN_VERSION of ir.def
const char* hvd_ext_error(void);
// What carries data between hosts: "MPI", "TCP", or "threads" in a job of one rank; "" where the engine does not run.
const char* hvd_ext_between(int64_t engine);
// For each rank what joins its device and this rank's: the number of a Medium of device.h.
int hvd_ext_media(int64_t engine, int64_t size, int32_t* media);

// Life. The first three start the job's engine, and fail with kInvalid while it runs.
int hvd_ext_start_mpi(const HvdExtConfig* config, int64_t* engine, int32_t* rank, int32_t* size);
int hvd_ext_start_local(const HvdExtConfig* config, int64_t* engine);  // one rank, no MPI
// No MPI: sockets[r] is a connection with rank r, -1 for this rank. They belong to the engine, also after a failure.
int hvd_ext_start_mesh(const HvdExtConfig* config, int32_t rank, const int32_t* sockets, int64_t size, int64_t* engine);
// An engine of some ranks of `parent`, ascending, of which this is one: see StartSet of engines.h. *rank: its place
// there. `number`: not negative, the same on these ranks.
int hvd_ext_start_set(int64_t parent, const int32_t* ranks, int64_t n_ranks, int32_t number, const HvdExtConfig* config,
                      int64_t* engine, int32_t* rank);
int hvd_ext_stop(int64_t engine, int32_t together, int32_t* alone);  // see StopEngine of engines.h
void hvd_ext_finish_mpi(int32_t failed, int32_t code);               // at process exit, see FinishJob
void hvd_ext_abort(int32_t code);  // ends the job at once; a no-op where no engine runs

int hvd_ext_plan_add(int64_t engine, const int64_t* rows, int64_t n_rows, int64_t units, int64_t* plan);
int hvd_ext_plan_remove(int64_t plan);

int hvd_ext_channel_open(int64_t engine, const HvdExtChannel* spec, int64_t* channel);
// The next step of the channel has other buckets. See Engine::SwitchLayout.
int hvd_ext_channel_switch(int64_t channel, const HvdExtChannel* spec);
// `call` is called once, before step `step` or the first one after it begins, on the thread that begins it.
int hvd_ext_channel_at_step(int64_t channel, int64_t step, void (*call)(int64_t channel, int64_t step));
// See Engine::Succeed and Engine::OnStopped.
void hvd_ext_channel_succeed(int64_t stopped, int64_t channel);
void hvd_ext_on_stopped(void (*call)(int64_t channel));
// The newest complete steps, at most `most`, the oldest first: their numbers; when they began and ended, by a steady
// clock, in seconds; and for each of them n_tensors times from its begin to a tensor's arrival. `arrival_offset_s` may
// be null.
int hvd_ext_channel_times(int64_t channel, int64_t most, int64_t n_tensors, int64_t* steps, double* begins_s,
                          double* ends_s, double* arrival_offset_s, int64_t* count);
int hvd_ext_channel_close(int64_t channel);
int hvd_ext_channel_begin_step(int64_t channel);
// One whole step, blocking: tensor i is read from inputs[i], nbytes[i] long, and its result is written to outputs[i],
// which may be the same memory. Where the channel was opened with sparse buckets it is the step that
// hvd_ext_channel_begin_topk_step has begun.
int hvd_ext_channel_reduce(int64_t channel, int64_t n_tensors, const void* const* inputs, void* const* outputs,
                           const int64_t* nbytes);
// The same for a channel with `on_device` and arrays in memory of the engine's device, which begin as zeros. The call
// returns when the results are there.
int hvd_ext_channel_reduce_on_device(int64_t channel, int64_t n_tensors, const void* const* inputs,
                                     void* const* outputs, const int64_t* nbytes);
int hvd_ext_device_allocate(int64_t engine, int64_t nbytes, void** data);
int hvd_ext_device_free(int64_t engine, void* data);
// A step in parts, after hvd_ext_channel_begin_step: one tensor is handed over, and the call returns when it is copied;
// *ticket becomes the number of the step. Then all results of that step, blocking; the engine's thread makes the
// progress, as it does for TensorFlow.
int hvd_ext_channel_submit(int64_t channel, int64_t tensor, const void* data, int64_t nbytes, int64_t* ticket);
int hvd_ext_channel_collect(int64_t channel, int64_t ticket, int64_t n_tensors, void* const* outputs,
                            const int64_t* nbytes);

// In place of begin_step where the channel was opened with sparse buckets, and its end: see Engine::BeginTopKStep and
// EndStep. A momentum of -1 stands for those of the buckets.
int hvd_ext_channel_begin_topk_step(int64_t channel, double density, float momentum);
int hvd_ext_channel_end_step(int64_t channel, int32_t commit);
// The part of a sparse bucket whose residual and velocity lie on this rank: values become its first element in the
// bucket, its number of elements, whether there is a velocity, and 0. `which`: 0 the residual, 1 the velocity. kInvalid
// during a step.
int hvd_ext_channel_state(int64_t channel, int64_t bucket, int64_t values[4]);
int hvd_ext_channel_state_read(int64_t channel, int64_t bucket, int32_t which, float* to);
int hvd_ext_channel_state_write(int64_t channel, int64_t bucket, int32_t which, const float* from);
// Since it was opened: entries sent, bytes of values, of positions, of heads; steps committed, steps dropped.
int hvd_ext_channel_topk_statistics(int64_t channel, int64_t values[6]);

// The next collect of the tensor takes this value, whatever its ticket.
int hvd_ext_channel_give_result(int64_t channel, int64_t tensor, const void* data, int64_t nbytes);

// Of partial channels: see SkipStep and what follows it in engine.h. `next` waits until a round is over that this rank
// has not taken (*more is 1), or until all ranks have left (0). `rounds` gives for each round its number, its begin,
// its end, how long this rank waited for it, and for each of `size` ranks the newest step in it, the flags, and on rank
// 0 when the word of its gradient came (else 0).
int hvd_ext_channel_skip_step(int64_t channel, int64_t* ticket);
int hvd_ext_channel_flush(int64_t channel, int64_t ahead);
int hvd_ext_channel_leave(int64_t channel);
int hvd_ext_channel_next_round(int64_t channel, int32_t* more);
int hvd_ext_channel_progress(int64_t channel, int64_t* step, int64_t* over);
int hvd_ext_channel_set_quorum(int64_t channel, int64_t quorum);
int hvd_ext_channel_set_flags(int64_t channel, int64_t flags);
int hvd_ext_channel_rounds(int64_t channel, int64_t first, int64_t most, int64_t size, int64_t* numbers,
                           double* begins_s, double* finished_s, double* waited_s, int64_t* arrived, int64_t* flags,
                           double* announced_s, int64_t* count);
int hvd_ext_channel_held_read(int64_t channel, int64_t tensor, void* to, int32_t* held);
int hvd_ext_channel_held_write(int64_t channel, int64_t tensor, const void* from);

// Blocking; the caller's thread waits. The payloads are kept until hvd_ext_exchange_free: payload r is
// [data + offsets[r], data + offsets[r + 1]). With `agrees`, that of a rank that has joined is empty; else the exchange
// is refused while a rank has joined.
int hvd_ext_exchange(int64_t engine, const char* name, const void* payload, int64_t nbytes, int32_t agrees,
                     void** result, const char** data, const int64_t** offsets);
// Blocking: gives zeros to the others until all ranks have joined. It takes the plans that this rank has for calls,
// with their digests. *last: the rank that has joined last. The payloads of all ranks as in an exchange.
int hvd_ext_join(int64_t engine, int64_t n_plans, const int64_t* plans, const int64_t* digests, const void* payload,
                 int64_t nbytes, int32_t* last, void** result, const char** data, const int64_t** offsets);
void hvd_ext_exchange_free(void* result);
int hvd_ext_refuse(int64_t engine, const char* name, const char* why);  // see Engine::Refuse
// Ends the waits of TensorFlow's ops in graphs: see Interrupts::EndAll.
void hvd_ext_interrupt(void);
int32_t hvd_ext_raise_after_error(void);  // see Interrupts::RaiseAfterError; 1 for true

// buckets, calls, segments, bytes_sent, bytes_received
int hvd_ext_statistics(int64_t engine, int64_t values[5]);

// A trace of what the job's engine does (not those of process sets): see trace.h for the records. `stop` keeps them
// until the next start; `read` copies the newest, at most `most`.
int hvd_ext_trace_start(int64_t capacity);
int hvd_ext_trace_stop(void);
int hvd_ext_trace_read(void* records, int64_t most, int64_t* count, int64_t* dropped);

// For tests: the kernels and the decoder.
int hvd_ext_test_add(int32_t dtype, void* accumulator, const void* x, int64_t elements);
int hvd_ext_test_divide(int32_t dtype, void* data, int64_t divisor, int64_t elements);
int hvd_ext_test_decode(const int64_t* rows, int64_t n_rows, int64_t units, int32_t rank, int32_t size);
// For benchmarks: see read_pass.h.
int hvd_ext_test_read_pass(const float* x, int64_t elements, int32_t threads, double* sum);
int hvd_ext_test_algorithm_1(const float* x, int64_t elements, int64_t k, int32_t samplings, uint64_t seed,
                             float* magnitudes, int32_t* indices, float* values, int64_t* picked);

#ifdef __cplusplus
}
#endif

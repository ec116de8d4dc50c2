// MPI in this process: starting it, or using an MPI that is started already; the communicators of the job and of
// subsets; ending it.
#include "engine/mpi_job.h"

#include "engine/interrupt.h"
#include "engine/transport.h"

#ifdef HVD_EXT_WITH_MPI

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

namespace hvd_ext {
namespace {

constexpr std::chrono::seconds kAbort(5);  // for MPI_Abort to end this process

// What this process has done with MPI. Never destroyed: exit handlers come late.
struct Process {
  std::mutex mutex;                  // held while MPI or a transport starts
  std::atomic<bool> used{false};     // a transport was asked for
  std::atomic<bool> started{false};  // MPI was started by us
};
Process& process = *new Process;

// The Open MPI of a wheel lies elsewhere than where it was built, and finds its own files only through OPAL_PREFIX. Its
// plugins look for symbols of libmpi, which Python's ctypes has loaded privately.
void HelpOpenMpi() {
#ifdef OPEN_MPI
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &library) == 0) return;
  dlopen(library.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  char* file = realpath(library.dli_fname, nullptr);
  if (file == nullptr) return;
  std::string prefix(file);
  std::free(file);
  for (int i = 0; i < 2; ++i) prefix.resize(std::min(prefix.size(), prefix.rfind('/')));
  // A distribution's Open MPI spreads its files over the system and is not relocated.
  if (access((prefix + "/share/openmpi").c_str(), R_OK) == 0) setenv("OPAL_PREFIX", prefix.c_str(), /*overwrite=*/0);
#endif
}

Status StartMpi() {
  int flag = 0;
  MPI_Finalized(&flag);
  if (flag) {
    return Communication(
        "MPI has been finalised in this process and cannot start again; finalise it after the last shutdown(), or "
        "leave "
        "it to hvd_ext");
  }
  int provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&flag);
  if (flag) {
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Query_thread(&provided), "the MPI that was running");
  } else {
    HelpOpenMpi();
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "the start of MPI");
    process.started = true;
  }
  if (provided >= MPI_THREAD_MULTIPLE) return Status::Ok();
  return Communication(std::string("MPI's thread level (") + std::to_string(provided) +
                       ") must be MPI_THREAD_MULTIPLE (" + std::to_string(MPI_THREAD_MULTIPLE) +
                       "), because the engine's thread calls MPI beside others; " +
                       (process.started ? "this MPI library has no support for threads: use another build of it"
                                        : "it was started by other code in this process: call hvd_ext.init() before "
                                          "it, or start it with MPI_THREAD_MULTIPLE"));
}

// All ranks come here, some of them seconds later because they still import. This sleeps, where MPI_Comm_dup would
// spin.
Status WaitForAll() {
  MPI_Request barrier;
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Ibarrier(MPI_COMM_WORLD, &barrier), "all ranks");
  const auto pause = std::chrono::milliseconds(1);
  const auto look = std::chrono::duration<double>(kLookForSignals_s);
  auto looked = std::chrono::steady_clock::now();
  for (int done = 0; !done;) {
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Test(&barrier, &done, MPI_STATUS_IGNORE), "all ranks");
    if (done) break;
    std::this_thread::sleep_for(pause);
    if (std::chrono::steady_clock::now() - looked < look) continue;
    looked = std::chrono::steady_clock::now();
    if (Interrupts::HandlerRaises()) return Stopped(Interrupted("init"));
  }
  return Status::Ok();
}

Status Duplicate(MPI_Comm of, MPI_Comm* communicator) {
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Comm_dup(of, communicator), "all ranks");
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Comm_set_errhandler(*communicator, MPI_ERRORS_RETURN), "all ranks");
  return Status::Ok();
}

// Makes communicators of our own, so that our messages never meet those of others. Only Release frees them: messages
// under way may outlive the engine.
Status Duplicate(MPI_Comm of, MpiCommunicators* made) {
  for (MPI_Comm* communicator : {&made->data, &made->control, &made->subsets}) {
    HVD_EXT_RETURN_IF_ERROR(Duplicate(of, communicator));
  }
  return Status::Ok();
}

}  // namespace

Status MpiFailure(const char* call, int code, const std::string& with) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  std::string name(call);
  return Communication(name.substr(0, name.find('(')) + ", " + with + ": " + text + " (code " + std::to_string(code) +
                       "); the job cannot go on: end it, or shutdown() and init() again on all ranks");
}

[[noreturn]] void EndMpiJob(int code) {
  int over = 0;
  MPI_Finalized(&over);
  int failure = code > 0 && code < 256 ? code : 1;  // an exit status has 8 bits, and 0 would be success
  try {  // MPI_Abort waits for the launcher's daemon, which may be as stuck as what this rank could not wait for
    std::thread([failure] {
      std::this_thread::sleep_for(kAbort);
      std::_Exit(failure);
    }).detach();
  } catch (const std::system_error&) {  // there can be no more threads: MPI_Abort alone has to do
  }
  if (!over) MPI_Abort(MPI_COMM_WORLD, failure);
  std::_Exit(failure);  // MPICH's MPI_Abort may come back
}

Status MakeMpiTransport(std::shared_ptr<Transport>* transport) {
  std::lock_guard<std::mutex> lock(process.mutex);
  process.used = true;
  HVD_EXT_RETURN_IF_ERROR(StartMpi());
  HVD_EXT_RETURN_IF_ERROR(WaitForAll());
  MpiCommunicators world;
  HVD_EXT_RETURN_IF_ERROR(Duplicate(MPI_COMM_WORLD, &world));
  return MakeMpiTransportOn(world, transport);
}

Status DivideMpi(MPI_Comm communicator, const std::vector<int>& ranks, int tag, MpiCommunicators* subset) {
  std::lock_guard<std::mutex> lock(process.mutex);
  MPI_Group all, some;
  MPI_Comm theirs = MPI_COMM_NULL;
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Comm_group(communicator, &all), "all ranks");
  int code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
  MPI_Group_free(&all);
  if (code != MPI_SUCCESS) return MpiFailure("MPI_Group_incl", code, std::to_string(ranks.size()) + " ranks");
  code = MPI_Comm_create_group(communicator, some, tag, &theirs);
  MPI_Group_free(&some);
  if (code != MPI_SUCCESS) return MpiFailure("MPI_Comm_create_group", code, std::to_string(ranks.size()) + " ranks");
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Comm_set_errhandler(theirs, MPI_ERRORS_RETURN), "the ranks of a subset");
  subset->subsets = theirs;
  HVD_EXT_RETURN_IF_ERROR(Duplicate(theirs, &subset->data));
  return Duplicate(theirs, &subset->control);
}

void FreeMpi(const MpiCommunicators& communicators) {
  int over = 0;
  MPI_Finalized(&over);
  if (over) return;
  for (MPI_Comm communicator : {communicators.data, communicators.control, communicators.subsets}) {
    MPI_Comm_free(&communicator);
  }
}

void FinishMpi(bool failed, int code) {
  int running = 0, over = 0;
  MPI_Initialized(&running);
  MPI_Finalized(&over);
  if (!process.used || !running || over) return;
  // Another thread may still wait for other ranks in MakeMpiTransport or DivideMpi, and would do so for ever: that is a
  // failure as well.
  std::unique_lock<std::mutex> lock(process.mutex, std::try_to_lock);
  if (failed || !lock.owns_lock()) EndMpiJob(code);
  if (process.started) MPI_Finalize();
}

}  // namespace hvd_ext

#else  // HVD_EXT_WITH_MPI

namespace hvd_ext {

Status MakeMpiTransport(std::shared_ptr<Transport>*) {
  return Communication("this build of hvd_ext has no MPI: build it where mpicxx is found: python -m hvd_ext build");
}

void FinishMpi(bool, int) {}

}  // namespace hvd_ext

#endif  // HVD_EXT_WITH_MPI

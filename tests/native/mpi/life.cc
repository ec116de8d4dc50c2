// Starts and ends of MPI that need a process of their own: `hvd_ext_mpi_life MODE`. The exit status is 0 if all went as
// it must; with the modes "failed", "abort" and "making" the job must fail.
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "engine/engines.h"
#include "engine/transport.h"

namespace {

using hvd_ext::FinishMpi;
using hvd_ext::MakeMpiTransport;
using hvd_ext::Status;
using hvd_ext::Transport;

int Wrong(const std::string& what) {
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  return 1;
}

bool Finalised() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

// The transport must be refused, with these words.
int MustFail(const std::string& words) {
  std::shared_ptr<Transport> transport;
  Status status = MakeMpiTransport(&transport);
  if (status.ok()) return Wrong("a transport was made");
  if (status.message.find(words) == std::string::npos) return Wrong("other words: " + status.message);
  return 0;
}

int Started() {
  std::shared_ptr<Transport> transport;
  Status status = MakeMpiTransport(&transport);
  if (!status.ok()) return Wrong(status.message);
  FinishMpi(false, 0);
  if (!Finalised()) return Wrong("MPI that we started was left running");
  FinishMpi(false, 0);  // a second call is harmless
  FinishMpi(true, 3);   // and does not abort a job that has ended
  return MustFail("MPI has been finalised");
}

int Attached() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  std::shared_ptr<Transport> transport;
  Status status = MakeMpiTransport(&transport);
  if (!status.ok()) return Wrong(status.message);
  FinishMpi(false, 0);
  if (Finalised()) return Wrong("MPI that others started was finalised by us");
  MPI_Finalize();
  return 0;
}

int Single() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SINGLE, &provided);
  int wrong = MustFail("must be MPI_THREAD_MULTIPLE");
  MPI_Finalize();
  return wrong;
}

// Rank 0 stops alone; the others wait for it.
int Alone(bool abort) {
  std::shared_ptr<Transport> transport;
  Status status = MakeMpiTransport(&transport);
  if (!status.ok()) return Wrong(status.message);
  if (transport->rank() == 0) {
    if (abort) {
      transport->Abort(7);
    } else {
      FinishMpi(true, 7);
    }
    return Wrong("the job went on");
  }
  std::this_thread::sleep_for(std::chrono::hours(1));
  return 0;
}

// Rank 0 ends while a thread of it waits for rank 1 to make a set, which does not come.
int Making() {
  std::shared_ptr<hvd_ext::Engine> job;
  Status status = hvd_ext::StartJob(hvd_ext::Config(), MakeMpiTransport, &job);
  if (!status.ok()) return Wrong(status.message);
  if (job->rank() == 0) {
    std::thread([number = job->generation()] {
      std::shared_ptr<hvd_ext::Engine> set;
      hvd_ext::StartSet(number, {0, 1}, 1, hvd_ext::Config(), &set);
      Wrong("the set was made");
    }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  bool alone = true;
  status = hvd_ext::StopEngine(job->generation(), /*together=*/false, &alone);
  if (!status.ok() || alone) return Wrong("the job did not stop");
  hvd_ext::FinishJob(false, 0);
  return Wrong("the job went on");
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "started") return Started();
  if (mode == "attached") return Attached();
  if (mode == "single") return Single();
  if (mode == "failed") return Alone(/*abort=*/false);
  if (mode == "abort") return Alone(/*abort=*/true);
  if (mode == "making") return Making();
  return Wrong("mode '" + mode + "' must be started, attached, single, failed, abort or making");
}

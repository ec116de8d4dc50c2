// MPI in this process, and communicators of our own. Only this header includes mpi.h.
#pragma once

#ifdef HVD_EXT_WITH_MPI

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/transport.h"

namespace hvd_ext {

Status MpiFailure(const char* call, int code, const std::string& with);

// For every MPI call that can fail. `with` names the peer; it is evaluated on failure only.
#define HVD_EXT_RETURN_IF_MPI_ERROR(call, with)                      \
  do {                                                               \
    int code_ = (call);                                              \
    if (code_ != MPI_SUCCESS) return MpiFailure(#call, code_, with); \
  } while (false)

// Three communicators of the same ranks, so that messages of one kind never meet those of another.
struct MpiCommunicators {
  MPI_Comm data = MPI_COMM_NULL;
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Comm subsets = MPI_COMM_NULL;  // used for making subsets only
};

Status MakeMpiTransportOn(const MpiCommunicators& communicators, std::shared_ptr<Transport>* transport);

// See Transport::Subset.
Status DivideMpi(MPI_Comm communicator, const std::vector<int>& ranks, int tag, MpiCommunicators* subset);
void FreeMpi(const MpiCommunicators& communicators);

// Ends the job at once and non-zero.
[[noreturn]] void EndMpiJob(int code);

}  // namespace hvd_ext

#endif  // HVD_EXT_WITH_MPI

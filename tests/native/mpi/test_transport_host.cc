// Shared memory between the processes of a job, run by mpirun on any number of ranks.
#include "harness.h"
#include "ranks.h"
#include "transport_contract.h"

namespace hvd_ext::test {
namespace {

std::shared_ptr<Transport> Fresh(int64_t capacity) {
  std::shared_ptr<Transport> mpi, transport;
  std::shared_ptr<Arena> arena;
  CHECK_OK(MakeMpiTransport(&mpi));
  if (capacity > 0) CHECK_OK(Arena::Make(capacity, &arena));
  CHECK_OK(MakeHostTransport(mpi, arena, nullptr, &transport));
  return transport;
}

// Most tests share one transport, because each takes two communicators that are never freed.
Transport* Shared() {
  static auto* transport = new std::shared_ptr<Transport>(Fresh(Arena::DefaultCapacity()));
  return transport->get();
}

TEST("host mpi: the ranks of one host share memory") {
  for (int peer = 0; peer < Shared()->size(); ++peer) CHECK_EQ(Shared()->IsZeroCopy(peer), peer != Shared()->rank());
  CHECK_EQ(Shared()->Rings(), Shared()->size() > 1);
}

TEST("host mpi: the contract of a transport holds") {
  CheckContract([](const Contract& part) { part(Shared()); });
}

TEST("host mpi: one rank without shared memory goes by MPI, the others share") {
  int last = Shared()->size() - 1;
  std::shared_ptr<Transport> mixed = Fresh(Shared()->rank() == last ? 0 : 64 << 20);
  for (int peer = 0; peer < last && mixed->rank() < last; ++peer)
    CHECK_EQ(mixed->IsZeroCopy(peer), peer != mixed->rank());
  CHECK(!mixed->IsZeroCopy(last));
  CheckContract([&](const Contract& part) { part(mixed.get()); });
}

}  // namespace
}  // namespace hvd_ext::test

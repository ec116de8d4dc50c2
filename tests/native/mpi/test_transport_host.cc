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
  CHECK_OK(MakeHostTransport(mpi, arena, &transport));
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

TEST("host mpi: messages arrive whole") { MessagesArriveWhole(Shared()); }
TEST("host mpi: messages of one tag keep their order") { MessagesOfOneTagKeepTheirOrder(Shared()); }
TEST("host mpi: the largest tag carries messages") { TheLargestTagCarriesMessages(Shared()); }
TEST("host mpi: tags are independent") { TagsAreIndependent(Shared()); }
TEST("host mpi: opposing large messages do not block") { OpposingLargeMessagesDoNotBlock(Shared()); }
TEST("host mpi: control messages keep their order") { ControlMessagesKeepTheirOrder(Shared()); }
TEST("host mpi: data and control do not meet") { DataAndControlDoNotMeet(Shared()); }
TEST("host mpi: messages received without a copy stay until the receiver lets go") {
  MessagesReceivedWithoutACopyStay(Shared());
}
TEST("host mpi: messages of other runs are refused") { MessagesOfOtherRunsAreRefused(Shared()); }
TEST("host mpi: short messages are reported") { ShortMessagesAreReported(Shared()); }

TEST("host mpi: one rank without shared memory goes by MPI, the others share") {
  int last = Shared()->size() - 1;
  std::shared_ptr<Transport> mixed = Fresh(Shared()->rank() == last ? 0 : 64 << 20);
  for (int peer = 0; peer < last && mixed->rank() < last; ++peer)
    CHECK_EQ(mixed->IsZeroCopy(peer), peer != mixed->rank());
  CHECK(!mixed->IsZeroCopy(last));
  MessagesOfOneTagKeepTheirOrder(mixed.get());
  ControlMessagesKeepTheirOrder(mixed.get());
  MessagesReceivedWithoutACopyStay(mixed.get());
}

}  // namespace
}  // namespace hvd_ext::test

// Run by mpirun on any number of ranks: every rank runs every test, in the same order.
#include <cstdlib>

#include "harness.h"
#include "ranks.h"
#include "transport_contract.h"

namespace hvd_ext::test {
namespace {

std::shared_ptr<Transport> Fresh() {
  std::shared_ptr<Transport> transport;
  CHECK_OK(MakeMpiTransport(&transport));
  return transport;
}

// Most tests share one transport, because each takes two communicators that are never freed.
Transport* Shared() {
  static auto* transport = new std::shared_ptr<Transport>(Fresh());
  return transport->get();
}

TEST("mpi: the size is what mpirun was told") {
  const char* told = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (told == nullptr) told = std::getenv("PMI_SIZE");
  CHECK_EQ(Shared()->size(), told == nullptr ? 1 : std::atoi(told));
  CHECK(Shared()->rank() >= 0 && Shared()->rank() < Shared()->size());
}

TEST("mpi: the contract of a transport holds") {
  CheckContract([](const Contract& part) { part(Shared()); });
}

TEST("mpi: a peer outside the job is reported with the call, the code's text and the peer") {
  char byte = 0;
  std::unique_ptr<Request> request;
  int beyond = Shared()->size();
  for (const std::string& words :
       {std::string("MPI_Isend"), "rank " + std::to_string(beyond), std::string("nvalid rank")}) {
    CHECK_FAILS(Shared()->Send(beyond, 1, &byte, 1, &request), Code::kCommunication, words);
  }
  CHECK_FAILS(Shared()->Recv(beyond, 1, &byte, 1, &request), Code::kCommunication, "MPI_Irecv");
  CHECK_FAILS(Shared()->SendControl(beyond, "x"), Code::kCommunication, "control message to rank");
}

TEST("mpi: a second transport works beside the first, and does not see what was left to it") {
  std::shared_ptr<Transport> first = Fresh();
  int me = first->rank(), size = first->size(), next = (me + 1) % size, previous = (me + size - 1) % size;
  // Short messages, which MPI takes at once, and a receive that never matches a message, into memory that stays.
  static auto* stays = new std::vector<char>(1 << 20);
  static auto* requests = new std::vector<std::unique_ptr<Request>>;
  static const char old_byte = 'o';
  CHECK_OK(first->Send(next, 4, &old_byte, 1, &requests->emplace_back()));
  CHECK_OK(first->SendControl(next, "old"));
  CHECK_OK(first->Recv(previous, 99, stays->data(), static_cast<int64_t>(stays->size()), &requests->emplace_back()));
  first->Close();
  first.reset();

  std::shared_ptr<Transport> second = Fresh();
  char sent = 'n', received = 0;
  std::vector<std::unique_ptr<Request>> pair(2);
  CHECK_OK(second->Recv(previous, 4, &received, 1, &pair[0]));
  CHECK_OK(second->Send(next, 4, &sent, 1, &pair[1]));
  Finish(second.get(), pair);
  CHECK_EQ(received, 'n');
  CHECK_OK(second->SendControl(next, "new"));
  CHECK_EQ(NextControl(second.get()).second, "new");
  Meet(second.get());
}

}  // namespace
}  // namespace hvd_ext::test

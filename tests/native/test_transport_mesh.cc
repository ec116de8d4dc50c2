// A job without MPI: ranks that are threads of one process, with a connection for each pair.
#include <sys/socket.h>
#include <unistd.h>

#include "engines.h"
#include "harness.h"
#include "hosts.h"
#include "ranks.h"
#include "transport_contract.h"

namespace hvd_ext::test {
namespace {

Transports MakeMeshTransports(int size) {
  std::vector<std::vector<int>> sockets(size, std::vector<int>(size, -1));
  for (int rank = 0; rank < size; ++rank) {
    for (int peer = 0; peer < rank; ++peer) {
      int pair[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
      sockets[rank][peer] = pair[0];
      sockets[peer][rank] = pair[1];
    }
  }
  Transports transports(size);
  for (int rank = 0; rank < size; ++rank) CHECK_OK(MakeMeshTransport(rank, sockets[rank], &transports[rank]));
  return transports;
}

TEST("mesh: the contract of a transport holds") {
  for (int size : {1, 2, 4}) {
    CheckContract([&](const Contract& part) { RunOn(MakeMeshTransports(size), part); });
  }
}

TEST("mesh: the engine's tests pass") {
  Again(MakeMeshTransports, {"engine: ", "channel: ", "early start: ", "leave: ", "stop: ", "top-k step: messages"});
}

TEST("mesh: faster paths stand in front of it, and it carries what does not fit into them") {
  for (int64_t capacity : {kRoomyArena, kSmallArena}) {
    Transports transports = ShareMemory(MakeMeshTransports(3), Arenas(3, capacity));
    CheckContract([&](const Contract& part) { RunOn(transports, part); });
  }
}

TEST("mesh: subsets share its connections and meet no messages of each other") {
  Transports all = MakeMeshTransports(4), first(3), second(3), other(2);
  for (int rank : {0, 2, 3}) {
    const int place = rank == 0 ? 0 : rank - 1;
    CHECK_OK(all[rank]->Subset({0, 2, 3}, 7, &first[place]));
    CHECK_OK(all[rank]->Subset({0, 2, 3}, 7, &second[place]));
  }
  for (int rank : {1, 2}) CHECK_OK(all[rank]->Subset({1, 2}, 8, &other[rank - 1]));
  for (const Transports& subset : {first, second, other}) {
    CheckContract([&](const Contract& part) { RunOn(subset, part); });
  }
  // Both have rank 0's message, each its own.
  CHECK_OK(first[0]->SendControl(1, "first"));
  CHECK_OK(second[0]->SendControl(1, "second"));
  CHECK_EQ(NextControl(second[1].get()).second, "second");
  CHECK_EQ(NextControl(first[1].get()).second, "first");
}

// What a rank hears of another one whose transport is gone, once it has heard everything before.
std::string Heard(Transport* transport) {
  Status status;
  Until("news of a rank that is gone", [&] {
    int peer = -1;
    std::string message;
    status = transport->ReceiveControl(&peer, &message);
    return !status.ok();
  });
  CHECK(status.code == Code::kCommunication);
  return status.message;
}

TEST("mesh: a rank that ends without a farewell is named, after what it has sent, also where shared memory rings") {
  for (bool shares : {false, true}) {
    Transports transports = MakeMeshTransports(3);
    if (shares) {
      Transports behind = transports;
      transports = ShareMemory(behind, Arenas(3, kRoomyArena));
      CHECK(transports[0]->Rings() && transports[0]->Watches());
      CHECK_OK(behind[2]->SendControl(0, "last words"));
    } else {
      CHECK_OK(transports[2]->SendControl(0, "last words"));
    }
    char byte = 0;
    std::unique_ptr<Request> receive;
    if (!shares) CHECK_OK(transports[0]->Recv(2, 1, &byte, 1, &receive));
    transports[2].reset();
    CHECK_EQ(NextControl(transports[0].get()).second, "last words");
    for (int rank : {0, 1}) CHECK_EQ(Heard(transports[rank].get()), "rank 2: its connection has ended");
    if (!shares) CHECK_EQ(FailureOf(transports[0].get(), receive).message, "rank 2: its connection has ended");
    CHECK_OK(transports[0]->SendControl(2, "nobody hears it"));
    CHECK_OK(transports[0]->SendControl(1, "the others do"));
    int peer = -1;
    std::string message;
    Until("the message", [&] {
      Status status = transports[1]->ReceiveControl(&peer, &message);
      return peer >= 0;
    });
    CHECK_EQ(message, "the others do");
  }
}

TEST("mesh: a rank that has said farewell is not missed") {
  Transports transports = MakeMeshTransports(2);
  CHECK_OK(transports[1]->SendControl(0, "bye"));
  transports[1]->Close();
  transports[1].reset();
  CHECK_EQ(NextControl(transports[0].get()).second, "bye");
  for (int i = 0; i < 100; ++i) {
    int peer = -1;
    std::string message;
    CHECK_OK(transports[0]->ReceiveControl(&peer, &message));
    CHECK_EQ(peer, -1);
  }
  // Who waits for more from it learns that none comes.
  char byte = 0;
  std::unique_ptr<Request> receive;
  CHECK_OK(transports[0]->Recv(1, 1, &byte, 1, &receive));
  CHECK_EQ(FailureOf(transports[0].get(), receive).message, "rank 1: its connection has ended");
}

TEST("mesh: what is no message ends the connection") {
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  std::shared_ptr<Transport> transport;
  CHECK_OK(MakeMeshTransport(0, {-1, pair[0]}, &transport));
  const std::string noise(100, '\xff');
  CHECK_EQ(send(pair[1], noise.data(), noise.size(), 0), static_cast<ssize_t>(noise.size()));
  CHECK_EQ(Heard(transport.get()), "rank 1: it has sent what is no message");
  close(pair[1]);
}

}  // namespace
}  // namespace hvd_ext::test

// Shared memory between ranks of one process. What needs processes of their own is in mpi/test_transport_host.cc.
#include <cstring>

#include "engine/buffer_pool.h"
#include "harness.h"
#include "hosts.h"
#include "ranks.h"
#include "transport_contract.h"

namespace hvd_ext::test {
namespace {

TEST("host: the contract of a transport holds") {
  for (int size : {2, 3}) {
    CheckContract([&](const Contract& part) { RunOn(MakeHostTransports<kRoomyArena>(size), part); });
  }
  CheckContract([](const Contract& part) { RunOn(MakeHostTransports<kSmallArena>(4), part); });
}

TEST("host: ranks without shared memory and those with it are one job") {
  auto arenas = Arenas(4, kRoomyArena);
  arenas[1] = nullptr;
  Transports transports = ShareMemory(MakeThreadTransports(4), arenas);
  CHECK(transports[0]->IsZeroCopy(2) && transports[3]->IsZeroCopy(0));
  CHECK(transports[2]->arena() == arenas[2]);
  CHECK(!transports[0]->Rings());  // rank 1 does not
  CheckContract([&](const Contract& part) { RunOn(transports, part); });
  auto between = MakeThreadTransports(3);  // a job in which nobody shares memory with another keeps its transport
  CHECK(ShareMemory(between, {nullptr, arenas[0], nullptr}) == between);
}

TEST("host: a rank that cannot map another's memory agrees with it on the way around") {
  // Bytes of the card: layout and host (8 each), then the arena's process, file, capacity (8 each) and token (16).
  for (auto [begin, end] : std::vector<std::pair<size_t, size_t>>{{16, 20}, {24, 25}, {32, 36}, {40, 56}}) {
    auto between = MakeThreadTransports(3);
    Transports lying = between;
    lying[1] = std::make_shared<Liar>(between[1], begin, end);
    Transports transports = ShareMemory(lying, Arenas(3, kRoomyArena));
    bool wrong_token = begin == 40;  // ranks of one process find an arena by its token alone
    CHECK_EQ(transports[0]->IsZeroCopy(1), !wrong_token);
    CHECK_EQ(transports[1]->IsZeroCopy(0), !wrong_token);
    CHECK(transports[0]->IsZeroCopy(2) && transports[2]->IsZeroCopy(1));
    if (begin == 16 || wrong_token) CheckContract([&](const Contract& part) { RunOn(transports, part); });
  }
}

TEST("host: a message of the arena is not copied, and its send ends when it has been taken") {
  Transports ranks = MakeHostTransports<kRoomyArena>(2);
  BufferPool pool(ranks[0]->arena());
  Buffer sent = pool.Take(1000);
  std::memset(sent.data(), 'a', 1000);
  std::unique_ptr<Request> send, receive;
  uint32_t seen = ranks[1]->doorbell()->Look();
  CHECK_OK(ranks[0]->Send(1, 5, sent.data(), 1000, &send));
  CHECK(ranks[1]->doorbell()->Look() != seen);
  CHECK_OK(ranks[1]->Recv(0, 5, nullptr, 1000, &receive));
  CHECK(IsDone(ranks[1].get(), receive));
  const char* view = ranks[1]->Received(receive.get());
  CHECK_EQ(view[0], 'a');
  sent.data()[0] = 'b';
  CHECK_EQ(view[0], 'b');
  CHECK(!IsDone(ranks[0].get(), send));
  seen = ranks[0]->doorbell()->Look();
  receive.reset();
  CHECK(ranks[0]->doorbell()->Look() != seen);
  CHECK(IsDone(ranks[0].get(), send));
}

TEST("host: requests that are dropped are forgotten, and may outlive the transports") {
  Transports ranks = MakeHostTransports<kRoomyArena>(2);
  BufferPool pool(ranks[0]->arena());
  Buffer sent = pool.Take(500);
  std::string received(500, '\0');
  std::unique_ptr<Request> send, receive, zero_copy;
  CHECK_OK(ranks[0]->Recv(1, 5, received.data(), 500, &receive));
  receive.reset();
  CHECK_OK(ranks[0]->Send(1, 6, sent.data(), 500, &send));
  send.reset();  // the peer may still read it
  CHECK_OK(ranks[1]->Recv(0, 6, received.data(), 500, &receive));
  CHECK(IsDone(ranks[1].get(), receive));
  CHECK_OK(ranks[0]->Send(1, 7, sent.data(), 500, &send));  // reads that the message before was taken
  CHECK(!IsDone(ranks[0].get(), send));
  CHECK_OK(ranks[1]->Recv(0, 7, nullptr, 500, &zero_copy));
  CHECK(IsDone(ranks[1].get(), zero_copy));
  const char* view = ranks[1]->Received(zero_copy.get());
  for (auto& rank : ranks) rank->Close();
  ranks.clear();
  CHECK_EQ(view[499], sent.data()[499]);
}

TEST("host: more messages than the ring holds wait, and the sender is rung for when there is room") {
  constexpr int kMessages = 500;
  Transports ranks = MakeHostTransports<kRoomyArena>(2);
  std::vector<std::unique_ptr<Request>> sends(kMessages), receives(kMessages);
  std::vector<int> received(kMessages, -1);
  for (int i = 0; i < kMessages; ++i) CHECK_OK(ranks[0]->Send(1, 3, &i, sizeof(i), &sends[i]));
  CHECK(ranks[0]->ControlPending());
  for (int i = 0; i < kMessages; ++i) CHECK_OK(ranks[1]->Recv(0, 3, &received[i], sizeof(int), &receives[i]));
  uint32_t seen = ranks[0]->doorbell()->Look();
  for (int i = 0; i < kMessages;) {
    if (IsDone(ranks[1].get(), receives[i])) {
      CHECK_EQ(received[i], i);
      ++i;
      continue;
    }
    CHECK(ranks[0]->doorbell()->Look() != seen);
    seen = ranks[0]->doorbell()->Look();
    IsDone(ranks[0].get(), sends[0]);  // writes what there is room for
  }
  CHECK(!ranks[0]->ControlPending());
}

}  // namespace
}  // namespace hvd_ext::test

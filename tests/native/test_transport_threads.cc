#include <cstring>

#include "harness.h"
#include "ranks.h"
#include "transport_contract.h"

namespace hvd_ext::test {
namespace {

TEST("threads: the contract of a transport holds") {
  for (int size : {1, 2, 5}) {
    CheckContract([&](const Contract& part) { RunRanks(size, part); });
  }
}

TEST("threads: a send ends only when its receive has come") {
  auto ranks = MakeThreadTransports(2);
  char sent[4] = "abc", received[4] = "";
  std::unique_ptr<Request> send, receive;
  CHECK_OK(ranks[0]->Send(1, 5, sent, 4, &send));
  CHECK(!IsDone(ranks[0].get(), send));
  CHECK_OK(ranks[1]->Recv(0, 5, received, 4, &receive));
  CHECK(IsDone(ranks[0].get(), send));
  CHECK_EQ(std::strcmp(received, "abc"), 0);
}

TEST("threads: the send of a message received without a copy ends when the receiver lets go") {
  auto ranks = MakeThreadTransports(2);
  char sent[4] = "abc";
  std::unique_ptr<Request> send, receive;
  CHECK_OK(ranks[0]->Send(1, 5, sent, 4, &send));
  CHECK_OK(ranks[1]->Recv(0, 5, nullptr, 4, &receive));
  CHECK(IsDone(ranks[1].get(), receive));
  CHECK(ranks[1]->Received(receive.get()) == sent);
  CHECK(!IsDone(ranks[0].get(), send));
  uint32_t seen = ranks[0]->doorbell()->Look();
  receive.reset();
  CHECK(ranks[0]->doorbell()->Look() != seen);
  CHECK(IsDone(ranks[0].get(), send));
}

TEST("threads: a request that is dropped is withdrawn, and may outlive the transport") {
  auto ranks = MakeThreadTransports(2);
  std::unique_ptr<Request> send, receive;
  char sent = 'x', received = 0;
  {
    std::string memory_that_ends(100, 'y');
    CHECK_OK(ranks[0]->Send(1, 5, memory_that_ends.data(), 100, &send));
    send.reset();
    CHECK_OK(ranks[1]->Recv(0, 6, memory_that_ends.data(), 100, &receive));
    receive.reset();
  }
  CHECK_OK(ranks[0]->Send(1, 5, &sent, 1, &send));
  CHECK_OK(ranks[1]->Recv(0, 5, &received, 1, &receive));
  CHECK_EQ(received, 'x');
  CHECK_OK(ranks[0]->Send(0, 5, &sent, 1, &send));
  ranks[0]->Close();
  ranks.clear();
}

TEST("threads: abort fails all ranks and says who has aborted") {
  auto ranks = MakeThreadTransports(3);
  std::unique_ptr<Request> receive, send;
  char byte = 0;
  int peer = 0;
  bool done = false;
  std::string message;
  CHECK_OK(ranks[2]->Recv(0, 1, &byte, 1, &receive));
  ranks[1]->Abort(7);
  ranks[0]->Abort(9);  // the first one counts
  const char* words = "rank 1 has aborted the job with code 7";
  CHECK_FAILS(ranks[2]->Test(receive.get(), &done), Code::kCommunication, words);
  CHECK_FAILS(ranks[0]->Send(2, 1, &byte, 1, &send), Code::kCommunication, words);
  CHECK_FAILS(ranks[0]->ReceiveControl(&peer, &message), Code::kCommunication, words);
  CHECK_FAILS(ranks[1]->SendControl(0, "hello"), Code::kCommunication, words);
}

TEST("threads: a peer outside the job is refused") {
  auto ranks = MakeThreadTransports(2);
  std::unique_ptr<Request> request;
  char byte = 0;
  CHECK_FAILS(ranks[0]->Send(2, 1, &byte, 1, &request), Code::kInternal, "send to rank 2: the rank must be in [0, 2)");
  CHECK_FAILS(ranks[0]->Recv(-1, 1, &byte, 1, &request), Code::kInternal, "receive from rank -1");
  CHECK_FAILS(ranks[0]->Recv(1, 1, &byte, -4, &request), Code::kInternal, "-4 bytes");
}

}  // namespace
}  // namespace hvd_ext::test

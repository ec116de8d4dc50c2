// Connections of our own between ranks that are threads of one process, over the loopback interface.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <map>
#include <string>

#include "engines.h"
#include "harness.h"
#include "hosts.h"
#include "ranks.h"
#include "transport_contract.h"

namespace hvd_ext::test {
namespace {

Transports MakeTcp(const Transports& between, const std::vector<TcpOptions>& options) {
  Transports transports(between.size());
  RunThreads(
      static_cast<int>(between.size()),
      [&](int rank) { CHECK_OK(MakeTcpTransport(between[rank], options[rank], &transports[rank])); },
      [&] { between[0]->Abort(1); });
  return transports;
}

std::vector<TcpOptions> Alike(int size, TcpOptions::Use use = TcpOptions::kAlways) {
  TcpOptions options;
  options.use = use;
  options.inside_too = true;
  options.leaving_s = 0.2;
  return std::vector<TcpOptions>(static_cast<size_t>(size), options);
}

Transports MakeTcpTransports(int size) {
  Transports between = MakeThreadTransports(size), transports = MakeTcp(between, Alike(size));
  for (int rank = 0; rank < size; ++rank) {
    CHECK_EQ(std::string(transports[rank]->between_hosts()), size == 1 ? "threads" : "TCP");
  }
  return transports;
}

TEST("tcp: the contract of a transport holds") {
  for (int size : {1, 2, 4}) {
    CheckContract([&](const Contract& part) { RunOn(MakeTcpTransports(size), part); });
  }
}

TEST("tcp: the engine's tests pass") {
  Again(MakeTcpTransports, {"engine: ", "channel: ", "early start: ", "leave: ", "stop: ", "top-k step: messages"});
}

// How many TCP sockets of this process have each congestion control.
std::map<std::string, int> Congestions() {
  std::map<std::string, int> counts;
  for (int fd = 0; fd < 1024; ++fd) {
    char name[16] = "";
    socklen_t length = sizeof(name);
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0) ++counts[name];
  }
  return counts;
}

TEST("tcp: connections have the congestion control that is asked for, or the system's") {
  const std::map<std::string, int> before = Congestions();
  auto options = Alike(3);
  for (TcpOptions& each : options) each.congestion = "reno";
  {
    const Transports transports = MakeTcp(MakeThreadTransports(3), options);
    std::map<std::string, int> expected = before;
    expected["reno"] += 6;  // three connections
    CHECK(Congestions() == expected);
  }
  for (TcpOptions& each : options) each.congestion = "none such";
  MakeTcp(MakeThreadTransports(3), options);
}

TEST("tcp: a rank that does not use it is reached by the other transport") {
  auto options = Alike(4);
  options[2].use = TcpOptions::kNever;
  Transports between = MakeThreadTransports(4), transports = MakeTcp(between, options);
  CHECK(transports[2] == between[2] && transports[0] != between[0]);
  CheckContract([&](const Contract& part) { RunOn(transports, part); });
}

TEST("tcp: connections behind shared memory carry what does not fit into it") {
  for (int64_t capacity : {kRoomyArena, kSmallArena}) {
    Transports transports = ShareMemory(MakeTcpTransports(3), Arenas(3, capacity));
    CheckContract([&](const Contract& part) { RunOn(transports, part); });
  }
}

TEST("tcp: rank 0 decides for all") {
  for (TcpOptions::Use use : {TcpOptions::kNever, TcpOptions::kMeasured}) {
    auto options = Alike(3);
    options[0].use = use;
    Transports between = MakeThreadTransports(3), transports = MakeTcp(between, options);
    bool uses = transports[0] != between[0];
    for (int rank = 0; rank < 3; ++rank) CHECK_EQ(transports[rank] != between[rank], uses);
    if (use == TcpOptions::kNever) CHECK(!uses);
    CheckContract([&](const Contract& part) { RunOn(transports, part); });
  }
}

TEST("tcp: a rank that does not know the job's token is not connected") {
  // Bytes 16 to 31 of the card are the token.
  Transports between = MakeThreadTransports(3), lying = between;
  lying[1] = std::make_shared<Liar>(between[1], 16, 32);  // to rank 0
  Transports transports = MakeTcp(lying, Alike(3));
  CHECK(transports[0] != lying[0] && transports[1] != lying[1]);  // both reach rank 2
  CheckContract([&](const Contract& part) { RunOn(transports, part); });
}

// Two ranks in one thread, which moves both on.
struct Pair {
  Transports transports = MakeTcpTransports(2);
  Transport* operator[](int rank) { return transports[rank].get(); }
};

// Waits for a send of rank 0 and its receive on rank 1.
void Finish(Pair* pair, const std::unique_ptr<Request>& send, const std::unique_ptr<Request>& receive) {
  Until("the end of a message", [&] {
    const bool sent = IsDone((*pair)[0], send);
    return IsDone((*pair)[1], receive) && sent;
  });
}

constexpr int64_t kMore = 24 << 20;  // than the kernel keeps for a connection

TEST("tcp: a message that nobody has asked for waits, and gives way to one that is awaited") {
  Pair pair;
  std::string large(kMore, 'x'), small(1000, 'y'), large_in(kMore, 0), small_in(1000, 0);
  std::unique_ptr<Request> sends[2], receives[2];
  CHECK_OK(pair[0]->Send(1, 1, large.data(), kMore, &sends[0]));
  for (int i = 0; i < 1000; ++i) CHECK(!IsDone(pair[0], sends[0]));
  CHECK_OK(pair[0]->Send(1, 2, small.data(), 1000, &sends[1]));
  CHECK_OK(pair[1]->Recv(0, 2, small_in.data(), 1000, &receives[1]));
  Finish(&pair, sends[1], receives[1]);
  CHECK(small_in == small);
  CHECK(IsDone(pair[0], sends[0]));
  CHECK_OK(pair[1]->Recv(0, 1, large_in.data(), kMore, &receives[0]));
  CHECK(IsDone(pair[1], receives[0]));
  CHECK(large_in == large);
}

TEST("tcp: a receive may come while its message is being stored") {
  Pair pair;
  std::string large(kMore, 'x'), large_in(kMore, 0), small_in(10, 0);
  std::unique_ptr<Request> sends[2], receives[2];
  CHECK_OK(pair[1]->Recv(0, 2, small_in.data(), 10, &receives[1]));
  CHECK_OK(pair[0]->Send(1, 1, large.data(), kMore, &sends[0]));
  CHECK(!IsDone(pair[1], receives[1]));
  CHECK_OK(pair[1]->Recv(0, 1, large_in.data(), kMore, &receives[0]));
  Finish(&pair, sends[0], receives[0]);
  CHECK(large_in == large);
  CHECK_OK(pair[0]->Send(1, 2, large.data(), 10, &sends[1]));
  Finish(&pair, sends[1], receives[1]);
}

TEST("tcp: a send that is dropped half-way is sent to the end, one that has not begun is withdrawn") {
  Pair pair;
  auto large = std::make_unique<std::string>(kMore, 'x');
  std::string small(10, 'y'), large_in(kMore, 0), small_in(10, 0);
  std::unique_ptr<Request> half, unbegun, last, receives[2];
  CHECK_OK(pair[0]->Send(1, 1, large->data(), kMore, &half));
  CHECK_OK(pair[0]->Send(1, 2, large->data(), 10, &unbegun));
  half.reset();
  unbegun.reset();
  large.reset();
  CHECK_OK(pair[0]->Send(1, 2, small.data(), 10, &last));
  CHECK_OK(pair[1]->Recv(0, 1, large_in.data(), kMore, &receives[0]));
  CHECK_OK(pair[1]->Recv(0, 2, small_in.data(), 10, &receives[1]));
  Until("both messages", [&] {
    bool sent = IsDone(pair[0], last), first = IsDone(pair[1], receives[0]);
    return IsDone(pair[1], receives[1]) && first && sent;
  });
  CHECK(large_in == std::string(kMore, 'x') && small_in == small);
}

TEST("tcp: receives that are dropped are forgotten, what comes for them disturbs nobody, and others may outlive all") {
  for (bool begun : {false, true}) {
    std::string large(kMore, 'x'), small(10, 'y'), small_in(10, 0), never(10, 0);
    std::unique_ptr<Request> outlives;
    Pair pair;
    CHECK_OK(pair[0]->Recv(1, 1, never.data(), 10, &outlives));
    auto large_in = std::make_unique<std::string>(kMore, 0);
    std::unique_ptr<Request> sends[2], dropped, receive;
    CHECK_OK(pair[1]->Recv(0, 1, large_in->data(), kMore, &dropped));
    CHECK_OK(pair[0]->Send(1, 1, large.data(), kMore, &sends[0]));
    if (begun) CHECK(!IsDone(pair[1], dropped));
    dropped.reset();
    large_in.reset();
    CHECK_OK(pair[0]->Send(1, 2, small.data(), 10, &sends[1]));
    CHECK_OK(pair[1]->Recv(0, 2, small_in.data(), 10, &receive));
    Finish(&pair, sends[1], receive);
    CHECK(small_in == small);
  }
}

TEST("tcp: a peer that has closed its connection is named by who waits for it, after what it has sent has been read") {
  Pair pair;
  std::string small(10, 'y'), first(10, 0), second(10, 0);
  std::unique_ptr<Request> send, receives[2];
  CHECK_OK(pair[1]->Send(0, 1, small.data(), 10, &send));
  pair[1]->Close();
  CHECK_OK(pair[0]->Recv(1, 1, first.data(), 10, &receives[0]));
  CHECK_OK(pair[0]->Recv(1, 2, second.data(), 10, &receives[1]));
  Until("the message", [&] { return IsDone(pair[0], receives[0]); });
  CHECK(first == small);
  CHECK_FAILS(FailureOf(pair[0], receives[1]), Code::kCommunication, "rank 1: it has closed its connection");
}

}  // namespace
}  // namespace hvd_ext::test

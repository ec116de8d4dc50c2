// Rank 0's matching of calls.
#include "engine/coordinator.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

CallAnnouncement Announced(Kind kind, const std::string& name, int64_t id, const std::vector<int64_t>& shape = {},
                           const std::function<void(CallSpec*)>& change = nullptr, const std::string& payload = "") {
  CallSpec spec;
  spec.kind = kind;
  spec.name = name;
  spec.shape = shape;
  if (change) change(&spec);
  return {spec, id, std::nullopt, payload};
}

CallAnnouncement Barrier(const std::string& name, int64_t id) { return Announced(Kind::kBarrier, name, id); }

CallAnnouncement Allreduce(const std::string& name, int64_t id, const std::string& signature = "",
                           bool counted = false) {
  return Announced(Kind::kAllreduce, name, id, {3}, [&](CallSpec* spec) {
    spec->signature = signature;
    spec->counted = counted;
  });
}

// "peer:type:id ..." of what is to be sent
std::string Told(std::vector<Outgoing>* out) {
  std::string text;
  for (const Outgoing& o : *out) {
    text += std::to_string(o.peer) + ":";
    if (auto* start = std::get_if<CallStart>(&o.message)) text += "start:" + std::to_string(start->id);
    if (auto* refusal = std::get_if<CallRefusal>(&o.message)) text += "refuse:" + std::to_string(refusal->id);
    if (auto* known = std::get_if<CallKnown>(&o.message)) text += "known:" + std::to_string(known->id);
    text += " ";
  }
  out->clear();
  return text;
}

const Status& Refused(const Outgoing& outgoing) { return std::get<CallRefusal>(outgoing.message).status; }

TEST("coordinator: a call starts when the last rank has announced it, each with its own number") {
  Coordinator coordinator(3);
  std::vector<Outgoing> out;
  coordinator.Receive(2, Barrier("a", 7), 0, &out);
  coordinator.Receive(0, Barrier("a", 5), 0, &out);
  CHECK(coordinator.waiting());
  CHECK_EQ(Told(&out), "");
  coordinator.Receive(1, Barrier("a", 9), 0, &out);
  CHECK_EQ(Told(&out), "0:start:5 1:start:9 2:start:7 ");
  CHECK(!coordinator.waiting());
}

TEST("coordinator: the n-th use of a name on one rank meets the n-th on the others, other names overtake") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  for (int64_t id : {1, 2, 3}) coordinator.Receive(0, Barrier("a", id), 0, &out);
  coordinator.Receive(0, Barrier("b", 4), 0, &out);
  coordinator.Receive(1, Barrier("b", 10), 0, &out);
  CHECK_EQ(Told(&out), "0:start:4 1:start:10 ");
  coordinator.Receive(1, Barrier("a", 11), 0, &out);
  CHECK_EQ(Told(&out), "0:start:1 1:start:11 ");
  coordinator.Receive(1, Barrier("a", 12), 0, &out);
  CHECK_EQ(Told(&out), "0:start:2 1:start:12 ");
  CHECK(coordinator.waiting());
}

TEST("coordinator: a rank that leaves ends all that waits, also what it has announced, and all that comes later") {
  Coordinator coordinator(3);
  std::vector<Outgoing> out;
  coordinator.Receive(1, Barrier("a", 1), 0, &out);
  coordinator.Receive(2, Barrier("a", 2), 0, &out);
  coordinator.Leave(2, &out);
  CHECK_EQ(out.size(), 2u);
  CHECK(Refused(out[0]).code == Code::kCommunication);
  CHECK(Refused(out[0]).message.find("barrier 'a': rank 2 has shut down") == 0);
  CHECK_EQ(Told(&out), "1:refuse:1 2:refuse:2 ");
  CHECK(!coordinator.waiting());
  coordinator.Receive(0, Barrier("b", 3), 0, &out);
  CHECK_EQ(Told(&out), "0:refuse:3 ");
  CHECK(!coordinator.waiting());
}

TEST("coordinator: those who wait hear so in every warning time; what is missing is said once; the limit gives words") {
  Coordinator coordinator(3);
  std::vector<Outgoing> out;
  std::vector<std::string> said;
  coordinator.Receive(1, Barrier("a", 6), 100, &out);
  auto watch = [&](double now_s) {
    CHECK_OK(coordinator.Watch(now_s, 60, 0, &out, &said));
    return Told(&out);
  };
  CHECK_EQ(watch(159), "");
  CHECK_EQ(watch(160), "1:known:6 ");
  CHECK_EQ(watch(161), "");
  CHECK_EQ(watch(220), "1:known:6 ");
  const std::string first = "barrier 'a' has waited 60 s for ranks 0, 2 (they have not called it)";
  CHECK(said == std::vector<std::string>{first});
  coordinator.Receive(2, Barrier("a", 8), 221, &out);
  CHECK_EQ(watch(280), "1:known:6 2:known:8 ");
  CHECK_EQ(watch(339), "");
  CHECK_EQ(watch(500), "1:known:6 2:known:8 ");
  CHECK_EQ(watch(501), "");
  CHECK(said == std::vector<std::string>({first, "barrier 'a' has waited 180 s for rank 0 (it has not called it)"}));
  CHECK_FAILS(coordinator.Watch(510, 60, 400, &out, &said), Code::kCommunication,
              "barrier 'a' has waited 410 s for rank 0 (it has not called it)");
  CHECK_OK(coordinator.Watch(510, 0, 0, &out, &said));
  CHECK_EQ(Told(&out), "");
}

TEST("coordinator: an allgather starts with all first dimensions, an exchange with all payloads") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  for (int rank : {1, 0}) {
    coordinator.Receive(rank, Announced(Kind::kAllgather, "g", 0, {rank + 3, 2}), 0, &out);
    coordinator.Receive(rank, Announced(Kind::kExchange, "e", 0, {}, nullptr, rank == 0 ? "zero" : ""), 0, &out);
  }
  CHECK_EQ(out.size(), 4u);
  CHECK(std::get<CallStart>(out[0].message).rows == (std::vector<int64_t>{3, 4}));
  CHECK(std::get<CallStart>(out[2].message).payloads == (std::vector<std::string>{"zero", ""}));
}

TEST("coordinator: two calls of one name at once on one rank are an error on all ranks, and the next use works") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  std::vector<std::string> said;
  coordinator.Receive(1, Allreduce("a", 1), 0, &out);
  coordinator.Receive(1, Allreduce("a", 2), 0, &out);
  CHECK_EQ(out.size(), 2u);
  for (const Outgoing& o : out) CHECK(Refused(o).code == Code::kInvalid);
  CHECK(Refused(out[0]).message.find("allreduce 'a': rank 1 has called it while allreduce 'a' was under way") == 0);
  CHECK_EQ(Told(&out), "1:refuse:1 1:refuse:2 ");
  CHECK_OK(coordinator.Watch(100, 60, 80, &out, &said));  // nobody waits
  CHECK_EQ(Told(&out), "");
  coordinator.Receive(0, Allreduce("a", 3), 0, &out);
  CHECK_EQ(Told(&out), "0:refuse:3 1:refuse:1 ");  // rank 1 is told again, though it has ended the call
  coordinator.Receive(0, Allreduce("a", 4), 0, &out);
  CHECK_EQ(Told(&out), "0:refuse:4 1:refuse:2 ");
  CHECK(!coordinator.waiting());
  coordinator.Receive(0, Allreduce("a", 5), 0, &out);
  coordinator.Receive(1, Allreduce("a", 6), 0, &out);
  CHECK_EQ(Told(&out), "0:start:5 1:start:6 ");
}

TEST("coordinator: calls with counted names at once on one rank are an error on all ranks, other kinds are not") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  coordinator.Receive(0, Allreduce("allreduce.0", 1, "", true), 0, &out);
  coordinator.Receive(0, Allreduce("x", 2), 0, &out);
  coordinator.Receive(0, Allreduce("group.0", 3, "grouped_allreduce", true), 0, &out);
  CHECK_EQ(Told(&out), "");
  coordinator.Receive(0, Allreduce("allreduce.1", 4, "", true), 0, &out);
  CHECK_EQ(Told(&out), "0:refuse:1 0:refuse:4 ");
  coordinator.Receive(1, Allreduce("allreduce.0", 5, "", true), 0, &out);
  CHECK_EQ(Told(&out), "0:refuse:1 1:refuse:5 ");
}

TEST("coordinator: calls that a rank has refused itself do not count as under way") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  std::vector<std::string> said;
  CallAnnouncement refusal = Allreduce("a", -1);
  refusal.refusal = "no";
  coordinator.Receive(1, refusal, 0, &out);
  CHECK_OK(coordinator.Watch(100, 60, 80, &out, &said));
  coordinator.Receive(1, Allreduce("a", 2), 100, &out);
  CHECK_EQ(Told(&out), "");
  coordinator.Receive(0, Allreduce("a", 3), 100, &out);
  CHECK(Refused(out[0]).message == "allreduce 'a': rank 1 has refused it: no");
}

TEST("coordinator: signatures are compared line by line, and their first line is the call's name for people") {
  auto told = [](const std::string& first, const std::string& second) {
    Coordinator coordinator(2);
    std::vector<Outgoing> out;
    coordinator.Receive(0, Allreduce("a", 1, first), 0, &out);
    coordinator.Receive(1, Allreduce("a", 2, second), 0, &out);
    return std::holds_alternative<CallStart>(out[0].message) ? "" : Refused(out[0]).message;
  };
  CHECK_EQ(told("sum\nfactor 1", "sum\nfactor 1"), "");
  CHECK_EQ(told("sum\nfactor 1\nlast", "sum\nfactor 2\nlast"),
           "sum 'a': rank 1 has factor 2, rank 0 has factor 1; all ranks must give the same");
  CHECK_EQ(told("sum\none", "sum\none\ntwo"),
           "sum 'a': rank 1 has two, rank 0 has nothing more; all ranks must give the same");
  CHECK_EQ(told("sum", "allreduce"),
           "sum 'a': rank 1 has allreduce, rank 0 has sum; one name must mean the same collective on all ranks");
}

TEST("coordinator: a dtype that travels in another one is the user's in words and comparisons") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  for (int rank : {0, 1}) {
    auto change = [&](CallSpec* spec) {
      spec->dtype = DType::kBytes;
      spec->users_dtype = rank == 0 ? "bool" : "";
    };
    coordinator.Receive(rank, Announced(Kind::kAllgather, "g", rank, {3}, change), 0, &out);
  }
  CHECK(Refused(out[0]).message.find("allgather 'g': rank 1 has bytes[3], rank 0 has bool[3]") == 0);
}

TEST("coordinator: a process set's calls are named with its ranks") {
  Coordinator coordinator(2, {1, 3});
  std::vector<Outgoing> out;
  std::vector<std::string> said;
  coordinator.Receive(0, Allreduce("a", 1), 0, &out);
  CHECK_FAILS(coordinator.Watch(10, 0, 5, &out, &said), Code::kCommunication,
              "allreduce 'a' in the process set of ranks 1, 3 has waited 10 s for rank 3 (it has not called it)");
}

}  // namespace
}  // namespace hvd_ext::test

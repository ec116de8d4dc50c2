// Rank 0's matching of calls, and the bytes of control messages.
#include <string>
#include <vector>

#include "engine/coordinator.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

Message Barrier(const std::string& name, int64_t id) {
  CallSpec spec;
  spec.kind = Kind::kBarrier;
  spec.name = name;
  return Announce(id, spec, "");
}

// "peer:type:id ..." of what is to be sent
std::string Told(std::vector<Outgoing>* out) {
  std::string text;
  for (const Outgoing& o : *out) {
    text += std::to_string(o.peer) + ":" + std::to_string(static_cast<int>(o.message.type)) + ":" +
            std::to_string(o.message.id) + " ";
  }
  out->clear();
  return text;
}

TEST("coordinator: a call starts when the last rank has announced it, each with its own number") {
  Coordinator coordinator(3);
  std::vector<Outgoing> out;
  coordinator.Receive(2, Barrier("a", 7), 0, &out);
  coordinator.Receive(0, Barrier("a", 5), 0, &out);
  CHECK(coordinator.waiting());
  CHECK_EQ(Told(&out), "");
  coordinator.Receive(1, Barrier("a", 9), 0, &out);
  CHECK_EQ(Told(&out), "0:2:5 1:2:9 2:2:7 ");
  CHECK(!coordinator.waiting());
}

TEST("coordinator: the n-th use of a name on one rank meets the n-th on the others, other names overtake") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  for (int64_t id : {1, 2, 3}) coordinator.Receive(0, Barrier("a", id), 0, &out);
  coordinator.Receive(0, Barrier("b", 4), 0, &out);
  coordinator.Receive(1, Barrier("b", 10), 0, &out);
  CHECK_EQ(Told(&out), "0:2:4 1:2:10 ");
  coordinator.Receive(1, Barrier("a", 11), 0, &out);
  CHECK_EQ(Told(&out), "0:2:1 1:2:11 ");
  coordinator.Receive(1, Barrier("a", 12), 0, &out);
  CHECK_EQ(Told(&out), "0:2:2 1:2:12 ");
  CHECK(coordinator.waiting());
}

TEST("coordinator: a rank that leaves ends all that waits, also what it has announced, and all that comes later") {
  Coordinator coordinator(3);
  std::vector<Outgoing> out;
  coordinator.Receive(1, Barrier("a", 1), 0, &out);
  coordinator.Receive(2, Barrier("a", 2), 0, &out);
  coordinator.Leave(2, &out);
  CHECK_EQ(out.size(), 2u);
  CHECK(out[0].message.code == Code::kCommunication);
  CHECK(out[0].message.text.find("barrier 'a': rank 2 has shut down") == 0);
  CHECK_EQ(Told(&out), "1:3:1 2:3:2 ");
  CHECK(!coordinator.waiting());
  coordinator.Receive(0, Barrier("b", 3), 0, &out);
  CHECK_EQ(Told(&out), "0:3:3 ");
  CHECK(!coordinator.waiting());
}

TEST("coordinator: warnings come once in every warning time, to those who wait; the limit gives words") {
  Coordinator coordinator(3);
  std::vector<Outgoing> out;
  coordinator.Receive(1, Barrier("a", 6), 100, &out);
  auto watch = [&](double now_s) {
    CHECK_OK(coordinator.Watch(now_s, 60, 0, &out));
    return Told(&out);
  };
  CHECK_EQ(watch(159), "");
  CHECK_EQ(watch(160), "1:4:6 ");
  CHECK_EQ(watch(161), "");
  coordinator.Receive(2, Barrier("a", 8), 170, &out);
  CHECK_EQ(watch(225), "1:4:6 2:4:8 ");
  CHECK_EQ(watch(279), "");
  CHECK_EQ(watch(500), "1:4:6 2:4:8 ");
  CHECK_EQ(watch(501), "");
  CHECK_FAILS(coordinator.Watch(510, 60, 400, &out), Code::kCommunication,
              "barrier 'a' has waited 410 s for rank 0 (it has not called it)");
  CHECK_OK(coordinator.Watch(510, 0, 0, &out));
  CHECK_EQ(Told(&out), "");
}

TEST("coordinator: an allgather starts with all first dimensions, an exchange with all payloads") {
  Coordinator coordinator(2);
  std::vector<Outgoing> out;
  for (int rank : {1, 0}) {
    CallSpec spec;
    spec.kind = Kind::kAllgather;
    spec.name = "g";
    spec.shape = {rank + 3, 2};
    coordinator.Receive(rank, Announce(0, spec, ""), 0, &out);
    spec.kind = Kind::kExchange;
    spec.name = "e";
    spec.shape = {};
    coordinator.Receive(rank, Announce(0, spec, rank == 0 ? "zero" : ""), 0, &out);
  }
  CHECK_EQ(out.size(), 4u);
  CHECK(out[0].message.numbers == (std::vector<int64_t>{3, 4}));
  CHECK(out[2].message.texts == (std::vector<std::string>{"zero", ""}));
}

TEST("messages: every field comes back as it was") {
  Message message;
  message.type = MessageType::kReport;
  message.id = -5;
  message.code = Code::kMismatch;
  message.text = std::string("a\0b", 3);
  message.numbers = {1, -2, int64_t{1} << 60, 4};
  message.texts = {"", std::string(100000, 'x')};
  Message read;
  CHECK_OK(Decode(Encode(message), &read));
  CHECK(read.type == message.type && read.id == message.id && read.code == message.code && read.text == message.text);
  CHECK(read.numbers == message.numbers && read.texts == message.texts);
}

TEST("messages: bytes that are cut short, too long, of no type or without what the type needs are refused") {
  CallSpec spec;
  spec.shape = {1, 2};
  std::string bytes = Encode(Announce(1, spec, "payload"));
  Message read;
  CHECK_OK(Decode(bytes, &read));
  for (size_t n = 0; n < bytes.size(); ++n)
    CHECK_FAILS(Decode(bytes.substr(0, n), &read), Code::kInternal, "do all ranks run");
  CHECK_FAILS(Decode(bytes + "x", &read), Code::kInternal, "bytes)");
  Message message;
  message.type = static_cast<MessageType>(99);
  CHECK_FAILS(Decode(Encode(message), &read), Code::kInternal, "cut short or too long");
  for (MessageType type : {MessageType::kAnnounce, MessageType::kReport, MessageType::kAsk, MessageType::kLaneClosed,
                           MessageType::kProbe, MessageType::kVerdict}) {
    message.type = type;
    CHECK(!Decode(Encode(message), &read).ok());
  }
  std::string huge = Encode(Message{});
  huge[huge.size() - 9] = 0x7f;  // a count of numbers that no memory holds
  CHECK(!Decode(huge, &read).ok());
}

}  // namespace
}  // namespace hvd_ext::test

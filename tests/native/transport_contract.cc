#include "transport_contract.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/buffer_pool.h"
#include "harness.h"
#include "ranks.h"

namespace hvd_ext::test {
namespace {

using Requests = std::vector<std::unique_ptr<Request>>;

// Several of MPI's parts. The thread sanitizer pays several times for each fresh page of a message.
#if defined(__SANITIZE_THREAD__)
constexpr int64_t kLong = 500037;
#else
constexpr int64_t kLong = 4000037;
#endif

// The bytes of the n-th message from one rank to another, which begin with those of no other: a block of noise, whose
// length divides that of no part of a message, again and again.
std::string Payload(int from, int to, int n, int64_t nbytes) {
  uint64_t block[513];
  uint64_t state = 1 + from * uint64_t{7919} + to * uint64_t{104729} + n * uint64_t{1299709};
  for (uint64_t& word : block) word = state = state * 6364136223846793005u + 1442695040888963407u;
  std::string payload(static_cast<size_t>(nbytes), '\0');
  for (size_t at = 0; at < payload.size(); at += sizeof(block)) {
    std::memcpy(&payload[at], block, std::min(sizeof(block), payload.size() - at));
  }
  return payload;
}

// A message in memory that the ranks of a host share, as the engine makes it.
Buffer InArena(Transport* transport, const std::string& data) {
  Buffer buffer = BufferPool(transport->arena()).Take(static_cast<int64_t>(data.size()));
  std::memcpy(buffer.data(), data.data(), data.size());
  return buffer;
}

void Send(Transport* transport, int peer, int tag, const std::string& data, Requests* requests) {
  CHECK_OK(transport->Send(peer, tag, data.data(), static_cast<int64_t>(data.size()), &requests->emplace_back()));
}

void Recv(Transport* transport, int peer, int tag, std::string* data, Requests* requests) {
  CHECK_OK(transport->Recv(peer, tag, data->data(), static_cast<int64_t>(data->size()), &requests->emplace_back()));
}

// Sends messages of these lengths to every other rank, the n-th with the tag tag_of(n), receives as many, and compares.
void Exchange(Transport* transport, const std::vector<int64_t>& lengths, const std::function<int(int)>& tag_of,
              bool receive_backwards = false) {
  int me = transport->rank(), size = transport->size(), count = static_cast<int>(lengths.size());
  std::vector<std::vector<std::string>> sent(size), received(size);
  std::vector<Buffer> in_arena;
  Requests requests;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == me) continue;
    received[peer].resize(count);
    for (int i = 0; i < count; ++i) {
      int n = receive_backwards ? count - 1 - i : i;
      received[peer][n].resize(static_cast<size_t>(lengths[n]));
      Recv(transport, peer, tag_of(n), &received[peer][n], &requests);
    }
  }
  for (int peer = 0; peer < size; ++peer) {
    if (peer == me) continue;
    for (int n = 0; n < count; ++n) sent[peer].push_back(Payload(me, peer, n, lengths[n]));
    for (int n = 0; n < count; ++n) {
      // Shared and other memory in one order, most of it shared.
      if (n % 4 == 1) {
        Send(transport, peer, tag_of(n), sent[peer][n], &requests);
      } else {
        in_arena.push_back(InArena(transport, sent[peer][n]));
        CHECK_OK(transport->Send(peer, tag_of(n), in_arena.back().data(), lengths[n], &requests.emplace_back()));
      }
    }
  }
  Finish(transport, requests);
  for (int peer = 0; peer < size; ++peer) {
    for (int n = 0; n < count && peer != me; ++n) {
      if (received[peer][n] != Payload(peer, me, n, lengths[n])) {
        throw Failure("message " + std::to_string(n) + " from rank " + std::to_string(peer) + " to rank " +
                      std::to_string(me) + " has other bytes than were sent");
      }
    }
  }
}

// Every pair exchanges messages of many lengths at once, from 0 bytes to several of MPI's parts.
void MessagesArriveWhole(Transport* transport) {
  Exchange(transport, {0, 1, 3, 1000, 59999, 60000, 60001, 120000, 300001, kLong}, [](int n) { return 10 + n; });
}

// Messages of one sender, receiver and tag match receives in order, however long each is.
void MessagesOfOneTagKeepTheirOrder(Transport* transport) {
  Exchange(transport, {5, 200000, 0, 60000, 1, 70000, 70000, 4, 180000, 59999}, [](int) { return 3; });
}

// Messages with the largest tag that the transport names arrive.
void TheLargestTagCarriesMessages(Transport* transport) {
  CHECK(transport->largest_tag() >= 32767);  // the least that MPI's standard allows
  Exchange(transport, {10, 100000}, [&](int) { return static_cast<int>(transport->largest_tag()); });
}

// Tags may be received in another order than sent.
void TagsAreIndependent(Transport* transport) {
  Exchange(transport, {100, 150000, 7, 61000, 2}, [](int n) { return n; }, /*receive_backwards=*/true);
}

// A ring of large messages in both directions at once.
void OpposingLargeMessagesDoNotBlock(Transport* transport) {
  int me = transport->rank(), size = transport->size();
  if (size == 1) return;
  constexpr int64_t kNbytes = 4 * kLong;
  int next = (me + 1) % size, previous = (me + size - 1) % size;
  std::string to_next = Payload(me, next, 1, kNbytes), to_previous = Payload(me, previous, 2, kNbytes);
  std::string from_next(kNbytes, '\0'), from_previous(kNbytes, '\0');
  Requests requests;
  Recv(transport, next, 2, &from_next, &requests);
  Recv(transport, previous, 1, &from_previous, &requests);
  Send(transport, next, 1, to_next, &requests);
  Send(transport, previous, 2, to_previous, &requests);
  Finish(transport, requests);
  CHECK(from_next == Payload(next, me, 2, kNbytes));
  CHECK(from_previous == Payload(previous, me, 1, kNbytes));
}

// All control messages are sent before the first is received; some empty, some long, some to the rank itself.
void ControlMessagesKeepTheirOrder(Transport* transport) {
  constexpr int kMessages = 100;
  auto length = [](int n) -> int64_t { return n % 50 == 7 ? 150001 : n % 10 == 3 ? 0 : n % 50 == 9 ? 60000 : n; };
  int me = transport->rank(), size = transport->size();
  for (int n = 0; n < kMessages; ++n) {
    for (int peer = 0; peer < size; ++peer) CHECK_OK(transport->SendControl(peer, Payload(me, peer, n, length(n))));
  }
  std::vector<int> next(size, 0);
  for (int i = 0; i < kMessages * size; ++i) {
    auto [peer, message] = NextControl(transport);
    int n = next.at(peer)++;
    if (message != Payload(peer, me, n, length(n))) {
      throw Failure("control message " + std::to_string(n) + " of rank " + std::to_string(peer) + " has " +
                    std::to_string(message.size()) + " bytes, other than were sent (" + std::to_string(length(n)) +
                    ")");
    }
  }
}

// ReceiveControl says at once that nothing has arrived.
void NoControlMessageMeansMinusOne(Transport* transport) {
  int peer = 5;
  std::string message;
  CHECK_OK(transport->ReceiveControl(&peer, &message));
  CHECK_EQ(peer, -1);
}

// Data and control under way together do not meet.
void DataAndControlDoNotMeet(Transport* transport) {
  int me = transport->rank(), size = transport->size();
  for (int peer = 0; peer < size; ++peer) CHECK_OK(transport->SendControl(peer, "from " + std::to_string(me)));
  Exchange(transport, {9, 70000, 9}, [](int n) { return n % 2; });  // the tags that the MPI transport's control uses
  std::set<int> heard;
  for (int i = 0; i < size; ++i) {
    auto [peer, message] = NextControl(transport);
    CHECK_EQ(message, "from " + std::to_string(peer));
    heard.insert(peer);
  }
  CHECK_EQ(static_cast<int>(heard.size()), size);
}

// A message received without a copy is whole, and its send ends when the receiver lets go of it.
void MessagesReceivedWithoutACopyStay(Transport* transport) {
  int me = transport->rank(), size = transport->size(), next = (me + 1) % size, previous = (me + size - 1) % size;
  if (size == 1) return;
  for (int64_t nbytes : {1, 96, 97, 60001, 1000003}) {
    for (bool in_arena : {true, false}) {
      std::string sent = Payload(me, next, 1, nbytes), expected = Payload(previous, me, 1, nbytes);
      std::string received(expected.size(), '\0');
      Buffer shared = InArena(transport, sent);
      Requests receive(1), send(1);
      bool zero_copy = transport->IsZeroCopy(previous);
      CHECK_OK(transport->Recv(previous, 4, zero_copy ? nullptr : received.data(), nbytes, &receive[0]));
      CHECK_OK(transport->Send(next, 4, in_arena ? shared.data() : sent.data(), nbytes, &send[0]));
      Finish(transport, receive);
      const char* view = zero_copy ? transport->Received(receive[0].get()) : received.data();
      CHECK(view != nullptr);
      CHECK(std::memcmp(view, expected.data(), expected.size()) == 0);
      receive.clear();
      Finish(transport, send);
    }
  }
}

// A message of another run, or of another segment of it, is never given to a receive, however long it is: the receive
// fails, and its words name both.
void MessagesOfOtherRunsAreRefused(Transport* transport) {
  int me = transport->rank(), size = transport->size();
  if (size == 1) return;
  int next = (me + 1) % size, previous = (me + size - 1) % size, tag = 9;
  transport->NameBy([](const Label& label) { return "call " + std::to_string(label.run); });
  std::vector<Buffer> sent;  // a refused message may stay under way: the engine fails, and keeps its memory
  Requests sends;
  for (bool same_run : {false, true}) {
    for (auto [nbytes, expected] :
         std::vector<std::pair<int64_t, int64_t>>{{8, 8}, {300000, 300000}, {8, 300000}, {300000, 8}}) {
      for (bool zero_copy : {false, true}) {
        std::string received(static_cast<size_t>(expected), '\0');
        char* to = zero_copy && transport->IsZeroCopy(previous) ? nullptr : received.data();
        Label theirs(tag, 17, same_run ? 3 : 0), mine(tag, same_run ? 17 : 18, 0);
        ++tag;  // the rest of a refused message must meet no other receive
        Requests receives;
        CHECK_OK(transport->Recv(previous, mine, to, expected, &receives.emplace_back()));
        sent.push_back(InArena(transport, Payload(me, 0, 0, nbytes)));
        CHECK_OK(transport->Send(next, theirs, sent.back().data(), nbytes, &sends.emplace_back()));
        const Status status = FailureOf(transport, receives[0]);
        std::string other = same_run ? "call 17, segment 3" : "call 17";
        CHECK_FAILS(status, Code::kInternal,
                    "a message from rank " + std::to_string(previous) + " belongs to " + other + ", but call " +
                        (same_run ? "17" : "18") + " was to receive it");
      }
    }
  }
  transport->NameBy(nullptr);
  Meet(transport);  // a send that is dropped before its receive is posted is withdrawn
}

// A message shorter than expected is reported as a bug, with its peer and both lengths.
void ShortMessagesAreReported(Transport* transport) {
  int me = transport->rank(), size = transport->size();
  if (size == 1) return;
  std::string payload = Payload(me, 0, 0, 100), received(101, '\0');
  Buffer sent = InArena(transport, payload);
  int next = (me + 1) % size, previous = (me + size - 1) % size;
  Requests sends, receives;
  Recv(transport, previous, 8, &received, &receives);
  CHECK_OK(transport->Send(next, 8, sent.data(), 100, &sends.emplace_back()));
  const Status status = FailureOf(transport, receives[0]);
  for (const std::string& word : {"rank " + std::to_string(previous), std::string("100"), std::string("101")}) {
    CHECK_FAILS(status, Code::kInternal, word);
  }
  Until("the end of a send", [&] {
    bool done = false;
    return !transport->Test(sends[0].get(), &done).ok() || done;
  });
}

}  // namespace

void CheckContract(const std::function<void(const Contract&)>& run) {
  const std::pair<const char*, void (*)(Transport*)> parts[] = {
      {"messages arrive whole", MessagesArriveWhole},
      {"messages of one tag keep their order", MessagesOfOneTagKeepTheirOrder},
      {"the largest tag carries messages", TheLargestTagCarriesMessages},
      {"tags are independent", TagsAreIndependent},
      {"opposing large messages do not block", OpposingLargeMessagesDoNotBlock},
      {"control messages keep their order", ControlMessagesKeepTheirOrder},
      {"no control message means -1", NoControlMessageMeansMinusOne},
      {"data and control do not meet", DataAndControlDoNotMeet},
      {"messages received without a copy stay until the receiver lets go", MessagesReceivedWithoutACopyStay},
      {"messages of other runs are refused", MessagesOfOtherRunsAreRefused},
      {"short messages are reported", ShortMessagesAreReported}};
  for (const auto& [sentence, contract] : parts) {
    try {
      run([part = contract](Transport* transport) {
        part(transport);
        Meet(transport);  // no rank sends the next part's messages before
      });
    } catch (const std::exception& error) {
      throw Failure(std::string(sentence) + ": " + error.what());
    }
  }
}

void Meet(Transport* transport) {
  // By data messages, because a control message of the next test, from a rank that is ahead, may arrive during this
  // one.
  constexpr int kTag = 1000;
  static char sent = 1;
  std::vector<char> received(transport->size(), 0);
  Requests requests;
  for (int peer = 0; peer < transport->size(); ++peer) {
    if (peer == transport->rank()) continue;
    CHECK_OK(transport->Recv(peer, kTag, &received[peer], 1, &requests.emplace_back()));
    CHECK_OK(transport->Send(peer, kTag, &sent, 1, &requests.emplace_back()));
  }
  Finish(transport, requests);
  Until("the end of the control messages", [&] { return !transport->ControlPending(); });
}

}  // namespace hvd_ext::test

// Messages between hosts over connections of our own, in front of another transport. The kernel copies a message once
// on each side, straight from and into the caller's memory; MPI over TCP copies it through its own fragments as well.
//
// A message is a header and its bytes. One that no receive has asked for yet stays in the kernel, and its sender waits,
// until either its receive is posted or a receive for something behind it is. Only then is it stored here.
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/swap.h"
#include "engine/tcp_peers.h"
#include "engine/transport.h"

namespace hvd_ext {
namespace {

using Clock = std::chrono::steady_clock;

// A message of up to this size arrives with its header in one call; the rest of a longer one is received in place.
constexpr size_t kAhead = 16 << 10;
// One call of Test moves about this much, so that no peer keeps the engine from the others.
constexpr int64_t kNbytesPerTest = 8 << 20;
constexpr uint32_t kLooks = 16;  // tests of messages that have not ended, until all connections are looked at

struct Header {
  int32_t tag;
  uint32_t run, segment;
  uint32_t unused;
  int64_t nbytes;
};
static_assert(sizeof(Header) == 24, "without gaps");

class Streams;

struct TcpRequest : RequestInFront {
  TcpRequest(std::shared_ptr<Streams> streams, int peer, const Label& label, char* data, int64_t nbytes)
      : RequestInFront(peer, label, data, nbytes), streams(std::move(streams)) {}
  ~TcpRequest() override;

  const std::shared_ptr<Streams> streams;
  bool receives = false;
};

// A message that is being sent.
struct Outgoing {
  Header header;
  const char* data;
  int64_t sent = 0;     // of the header and the message
  TcpRequest* request;  // null: it has been dropped, and `own` has what is left of the message
  std::unique_ptr<char[]> own;
};

// A message that has come before its receive, or that no receive will take.
struct Stored {
  Header header;
  std::unique_ptr<char[]> bytes;
  bool whole = false;
  TcpRequest* taker = nullptr;  // the receive that takes it once it is whole
};

// What waits for its counterpart, of one tag: either messages or receives.
struct Waiting {
  std::deque<std::shared_ptr<Stored>> messages;
  std::deque<TcpRequest*> receives;
};

struct Peer {
  explicit Peer(int socket) : socket(socket), ahead(kAhead) {}
  ~Peer() { close(socket); }

  const int socket;
  std::deque<Outgoing> outgoing;
  std::unordered_map<int, Waiting> waiting;
  size_t awaited = 0;  // receives that have met no message

  // The bytes that have been received ahead: [begin, end).
  std::vector<char> ahead;
  size_t begin = 0, end = 0;
  // The message that is arriving.
  bool has_header = false;
  Header header{};
  char* into = nullptr;  // null: no receive is posted
  int64_t got = 0;
  TcpRequest* receive = nullptr;  // one of these two
  std::shared_ptr<Stored> stored;

  bool reads = true;  // false: what comes makes no sense
  std::string gone;   // why there is no more to come; empty: the connection works
  Clock::time_point gone_at{};
};

// The connections of a rank; they outlive the transport as long as requests are kept.
class Streams : public std::enable_shared_from_this<Streams> {
 public:
  Streams(std::shared_ptr<Transport> between, const std::vector<int>& sockets, double leaving_s)
      : between_(std::move(between)), leaving_s_(leaving_s) {
    for (int socket : sockets) peers_.push_back(socket < 0 ? nullptr : std::make_unique<Peer>(socket));
  }

  const std::shared_ptr<Transport>& between() const { return between_; }
  bool Reaches(int peer) const {
    return peer >= 0 && peer < static_cast<int>(peers_.size()) && peers_[static_cast<size_t>(peer)] != nullptr;
  }

  Status Send(int rank, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) {
    auto mine = NewRequest(rank, label, nullptr, nbytes);
    mine->done = nbytes == 0;
    if (nbytes > 0) {
      Peer* peer = Find(rank);
      Header header{label.tag, label.run, label.segment, 0, nbytes};
      peer->outgoing.push_back({header, static_cast<const char*>(data), 0, mine.get(), nullptr});
      if (peer->outgoing.size() == 1) Push(peer);
    }
    *request = std::move(mine);
    return Status::Ok();
  }

  Status Recv(int rank, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) {
    auto mine = NewRequest(rank, label, static_cast<char*>(data), nbytes);
    mine->receives = true;
    mine->done = nbytes == 0;
    if (nbytes > 0) {
      Peer* peer = Find(rank);
      Waiting& waiting = peer->waiting[label.tag];
      if (waiting.messages.empty()) {
        mine->waits = true;
        waiting.receives.push_back(mine.get());
        ++peer->awaited;
      } else {
        std::shared_ptr<Stored> stored = std::move(waiting.messages.front());
        waiting.messages.pop_front();
        if (IsExpected(mine.get(), stored->header)) {
          if (stored->whole) {
            Deliver(mine.get(), *stored);
          } else {
            stored->taker = mine.get();
          }
        }
      }
    }
    *request = std::move(mine);
    return Status::Ok();
  }

  Status Test(TcpRequest* request, bool* done) {
    HVD_EXT_RETURN_IF_ERROR(request->TestCarried(between_.get()));
    Peer* peer = request->done || !Reaches(request->peer) ? nullptr : Find(request->peer);
    if (peer != nullptr) {
      request->receives ? Pull(peer) : Push(peer);
      // The engine tests all that is under way; who waits for one message alone still moves the others on.
      if (!request->done && ++looks_ % kLooks == 0) MoveAll();
    }
    if (!request->error.empty()) return Internal(request->error);
    *done = request->done;
    if (!*done && peer != nullptr && !peer->gone.empty() &&
        std::chrono::duration<double>(Clock::now() - peer->gone_at).count() > leaving_s_) {
      return Communication("rank " + std::to_string(request->peer) + ": " + peer->gone);
    }
    return Status::Ok();
  }

  // A request ends, whatever has become of it.
  void Forget(TcpRequest* request) {
    if (request->done || !Reaches(request->peer)) return;
    Peer* peer = Find(request->peer);
    if (!request->receives) {
      auto of_request = [request](const Outgoing& one) { return one.request == request; };
      auto found = std::find_if(peer->outgoing.begin(), peer->outgoing.end(), of_request);
      if (found == peer->outgoing.end()) return;
      if (found->sent == 0) {
        peer->outgoing.erase(found);
        return;
      }
      // The peer has a part of it, and the next message can only follow the whole.
      found->request = nullptr;
      found->own.reset(new char[static_cast<size_t>(found->header.nbytes)]);
      std::memcpy(found->own.get(), found->data, static_cast<size_t>(found->header.nbytes));
      found->data = found->own.get();
    } else if (request->waits) {
      std::deque<TcpRequest*>& receives = peer->waiting[request->label.tag].receives;
      receives.erase(std::find(receives.begin(), receives.end(), request));
      --peer->awaited;
    } else if (peer->receive == request) {
      peer->receive = nullptr;
      peer->stored = Store(peer->header);
      peer->into = peer->stored->bytes.get();
    } else if (peer->stored != nullptr && peer->stored->taker == request) {
      peer->stored->taker = nullptr;
    }
  }

  // No message follows; the peers learn it when they have read what was sent before.
  void Close() {
    for (std::unique_ptr<Peer>& peer : peers_) {
      if (peer != nullptr) shutdown(peer->socket, SHUT_WR);
    }
  }

 private:
  Peer* Find(int peer) const { return peers_[static_cast<size_t>(peer)].get(); }

  std::unique_ptr<TcpRequest> NewRequest(int peer, const Label& label, char* data, int64_t nbytes) {
    return std::make_unique<TcpRequest>(shared_from_this(), peer, label, data, nbytes);
  }

  static std::shared_ptr<Stored> Store(const Header& header) {
    auto stored = std::make_shared<Stored>();
    stored->header = header;
    stored->bytes.reset(new char[static_cast<size_t>(header.nbytes)]);
    return stored;
  }

  static void Deliver(TcpRequest* request, const Stored& stored) {
    std::memcpy(request->data, stored.bytes.get(), static_cast<size_t>(request->nbytes));
    request->done = true;
  }

  bool IsExpected(TcpRequest* request, const Header& header) const {
    return request->Expects(*between_, Label(header.tag, header.run, header.segment), header.nbytes);
  }

  static void Lose(Peer* peer, const std::string& why) {
    if (!peer->gone.empty()) return;
    peer->gone = why;
    peer->gone_at = Clock::now();
  }

  void MoveAll() {
    for (std::unique_ptr<Peer>& peer : peers_) {
      if (peer == nullptr) continue;
      Push(peer.get());
      Pull(peer.get());
    }
  }

  // Sends what the kernel takes.
  static void Push(Peer* peer) {
    constexpr int64_t kHeader = sizeof(Header);
    int64_t budget = kNbytesPerTest;
    while (!peer->outgoing.empty() && peer->gone.empty() && budget > 0) {
      Outgoing& front = peer->outgoing.front();
      const int64_t of_data = std::max<int64_t>(front.sent - kHeader, 0);
      iovec parts[2];
      int count = 0;
      if (front.sent < kHeader) {
        parts[count++] = {reinterpret_cast<char*>(&front.header) + front.sent,
                          static_cast<size_t>(kHeader - front.sent)};
      }
      parts[count++] = {const_cast<char*>(front.data) + of_data, static_cast<size_t>(front.header.nbytes - of_data)};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = static_cast<size_t>(count);
      ssize_t sent = sendmsg(peer->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN) Lose(peer, std::string("its connection is broken: ") + std::strerror(errno));
        return;
      }
      front.sent += sent;
      budget -= sent;
      if (front.sent < kHeader + front.header.nbytes) continue;
      if (front.request != nullptr) front.request->done = true;
      peer->outgoing.pop_front();
    }
  }

  // Receives what has come, as far as receives wait for it.
  void Pull(Peer* peer) {
    int64_t budget = kNbytesPerTest;
    while (budget > 0 && peer->reads && peer->awaited + (peer->into != nullptr) > 0) {
      if (!peer->has_header && !TakeHeader(peer)) return;
      if (peer->into == nullptr && !FindPlace(peer)) return;
      const int64_t before = peer->got;
      if (!TakeBytes(peer)) return;
      budget -= peer->got - before;
      if (peer->got == peer->header.nbytes) EndMessage(peer);
    }
  }

  static bool TakeHeader(Peer* peer) {
    while (peer->end - peer->begin < sizeof(Header)) {
      std::memmove(peer->ahead.data(), peer->ahead.data() + peer->begin, peer->end - peer->begin);
      peer->end -= std::exchange(peer->begin, 0);
      ssize_t got = Receive(peer, peer->ahead.data() + peer->end, peer->ahead.size() - peer->end);
      if (got <= 0) return false;
      peer->end += static_cast<size_t>(got);
    }
    std::memcpy(&peer->header, peer->ahead.data() + peer->begin, sizeof(Header));
    peer->begin += sizeof(Header);
    if (peer->header.nbytes <= 0) {
      peer->reads = false;
      Lose(peer, "it has sent a message of " + std::to_string(peer->header.nbytes) + " bytes");
      return false;
    }
    peer->has_header = true;
    peer->got = 0;
    return true;
  }

  // Finds where the message that arrives goes.
  bool FindPlace(Peer* peer) {
    Waiting& waiting = peer->waiting[peer->header.tag];
    if (!waiting.receives.empty()) {
      TcpRequest* request = waiting.receives.front();
      waiting.receives.pop_front();
      request->waits = false;
      --peer->awaited;
      if (IsExpected(request, peer->header)) {
        peer->receive = request;
        peer->into = request->data;
        return true;
      }
      peer->stored = Store(peer->header);  // read, and dropped
    } else if (peer->awaited > 0) {
      peer->stored = Store(peer->header);
      waiting.messages.push_back(peer->stored);
    } else {
      return false;
    }
    peer->into = peer->stored->bytes.get();
    return true;
  }

  // False where nothing more has come.
  static bool TakeBytes(Peer* peer) {
    const int64_t left = peer->header.nbytes - peer->got;
    const int64_t here = std::min(left, static_cast<int64_t>(peer->end - peer->begin));
    if (here > 0) {
      std::memcpy(peer->into + peer->got, peer->ahead.data() + peer->begin, static_cast<size_t>(here));
      peer->begin += static_cast<size_t>(here);
      peer->got += here;
      return true;
    }
    ssize_t got = Receive(peer, peer->into + peer->got, static_cast<size_t>(left));
    if (got <= 0) return false;
    peer->got += got;
    return true;
  }

  static void EndMessage(Peer* peer) {
    if (peer->receive != nullptr) peer->receive->done = true;
    if (peer->stored != nullptr) {
      peer->stored->whole = true;
      if (peer->stored->taker != nullptr) Deliver(peer->stored->taker, *peer->stored);
    }
    peer->receive = nullptr;
    peer->stored.reset();
    peer->into = nullptr;
    peer->has_header = false;
  }

  // Also from a peer that is gone: what it sent before is good.
  static ssize_t Receive(Peer* peer, char* to, size_t nbytes) {
    ssize_t got = 0;
    do {
      got = recv(peer->socket, to, nbytes, MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    if (got == 0) Lose(peer, "it has closed its connection");
    if (got < 0 && errno != EAGAIN) Lose(peer, std::string("its connection is broken: ") + std::strerror(errno));
    return got;
  }

  const std::shared_ptr<Transport> between_;
  const double leaving_s_;
  uint32_t looks_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank
};

TcpRequest::~TcpRequest() {
  streams->Forget(this);
  carried.reset();  // the streams, which may go with this request, have the transport behind
}

class TcpTransport : public TransportInFront {
 public:
  explicit TcpTransport(std::shared_ptr<Streams> streams)
      : TransportInFront(streams->between()), streams_(std::move(streams)) {}
  ~TcpTransport() override { streams_->Close(); }

  const char* between_hosts() const override { return "TCP"; }

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    if (streams_->Reaches(peer)) return streams_->Send(peer, label, data, nbytes, request);
    return behind()->Send(peer, label, data, nbytes, Carried(NewRequest(peer, label, nbytes), request));
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    if (streams_->Reaches(peer)) return streams_->Recv(peer, label, data, nbytes, request);
    return behind()->Recv(peer, label, data, nbytes, Carried(NewRequest(peer, label, nbytes), request));
  }
  Status Test(Request* request, bool* done) override { return streams_->Test(static_cast<TcpRequest*>(request), done); }
  void Close() override {
    streams_->Close();
    TransportInFront::Close();
  }

 private:
  std::unique_ptr<TcpRequest> NewRequest(int peer, const Label& label, int64_t nbytes) const {
    return std::make_unique<TcpRequest>(streams_, peer, label, nullptr, nbytes);
  }

  const std::shared_ptr<Streams> streams_;
};

// The time of the fastest of some exchanges with a peer, which calls it too.
Status TimeExchange(Transport* transport, int peer, double* seconds) {
  constexpr int kTimes = 4;
  constexpr size_t kNbytes = 500000;
  std::vector<char> out(kNbytes), in(kNbytes);
  *seconds = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kTimes; ++i) {
    const Clock::time_point begin = Clock::now();
    std::unique_ptr<Request> requests[2];
    HVD_EXT_RETURN_IF_ERROR(transport->Recv(peer, kSwapTag, in.data(), kNbytes, &requests[0]));
    HVD_EXT_RETURN_IF_ERROR(transport->Send(peer, kSwapTag, out.data(), kNbytes, &requests[1]));
    for (bool done[2] = {false, false}; !done[0] || !done[1]; std::this_thread::yield()) {
      for (int j = 0; j < 2; ++j) {
        if (!done[j]) HVD_EXT_RETURN_IF_ERROR(transport->Test(requests[j].get(), &done[j]));
      }
    }
    *seconds = std::min(*seconds, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return Status::Ok();
}

// What rank 0 tells each of the others about the choice.
enum Verdict : int64_t { kOther = 0, kTcp = 1, kMeasure = 2 };

// Rank 0 decides for all ranks. To measure, it compares the two transports with the first rank that it reaches by both.
Status Choose(Transport* tcp, Transport* between, const std::vector<int>& sockets, TcpOptions::Use use, bool* chosen) {
  const int rank = between->rank(), size = between->size();
  double seconds[2] = {0, 0};
  auto time_both = [&](int peer) {
    HVD_EXT_RETURN_IF_ERROR(TimeExchange(between, peer, &seconds[0]));
    return TimeExchange(tcp, peer, &seconds[1]);
  };
  auto tell = [&](int64_t verdict, int from, int to) {
    std::vector<std::unique_ptr<Request>> requests;
    for (int other = from; other < to; ++other) {
      HVD_EXT_RETURN_IF_ERROR(between->Send(other, kSwapTag, &verdict, sizeof(verdict), &requests.emplace_back()));
    }
    return Await(between, &requests);
  };
  if (rank == 0) {
    *chosen = use != TcpOptions::kNever;
    auto reached = std::find_if(sockets.begin(), sockets.end(), [](int socket) { return socket >= 0; });
    if (use == TcpOptions::kMeasured && reached != sockets.end()) {
      const int partner = static_cast<int>(reached - sockets.begin());
      HVD_EXT_RETURN_IF_ERROR(tell(kMeasure, partner, partner + 1));
      HVD_EXT_RETURN_IF_ERROR(time_both(partner));
      // Where both use the same wire and take the same time, ours takes less of the processor.
      constexpr double kMuchFaster = 0.8;
      *chosen = seconds[0] > kMuchFaster * seconds[1];
    }
    return tell(*chosen ? kTcp : kOther, 1, size);
  }
  int64_t verdict = kMeasure;
  while (verdict == kMeasure) {
    std::vector<std::unique_ptr<Request>> requests(1);
    HVD_EXT_RETURN_IF_ERROR(between->Recv(0, kSwapTag, &verdict, sizeof(verdict), &requests[0]));
    HVD_EXT_RETURN_IF_ERROR(Await(between, &requests));
    if (verdict == kMeasure) HVD_EXT_RETURN_IF_ERROR(time_both(0));
  }
  *chosen = verdict == kTcp;
  return Status::Ok();
}

}  // namespace

Status MakeTcpTransport(std::shared_ptr<Transport> between, const TcpOptions& options,
                        std::shared_ptr<Transport>* transport) {
  *transport = between;
  if (between->size() == 1) return Status::Ok();
  std::vector<int> sockets;
  HVD_EXT_RETURN_IF_ERROR(ConnectTcpPeers(between.get(), options, &sockets));
  auto tcp = std::make_shared<TcpTransport>(std::make_shared<Streams>(between, sockets, options.leaving_s));
  bool chosen = false;
  HVD_EXT_RETURN_IF_ERROR(Choose(tcp.get(), between.get(), sockets, options.use, &chosen));
  const bool reaches = std::any_of(sockets.begin(), sockets.end(), [](int socket) { return socket >= 0; });
  if (chosen && reaches) *transport = std::move(tcp);
  return Status::Ok();
}

}  // namespace hvd_ext

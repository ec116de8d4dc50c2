// Messages over one connection for each pair of ranks, made by the caller: a job without MPI.
//
// What comes is read at once and kept until somebody asks for it, so that a sender never waits for a receive. That
// suits control messages, and the data by which faster paths are agreed; connections of a second kind
// (transport_tcp.cc) and shared memory stand in front and carry the rest. A connection that ends without a farewell is
// a rank that is gone, and every later call says so.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/transport.h"

namespace hvd_ext {
namespace {

constexpr size_t kMeshRead = 64 << 10;  // bytes of one read

enum MeshKind : int32_t { kData = 0, kControl = 1, kFarewell = 2 };

struct MeshHeader {
  uint64_t space;  // the job, or one of its subsets
  int32_t kind, tag;
  uint32_t run, segment;
  int64_t nbytes;
};
static_assert(sizeof(MeshHeader) == 32, "without gaps");

struct MeshMessage {
  Label label;
  std::string bytes;
};

struct MeshOutgoing {
  std::string bytes;  // header and message
  size_t sent = 0;
  bool IsSent() const { return sent == bytes.size(); }
};

class Mesh;

// `peer` is a number of the job.
struct MeshRequest : Request {
  MeshRequest(std::shared_ptr<Mesh> mesh, uint64_t space, int peer, const Label& label, char* data, int64_t nbytes)
      : mesh(std::move(mesh)), space(space), peer(peer), label(label), data(data), nbytes(nbytes) {}
  ~MeshRequest() override;

  const std::shared_ptr<Mesh> mesh;
  const uint64_t space;
  const int peer;
  const Label label;
  char* const data;  // a receive's
  const int64_t nbytes;
  std::shared_ptr<MeshOutgoing> outgoing;  // a send's
  bool waits = false;                      // a receive that has met no message yet
  bool done = false;
  std::shared_ptr<const MeshMessage> wrong;  // what a receive has met that it was not meant for
};

// What waits for its counterpart, of one sender and tag: either messages or receives.
struct MeshWaiting {
  std::deque<MeshMessage> messages;
  std::deque<MeshRequest*> receives;
};

struct MeshSpace {
  std::map<std::pair<int, int>, MeshWaiting> waiting;  // by sender and tag
  std::deque<std::pair<int, std::string>> controls;    // sender, message
};

struct MeshPeer {
  int socket = -1;
  std::deque<std::shared_ptr<MeshOutgoing>> outgoing;
  std::string came;  // the begin of the next message
  bool left = false;
  std::string gone;  // why nothing more comes; empty: the connection works
};

// The connections of a rank. Each engine of the process has a thread that calls it.
class Mesh : public std::enable_shared_from_this<Mesh> {
 public:
  Mesh(int rank, const std::vector<int>& sockets)
      : rank_(rank), peers_(sockets.size()), poll_(epoll_create1(EPOLL_CLOEXEC)) {
    for (size_t at = 0; at < sockets.size(); ++at) {
      if (static_cast<int>(at) == rank) continue;
      peers_[at].socket = sockets[at];
      Watch(static_cast<int>(at), EPOLL_CTL_ADD, EPOLLIN);
    }
  }
  ~Mesh() {
    for (const MeshPeer& peer : peers_) {
      if (peer.socket >= 0) close(peer.socket);
    }
    if (poll_ >= 0) close(poll_);
  }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  void Send(uint64_t space, int to, const Label& label, const void* data, int64_t nbytes,
            std::unique_ptr<Request>* request) {
    auto mine = std::make_unique<MeshRequest>(shared_from_this(), space, to, label, nullptr, nbytes);
    if (nbytes == 0) {
      mine->done = true;
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      mine->outgoing = Queue(space, kData, to, label, data, nbytes);
    }
    *request = std::move(mine);
  }

  void Recv(uint64_t space, int from, const Label& label, void* data, int64_t nbytes,
            std::unique_ptr<Request>* request) {
    auto mine = std::make_unique<MeshRequest>(shared_from_this(), space, from, label, static_cast<char*>(data), nbytes);
    if (nbytes == 0) {
      mine->done = true;
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      MeshWaiting& waiting = spaces_[space].waiting[{from, label.tag}];
      if (waiting.messages.empty()) {
        mine->waits = true;
        waiting.receives.push_back(mine.get());
      } else {
        Meet(mine.get(), std::move(waiting.messages.front()));
        waiting.messages.pop_front();
      }
    }
    *request = std::move(mine);
  }

  // Empty, or why the request will never end.
  std::string Test(MeshRequest* request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!request->done && request->wrong == nullptr) {
      Move();
      if (request->outgoing != nullptr) request->done = request->outgoing->IsSent();
    }
    return request->done || request->wrong != nullptr ? "" : peers_[static_cast<size_t>(request->peer)].gone;
  }

  void Forget(MeshRequest* request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!request->waits) return;
    std::deque<MeshRequest*>& receives = spaces_[request->space].waiting[{request->peer, request->label.tag}].receives;
    receives.erase(std::find(receives.begin(), receives.end(), request));
  }

  void SendControl(uint64_t space, int to, std::string message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (to == rank_) {
      spaces_[space].controls.emplace_back(to, std::move(message));
    } else {
      Queue(space, kControl, to, 0, message.data(), static_cast<int64_t>(message.size()));
    }
  }

  // Takes the next control message, or finds out that one of `ranks` is gone: then *peer is that rank, and it says why.
  std::string ReceiveControl(uint64_t space, const std::vector<int>& ranks, int* peer, std::string* message) {
    std::lock_guard<std::mutex> lock(mutex_);
    *peer = -1;
    std::deque<std::pair<int, std::string>>& controls = spaces_[space].controls;
    if (controls.empty()) Move();
    if (!controls.empty()) {
      *peer = controls.front().first;
      *message = std::move(controls.front().second);
      controls.pop_front();
      return "";
    }
    for (int rank : ranks) {
      const MeshPeer& other = peers_[static_cast<size_t>(rank)];
      if (other.gone.empty() || other.left) continue;
      *peer = rank;
      return other.gone;
    }
    return "";
  }

  bool Pending() {
    std::lock_guard<std::mutex> lock(mutex_);
    Move();
    return std::any_of(peers_.begin(), peers_.end(), [](const MeshPeer& peer) { return !peer.outgoing.empty(); });
  }

  // The number of a subset, equal on its ranks.
  uint64_t NumberSubset(uint64_t space, const std::vector<int>& ranks, int tag) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    auto add = [&hash](uint64_t value) {
      for (int byte = 0; byte < 8; ++byte) hash = (hash ^ ((value >> (8 * byte)) & 255)) * 1099511628211u;
    };
    add(space);
    add(static_cast<uint64_t>(tag));
    for (int rank : ranks) add(static_cast<uint64_t>(rank));
    add(subsets_[hash]++);
    return hash == 0 ? 1 : hash;
  }

  void SayFarewell() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int rank = 0; rank < size(); ++rank) {
      MeshPeer& peer = peers_[static_cast<size_t>(rank)];
      if (rank == rank_ || !peer.gone.empty()) continue;
      Queue(0, kFarewell, rank, 0, nullptr, 0);
      shutdown(peer.socket, SHUT_WR);
    }
  }

  void Abort() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == rank_) continue;
      Lose(rank, "this rank has aborted the job");
      shutdown(peers_[static_cast<size_t>(rank)].socket, SHUT_RDWR);
    }
  }

 private:
  // The rest is called with the lock.

  void Watch(int rank, int operation, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = rank;
    epoll_ctl(poll_, operation, peers_[static_cast<size_t>(rank)].socket, &event);
  }

  void Lose(int rank, const std::string& why) {
    MeshPeer& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.gone.empty()) return;
    peer.gone = why;
    peer.outgoing.clear();
    Watch(rank, EPOLL_CTL_DEL, 0);
  }

  std::shared_ptr<MeshOutgoing> Queue(uint64_t space, MeshKind kind, int to, const Label& label, const void* data,
                                      int64_t nbytes) {
    auto outgoing = std::make_shared<MeshOutgoing>();
    MeshPeer& peer = peers_[static_cast<size_t>(to)];
    MeshHeader header{space, kind, label.tag, label.run, label.segment, nbytes};
    outgoing->bytes.reserve(sizeof(header) + static_cast<size_t>(nbytes));
    outgoing->bytes.assign(reinterpret_cast<const char*>(&header), sizeof(header));
    if (nbytes > 0) outgoing->bytes.append(static_cast<const char*>(data), static_cast<size_t>(nbytes));
    if (!peer.gone.empty()) return outgoing;
    peer.outgoing.push_back(outgoing);
    if (peer.outgoing.size() == 1) Push(to);
    return outgoing;
  }

  // Sends what the kernel takes.
  void Push(int rank) {
    MeshPeer& peer = peers_[static_cast<size_t>(rank)];
    while (!peer.outgoing.empty()) {
      MeshOutgoing& front = *peer.outgoing.front();
      const ssize_t sent = send(peer.socket, front.bytes.data() + front.sent, front.bytes.size() - front.sent,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno == EAGAIN) return;
      if (sent < 0) return;  // a read says why, after what the peer has sent before
      front.sent += static_cast<size_t>(sent);
      if (front.IsSent()) peer.outgoing.pop_front();
    }
  }

  // Moves all connections on.
  void Move() {
    for (int rank = 0; rank < size(); ++rank) {
      if (!peers_[static_cast<size_t>(rank)].outgoing.empty()) Push(rank);
    }
    constexpr int kEvents = 64;
    epoll_event events[kEvents];
    const int count = epoll_wait(poll_, events, kEvents, 0);
    for (int i = 0; i < count; ++i) Pull(events[i].data.fd);
  }

  void Pull(int rank) {
    MeshPeer& peer = peers_[static_cast<size_t>(rank)];
    char bytes[kMeshRead];
    const ssize_t got = recv(peer.socket, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (got <= 0) {
      Lose(rank,
           got == 0 ? "its connection has ended" : std::string("its connection is broken: ") + std::strerror(errno));
      return;
    }
    peer.came.append(bytes, static_cast<size_t>(got));
    size_t at = 0;
    MeshHeader header;
    while (peer.came.size() - at >= sizeof(header)) {
      std::memcpy(&header, peer.came.data() + at, sizeof(header));
      if (header.nbytes < 0 || header.kind < kData || header.kind > kFarewell) {
        Lose(rank, "it has sent what is no message");
        return;
      }
      const size_t whole = sizeof(header) + static_cast<size_t>(header.nbytes);
      if (peer.came.size() - at < whole) break;
      Take(rank, header, peer.came.substr(at + sizeof(header), whole - sizeof(header)));
      at += whole;
    }
    peer.came.erase(0, at);
  }

  void Take(int rank, const MeshHeader& header, std::string bytes) {
    if (header.kind == kFarewell) {
      peers_[static_cast<size_t>(rank)].left = true;
    } else if (header.kind == kControl) {
      spaces_[header.space].controls.emplace_back(rank, std::move(bytes));
    } else {
      MeshMessage message{Label(header.tag, header.run, header.segment), std::move(bytes)};
      MeshWaiting& waiting = spaces_[header.space].waiting[{rank, header.tag}];
      if (waiting.receives.empty()) {
        waiting.messages.push_back(std::move(message));
      } else {
        MeshRequest* request = waiting.receives.front();
        waiting.receives.pop_front();
        request->waits = false;
        Meet(request, std::move(message));
      }
    }
  }

  static void Meet(MeshRequest* request, MeshMessage message) {
    if (message.label.Belongs(request->label) && static_cast<int64_t>(message.bytes.size()) == request->nbytes) {
      std::memcpy(request->data, message.bytes.data(), message.bytes.size());
      request->done = true;
    } else {
      request->wrong = std::make_shared<MeshMessage>(std::move(message));
    }
  }

  const int rank_;
  std::mutex mutex_;
  std::vector<MeshPeer> peers_;
  const int poll_;
  std::map<uint64_t, MeshSpace> spaces_;
  std::map<uint64_t, uint64_t> subsets_;  // made so far, by ranks and tag
};

MeshRequest::~MeshRequest() { mesh->Forget(this); }

class MeshTransport : public Transport {
 public:
  // `ranks` are the numbers in the job of this transport's ranks.
  MeshTransport(std::shared_ptr<Mesh> mesh, uint64_t space, std::vector<int> ranks)
      : mesh_(std::move(mesh)), space_(space), ranks_(std::move(ranks)), rank_(PlaceOf(mesh_->rank())) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  const char* between_hosts() const override { return "TCP"; }

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    HVD_EXT_RETURN_IF_ERROR(Check(peer, nbytes));
    mesh_->Send(space_, InJob(peer), label, data, nbytes, request);
    return Status::Ok();
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    HVD_EXT_RETURN_IF_ERROR(Check(peer, nbytes));
    mesh_->Recv(space_, InJob(peer), label, data, nbytes, request);
    return Status::Ok();
  }
  Status Test(Request* request, bool* done) override {
    auto* mine = static_cast<MeshRequest*>(request);
    const std::string gone = mesh_->Test(mine);
    const int peer = PlaceOf(mine->peer);
    if (mine->wrong != nullptr) {
      return CheckMet(peer, mine->label, mine->nbytes, mine->wrong->label,
                      static_cast<int64_t>(mine->wrong->bytes.size()));
    }
    *done = mine->done;
    return gone.empty() ? Status::Ok() : Gone(peer, gone);
  }

  Status SendControl(int peer, std::string message) override {
    HVD_EXT_RETURN_IF_ERROR(Check(peer, 0));
    mesh_->SendControl(space_, InJob(peer), std::move(message));
    return Status::Ok();
  }
  Status ReceiveControl(int* peer, std::string* message) override {
    const std::string gone = mesh_->ReceiveControl(space_, ranks_, peer, message);
    if (*peer >= 0) *peer = PlaceOf(*peer);
    return gone.empty() ? Status::Ok() : Gone(std::exchange(*peer, -1), gone);
  }
  bool ControlPending() override { return mesh_->Pending(); }
  bool Watches() const override { return true; }
  bool Forgets() const override { return true; }

  Status Subset(const std::vector<int>& ranks, int tag, std::shared_ptr<Transport>* subset) override {
    std::vector<int> in_job;
    for (int rank : ranks) in_job.push_back(InJob(rank));
    const uint64_t space = mesh_->NumberSubset(space_, in_job, tag);
    *subset = std::make_shared<MeshTransport>(mesh_, space, std::move(in_job));
    return Status::Ok();
  }

  void Abort(int) override { mesh_->Abort(); }
  void Close() override {
    if (space_ == 0) mesh_->SayFarewell();
  }

 private:
  int InJob(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  int PlaceOf(int in_job) const {
    return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), in_job) - ranks_.begin());
  }
  Status Check(int peer, int64_t nbytes) const {
    if (peer >= 0 && peer < size() && nbytes >= 0) return Status::Ok();
    return Internal("rank " + std::to_string(peer) + ", " + std::to_string(nbytes) +
                    " bytes: the rank must be in [0, " + std::to_string(size()) + "), and the bytes not negative");
  }
  static Status Gone(int rank, const std::string& why) {
    return Communication("rank " + std::to_string(rank) + ": " + why);
  }

  const std::shared_ptr<Mesh> mesh_;
  const uint64_t space_;
  const std::vector<int> ranks_;
  const int rank_;
};

}  // namespace

Status MakeMeshTransport(int rank, const std::vector<int>& sockets, std::shared_ptr<Transport>* transport) {
  auto mesh = std::make_shared<Mesh>(rank, sockets);
  std::vector<int> ranks(sockets.size());
  for (size_t at = 0; at < ranks.size(); ++at) ranks[at] = static_cast<int>(at);
  *transport = std::make_shared<MeshTransport>(std::move(mesh), 0, std::move(ranks));
  return Status::Ok();
}

}  // namespace hvd_ext

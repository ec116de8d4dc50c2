// Shared memory inside a host, another transport between hosts. A message is not moved by its sender: it says where the
// message lies, and the receiver copies it to its place, or adds it to its own, straight from the sender's memory. The
// send ends when the receiver says that it has done so.
//
// That works for memory of the arena only. A message from elsewhere goes by the transport between hosts, and an entry
// in the ring holds its place, so that messages match in the order in which they were sent. Where devices reach each
// other's memory, a message in memory of the device is left there likewise. From the first message that goes between
// hosts on, this transport moves the other one on in every test: it may owe the peer an answer for a message that has
// ended here.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "engine/host_peers.h"
#include "engine/transport.h"

namespace hvd_ext {
namespace {

class Host;

// Its `data` is null for a receive without a copy.
struct HostRequest : RequestInFront {
  HostRequest(std::shared_ptr<Host> host, int peer, const Label& label, char* data, int64_t nbytes)
      : RequestInFront(peer, label, data, nbytes), host(std::move(host)) {}
  ~HostRequest() override;

  const std::shared_ptr<Host> host;
  int64_t id = -1;                 // a send under way, or a receive that holds the peer's message
  const char* received = nullptr;  // where the message of a receive without a copy lies
  std::unique_ptr<char[]> own;     // for a receive without a copy whose message was not in the peer's arena
};

// What this rank shares with its peers; outlives the transport as long as requests are kept.
class Host : public std::enable_shared_from_this<Host> {
 public:
  Host(std::shared_ptr<Transport> between, std::shared_ptr<Arena> arena, std::shared_ptr<Device> device,
       Doorbell::Word* word, std::vector<std::unique_ptr<HostPeer>> peers)
      : between_(std::move(between)), arena_(std::move(arena)), device_(std::move(device)), bell_(word) {
    for (std::unique_ptr<HostPeer>& peer : peers) {
      if (peer == nullptr) continue;
      places_.resize(peers.size());
      size_t rank = static_cast<size_t>(&peer - peers.data());
      places_[rank] = std::make_unique<Peer>();
      places_[rank]->shared = std::move(*peer);
      near_.push_back({static_cast<int>(rank), places_[rank].get()});
    }
    places_.resize(peers.size());
    all_near_ = static_cast<int>(near_.size()) == between_->size() - 1;
  }

  const std::shared_ptr<Transport>& between() const { return between_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  Doorbell* bell() { return &bell_; }
  // Whether peers ring for every message: not once a rank's arena was full, for messages outside of it come without a
  // ring. Any thread.
  bool rings() const { return all_near_ && !silent_; }
  Medium MediumTo(int peer) const { return IsNear(peer) ? Find(peer)->shared.medium : Medium::kNone; }
  bool ReachesDevice(int peer) const { return Reaches(MediumTo(peer)); }
  bool IsNear(int peer) const { return peer >= 0 && peer < static_cast<int>(places_.size()) && Find(peer) != nullptr; }

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) {
    auto mine = NewRequest(peer, label, nullptr, nbytes);
    Device::BlockName block;
    int64_t offset = 0;
    if (nbytes == 0) {
      mine->done = true;
    } else if (ReachesDevice(peer) && device_->Share(data, &block, &offset)) {
      shared_.insert(block);
      mine->id = next_id_++;
      sends_[mine->id] = mine.get();
      HostEntry entry = EntryOf(HostEntry::kOnDevice, label, mine->id, offset, nbytes);
      std::memcpy(entry.bytes, block.bytes.data(), sizeof(entry.bytes));
      Tell(Find(peer), entry);
    } else if (nbytes <= HostEntry::kBytes) {
      HostEntry entry = EntryOf(HostEntry::kInline, label, -1, 0, nbytes);
      std::memcpy(entry.bytes, data, static_cast<size_t>(nbytes));
      Tell(Find(peer), entry);
      mine->done = true;
    } else if (arena_->Owns(data)) {
      mine->id = next_id_++;
      sends_[mine->id] = mine.get();
      Tell(Find(peer), EntryOf(HostEntry::kZeroCopy, label, mine->id, arena_->OffsetOf(data), nbytes));
    } else {
      silent_ = true;
      HVD_EXT_RETURN_IF_ERROR(between_->Send(peer, label, data, nbytes, &mine->carried));
      Tell(Find(peer), EntryOf(HostEntry::kBetween, label, -1, 0, nbytes));
    }
    *request = std::move(mine);
    return Status::Ok();
  }

  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) {
    auto mine = NewRequest(peer, label, static_cast<char*>(data), nbytes);
    if (nbytes == 0) {
      mine->done = true;
    } else {
      Waiting& waiting = Find(peer)->waiting[label.tag];
      if (waiting.messages.empty()) {
        mine->waits = true;
        waiting.receives.push_back(mine.get());
      } else {
        HostEntry entry = waiting.messages.front();
        waiting.messages.pop_front();
        HVD_EXT_RETURN_IF_ERROR(Match(mine.get(), entry));
      }
    }
    *request = std::move(mine);
    return Status::Ok();
  }

  Status Test(HostRequest* request, bool* done) {
    HVD_EXT_RETURN_IF_ERROR(Read());
    if (!request->error.empty()) return Internal(request->error);
    HVD_EXT_RETURN_IF_ERROR(request->TestCarried(between_.get()));
    *done = request->done;
    return *done || !silent_ ? Status::Ok() : LookAfterBetween();
  }

  // Moves the other transport on. A control message that it has received is kept for TakeControl.
  Status LookAfterBetween() {
    int peer = -1;
    std::string message;
    HVD_EXT_RETURN_IF_ERROR(between_->ReceiveControl(&peer, &message));
    if (peer >= 0) AddControl(peer, std::move(message));
    return Status::Ok();
  }

  void SendControl(int peer, const std::string& message) {
    size_t at = 0;
    do {
      size_t part = std::min(message.size() - at, static_cast<size_t>(HostEntry::kBytes));
      bool goes_on = at + part < message.size();
      HostEntry entry = EntryOf(HostEntry::kControl, goes_on ? 1 : 0, -1, 0, static_cast<int64_t>(part));
      std::memcpy(entry.bytes, message.data() + at, part);
      Tell(Find(peer), entry);
      at += part;
    } while (at < message.size());
  }

  // False when none has arrived.
  bool TakeControl(int* peer, std::string* message) {
    if (controls_.empty()) return false;
    *peer = controls_.front().first;
    *message = std::move(controls_.front().second);
    controls_.pop_front();
    return true;
  }
  void AddControl(int peer, std::string message) { controls_.emplace_back(peer, std::move(message)); }

  bool Pending() const {
    return std::any_of(near_.begin(), near_.end(), [](const auto& near) { return !near.second->unwritten.empty(); });
  }

  // Takes the entries that the peers have written since the last call, and writes those that the rings had no room for.
  // A peer rings when it has written or has made room.
  Status Read() {
    uint32_t rings = bell_.Look();
    if (rings == read_at_) return Status::Ok();
    read_at_ = rings;
    for (auto& [rank, peer] : near_) {
      while (const HostEntry* entry = peer->shared.in.Front()) {
        HVD_EXT_RETURN_IF_ERROR(Take(rank, peer, *entry));
        if (peer->shared.in.Pop()) peer->shared.bell->Ring();
      }
      bool wrote = false;
      while (!peer->unwritten.empty() && peer->shared.out.Write(peer->unwritten.front())) {
        peer->unwritten.pop_front();
        wrote = true;
      }
      if (wrote) peer->shared.bell->Ring();
    }
    return Status::Ok();
  }

  void LeaveDevices() {
    for (auto& [_, peer] : near_) {
      for (const auto& [_, reached] : peer->reached) device_->Leave(reached);
      peer->reached.clear();
    }
  }
  // The peers have left this rank's device.
  void Unshare() {
    for (const Device::BlockName& block : shared_) device_->Unshare(block);
    shared_.clear();
  }

  // A request ends, whatever has become of it.
  void Forget(HostRequest* request) {
    if (request->waits) {
      std::deque<HostRequest*>& receives = Find(request->peer)->waiting[request->label.tag].receives;
      receives.erase(std::find(receives.begin(), receives.end(), request));
    } else if (request->received != nullptr && request->id >= 0) {
      Tell(Find(request->peer), EntryOf(HostEntry::kTaken, 0, request->id, 0, 0));
    } else if (request->id >= 0) {
      sends_.erase(request->id);
    }
  }

 private:
  // What waits for its counterpart, of one tag: either messages or receives.
  struct Waiting {
    std::deque<HostEntry> messages;
    std::deque<HostRequest*> receives;
  };
  struct Peer {
    HostPeer shared;
    std::deque<HostEntry> unwritten;  // entries for which the ring has no room
    std::unordered_map<int, Waiting> waiting;
    std::map<Device::BlockName, char*> reached;  // blocks of its device
    std::string control;                         // of a message whose parts have not all come
  };

  static HostEntry EntryOf(HostEntry::Kind kind, const Label& label, int64_t id, int64_t offset, int64_t nbytes) {
    HostEntry entry;
    entry.kind = kind;
    entry.tag = label.tag;
    entry.run = label.run;
    entry.segment = label.segment;
    entry.id = id;
    entry.offset = offset;
    entry.nbytes = nbytes;
    return entry;
  }

  Peer* Find(int peer) const { return places_[static_cast<size_t>(peer)].get(); }

  std::unique_ptr<HostRequest> NewRequest(int peer, const Label& label, char* data, int64_t nbytes) {
    return std::make_unique<HostRequest>(shared_from_this(), peer, label, data, nbytes);
  }

  static void Tell(Peer* peer, const HostEntry& entry) {
    if (!peer->unwritten.empty() || !peer->shared.out.Write(entry)) {
      peer->unwritten.push_back(entry);
    } else {
      peer->shared.bell->Ring();
    }
  }

  Status Take(int rank, Peer* peer, const HostEntry& entry) {
    switch (entry.kind) {
      case HostEntry::kZeroCopy:
      case HostEntry::kOnDevice:
      case HostEntry::kInline:
      case HostEntry::kBetween: {
        Waiting& waiting = peer->waiting[entry.tag];
        if (waiting.receives.empty()) {
          waiting.messages.push_back(entry);
          return Status::Ok();
        }
        HostRequest* request = waiting.receives.front();
        waiting.receives.pop_front();
        request->waits = false;
        return Match(request, entry);
      }
      case HostEntry::kTaken: {
        auto found = sends_.find(entry.id);
        if (found == sends_.end()) return Status::Ok();  // the request has been dropped
        found->second->done = true;
        found->second->id = -1;
        sends_.erase(found);
        return Status::Ok();
      }
      case HostEntry::kControl:
        peer->control.append(entry.bytes, static_cast<size_t>(entry.nbytes));
        if (entry.tag == 0) controls_.emplace_back(rank, std::exchange(peer->control, std::string()));
        return Status::Ok();
    }
    return Internal("shared memory: rank " + std::to_string(rank) + " has written an entry of kind " +
                    std::to_string(static_cast<int>(entry.kind)) + ", which does not exist");
  }

  Status Match(HostRequest* request, const HostEntry& entry) {
    Peer* peer = Find(request->peer);
    char* to = request->data;
    if (!request->Expects(*between_, Label(entry.tag, entry.run, entry.segment), entry.nbytes)) {
      if (entry.id >= 0) Tell(peer, EntryOf(HostEntry::kTaken, 0, entry.id, 0, 0));
      return Status::Ok();
    }
    if (entry.kind == HostEntry::kOnDevice) {
      char* block = nullptr;
      HVD_EXT_RETURN_IF_ERROR(Reach(request->peer, entry, &block));
      if (to != nullptr) return Internal("a message in memory of the device must be received without a copy");
      request->received = block + entry.offset;
      request->id = entry.id;
      request->done = true;
      return Status::Ok();
    }
    if (entry.kind == HostEntry::kZeroCopy) {
      const char* from = peer->shared.memory->At(entry.offset, entry.nbytes);
      if (from == nullptr) {
        return Internal("shared memory: a message of rank " + std::to_string(request->peer) + " (" +
                        std::to_string(entry.nbytes) + " bytes at " + std::to_string(entry.offset) +
                        ") must lie in its arena");
      }
      request->done = true;
      if (to == nullptr) {
        request->received = from;
        request->id = entry.id;
        return Status::Ok();
      }
      std::memcpy(to, from, static_cast<size_t>(entry.nbytes));
      Tell(peer, EntryOf(HostEntry::kTaken, 0, entry.id, 0, 0));
      return Status::Ok();
    }
    if (to == nullptr) {
      request->own.reset(new char[static_cast<size_t>(entry.nbytes)]);
      to = request->own.get();
      request->received = to;
    }
    if (entry.kind == HostEntry::kBetween) {
      silent_ = true;
      return between_->Recv(request->peer, request->label, to, entry.nbytes, &request->carried);
    }
    std::memcpy(to, entry.bytes, static_cast<size_t>(entry.nbytes));
    request->done = true;
    return Status::Ok();
  }

  // The block in which a message lies on the peer's device. Blocks stay reached until LeaveDevices.
  Status Reach(int rank, const HostEntry& entry, char** block) {
    Device::BlockName name;
    std::memcpy(name.bytes.data(), entry.bytes, sizeof(entry.bytes));
    char*& reached = Find(rank)->reached[name];
    if (reached == nullptr && device_ != nullptr) reached = device_->Reach(name);
    *block = reached;
    if (reached != nullptr) return Status::Ok();
    return Internal("memory of the device: a message of rank " + std::to_string(rank) + " (" +
                    std::to_string(entry.nbytes) + " bytes) lies in a block that the device of rank " +
                    std::to_string(between_->rank()) + " does not reach");
  }

  const std::shared_ptr<Transport> between_;
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<Device> device_;
  std::set<Device::BlockName> shared_;  // blocks in which messages to peers lay
  Doorbell bell_;
  std::vector<std::unique_ptr<Peer>> places_;  // by rank
  std::vector<std::pair<int, Peer*>> near_;
  bool all_near_ = false;
  // Messages arrive without a doorbell. Set with the progress lock held, and read without it.
  std::atomic<bool> silent_{false};
  uint32_t read_at_ = 0;
  int64_t next_id_ = 0;
  std::unordered_map<int64_t, HostRequest*> sends_;  // under way, by id
  std::deque<std::pair<int, std::string>> controls_;
};

HostRequest::~HostRequest() {
  host->Forget(this);
  carried.reset();  // the host, which may go with this request, has the transport behind
}

class HostTransport : public TransportInFront {
 public:
  explicit HostTransport(std::shared_ptr<Host> host) : TransportInFront(host->between()), host_(std::move(host)) {}

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    if (host_->IsNear(peer)) return host_->Send(peer, label, data, nbytes, request);
    return behind()->Send(peer, label, data, nbytes, Carried(NewRequest(peer, label, nbytes), request));
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    if (host_->IsNear(peer)) return host_->Recv(peer, label, data, nbytes, request);
    return behind()->Recv(peer, label, data, nbytes, Carried(NewRequest(peer, label, nbytes), request));
  }
  Status Test(Request* request, bool* done) override { return host_->Test(static_cast<HostRequest*>(request), done); }

  Status SendControl(int peer, std::string message) override {
    if (peer == rank()) {
      host_->AddControl(peer, std::move(message));
      host_->bell()->Ring(/*from_peer=*/false);
    } else if (host_->IsNear(peer)) {
      host_->SendControl(peer, message);
    } else {
      return behind()->SendControl(peer, std::move(message));
    }
    return Status::Ok();
  }
  Status ReceiveControl(int* peer, std::string* message) override {
    *peer = -1;
    HVD_EXT_RETURN_IF_ERROR(host_->Read());
    if (host_->TakeControl(peer, message) || (host_->rings() && !behind()->Watches())) return Status::Ok();
    return behind()->ReceiveControl(peer, message);
  }
  bool ControlPending() override {
    host_->Read();
    return host_->Pending() || behind()->ControlPending();
  }

  bool IsZeroCopy(int peer) const override { return host_->IsNear(peer); }
  Medium MediumTo(int peer) const override { return host_->MediumTo(peer); }
  void LeaveDevices() override { host_->LeaveDevices(); }
  void Release() override {
    host_->Unshare();
    behind()->Release();
  }
  const char* Received(const Request* request) const override {
    return static_cast<const HostRequest*>(request)->received;
  }
  std::shared_ptr<Arena> arena() const override { return host_->arena(); }
  Doorbell* doorbell() override { return host_->bell(); }
  bool Rings() const override { return host_->rings(); }

 private:
  std::unique_ptr<HostRequest> NewRequest(int peer, const Label& label, int64_t nbytes) const {
    return std::make_unique<HostRequest>(host_, peer, label, nullptr, nbytes);
  }

  const std::shared_ptr<Host> host_;
};

}  // namespace

Status MakeHostTransport(std::shared_ptr<Transport> between, std::shared_ptr<Arena> arena,
                         std::shared_ptr<Device> device, std::shared_ptr<Transport>* transport) {
  char* memory = arena == nullptr ? nullptr : arena->Take(sizeof(Doorbell::Word));
  if (memory == nullptr) arena = nullptr;
  auto* word = reinterpret_cast<Doorbell::Word*>(memory);
  std::vector<std::unique_ptr<HostPeer>> peers;
  HVD_EXT_RETURN_IF_ERROR(FindHostPeers(between.get(), arena, word, device.get(), &peers));
  bool alone = std::all_of(peers.begin(), peers.end(), [](const auto& peer) { return peer == nullptr; });
  if (alone) {
    *transport = std::move(between);
    return Status::Ok();
  }
  auto host = std::make_shared<Host>(std::move(between), std::move(arena), std::move(device), word, std::move(peers));
  *transport = std::make_shared<HostTransport>(std::move(host));
  return Status::Ok();
}

}  // namespace hvd_ext

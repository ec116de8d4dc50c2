// Ranks as threads of one process. A send ends when its receive has come, and never before, although MPI may end a
// short one at once; a send that is received without a copy ends when the receiver has let go of it. So a program that
// runs here does not depend on buffers inside the transport.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/transport.h"

namespace hvd_ext {
namespace {

struct Inbox;

// A send or a receive. `inbox` is that of the receiver; what changes is guarded by the inbox's mutex.
class ThreadRequest : public Request {
 public:
  ThreadRequest(std::shared_ptr<Inbox> inbox, std::shared_ptr<Inbox> other, int sender, Label label, const char* from,
                char* to, int64_t nbytes)
      : inbox(std::move(inbox)),
        other(std::move(other)),
        key(sender, label.tag),
        label(label),
        from(from),
        to(to),
        nbytes(nbytes) {}
  // Withdraws a request that has not met its counterpart; lets go of a message received without a copy.
  ~ThreadRequest() override;

  bool sends() const { return from != nullptr; }

  const std::shared_ptr<Inbox> inbox;
  const std::shared_ptr<Inbox> other;  // the sender's, for its bell
  const std::pair<int, int> key;       // sender, tag
  const Label label;
  const char* const from;  // null for a receive
  char* const to;          // null for a receive without a copy
  const int64_t nbytes;
  bool done = false;
  ThreadRequest* partner = nullptr;  // the other side, while the receiver uses the sender's memory
  std::optional<Label> came;         // a receive has met the message of another run
  std::string error;
};

// What rank r receives. Of the two queues of a key at most one has requests: those that wait for their counterparts.
struct Inbox {
  struct Waiting {
    std::deque<ThreadRequest*> sends;
    std::deque<ThreadRequest*> receives;
  };
  std::mutex mutex;
  std::map<std::pair<int, int>, Waiting> data;
  std::deque<std::pair<int, std::string>> control;  // sender, message
  Doorbell bell;                                    // of this rank's engine
};

ThreadRequest::~ThreadRequest() {
  std::lock_guard<std::mutex> lock(inbox->mutex);
  if (partner != nullptr) {
    partner->partner = nullptr;
    if (!sends()) {
      partner->done = true;
      other->bell.Ring();
    }
    return;
  }
  if (done) return;
  Inbox::Waiting& waiting = inbox->data[key];
  std::deque<ThreadRequest*>& queue = sends() ? waiting.sends : waiting.receives;
  queue.erase(std::find(queue.begin(), queue.end(), this));
}

struct World {
  explicit World(int size) {
    for (int rank = 0; rank < size; ++rank) inboxes.push_back(std::make_shared<Inbox>());
  }
  std::vector<std::shared_ptr<Inbox>> inboxes;
  std::atomic<int64_t> aborted{-1};  // rank * 2^32 + code
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_->inboxes.size()); }

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    HVD_EXT_RETURN_IF_ERROR(Check("send to", peer, nbytes));
    static const char nothing = 0;  // a pointer says which side a request is; with 0 bytes it may be null
    const char* from = data == nullptr ? &nothing : static_cast<const char*>(data);
    Post(std::make_unique<ThreadRequest>(world_->inboxes[peer], world_->inboxes[rank_], rank_, label, from, nullptr,
                                         nbytes),
         request);
    return Status::Ok();
  }

  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    HVD_EXT_RETURN_IF_ERROR(Check("receive from", peer, nbytes));
    Post(std::make_unique<ThreadRequest>(world_->inboxes[rank_], world_->inboxes[peer], peer, label, nullptr,
                                         static_cast<char*>(data), nbytes),
         request);
    return Status::Ok();
  }

  Status Test(Request* request, bool* done) override {
    auto* posted = static_cast<ThreadRequest*>(request);
    std::lock_guard<std::mutex> lock(posted->inbox->mutex);
    *done = posted->done;
    if (posted->came) return MeantForAnother(posted->key.first, posted->label, *posted->came);
    if (!posted->error.empty()) return Internal(posted->error);
    return *done ? Status::Ok() : CheckAborted("test of a message");
  }

  Status SendControl(int peer, std::string message) override {
    HVD_EXT_RETURN_IF_ERROR(Check("control message to", peer, 0));
    Inbox& inbox = *world_->inboxes[peer];
    std::lock_guard<std::mutex> lock(inbox.mutex);
    inbox.control.emplace_back(rank_, std::move(message));
    inbox.bell.Ring();
    return Status::Ok();
  }

  Status ReceiveControl(int* peer, std::string* message) override {
    *peer = -1;
    Inbox& inbox = *world_->inboxes[rank_];
    std::lock_guard<std::mutex> lock(inbox.mutex);
    if (inbox.control.empty()) return CheckAborted("receipt of control messages");
    *peer = inbox.control.front().first;
    *message = std::move(inbox.control.front().second);
    inbox.control.pop_front();
    return Status::Ok();
  }

  bool IsZeroCopy(int) const override { return true; }

  const char* Received(const Request* request) const override {
    auto* posted = static_cast<const ThreadRequest*>(request);
    std::lock_guard<std::mutex> lock(posted->inbox->mutex);
    return posted->partner == nullptr ? nullptr : posted->partner->from;
  }

  Doorbell* doorbell() override { return &world_->inboxes[rank_]->bell; }
  bool Rings() const override { return true; }

  bool ControlPending() override { return false; }

  void Abort(int code) override {
    int64_t nobody = -1;
    int64_t me = (int64_t{rank_} << 32) | static_cast<uint32_t>(code);
    world_->aborted.compare_exchange_strong(nobody, me);
    for (const std::shared_ptr<Inbox>& inbox : world_->inboxes) inbox->bell.Ring();
  }

  void Close() override {}

 private:
  Status CheckAborted(const std::string& what) const {
    int64_t aborted = world_->aborted.load();
    if (aborted < 0) return Status::Ok();
    return Communication(what + " on rank " + std::to_string(rank_) + ": rank " + std::to_string(aborted >> 32) +
                         " has aborted the job with code " + std::to_string(static_cast<int32_t>(aborted)));
  }

  Status Check(const char* what, int peer, int64_t nbytes) const {
    const std::string name = std::string(what) + " rank " + std::to_string(peer);
    if (peer < 0 || peer >= size()) {
      return Internal(name + ": the rank must be in [0, " + std::to_string(size()) + ")");
    }
    if (nbytes < 0) return Internal(name + ": " + std::to_string(nbytes) + " bytes, must not be negative");
    return CheckAborted(name);
  }

  static void Post(std::unique_ptr<ThreadRequest> mine, std::unique_ptr<Request>* request) {
    bool sends = mine->sends();
    if (mine->nbytes == 0) {
      mine->done = true;
    } else {
      std::lock_guard<std::mutex> lock(mine->inbox->mutex);
      Inbox::Waiting& waiting = mine->inbox->data[mine->key];
      std::deque<ThreadRequest*>& others = sends ? waiting.receives : waiting.sends;
      if (others.empty()) {
        (sends ? waiting.sends : waiting.receives).push_back(mine.get());
      } else {
        Move(sends ? mine.get() : others.front(), sends ? others.front() : mine.get());
        others.pop_front();
      }
    }
    *request = std::move(mine);
  }

  static void Move(ThreadRequest* send, ThreadRequest* receive) {
    bool zero_copy = receive->to == nullptr;
    receive->done = true;
    send->done = !zero_copy;
    if (!send->label.Belongs(receive->label)) {
      send->done = true;
      receive->came = send->label;
    } else if (send->nbytes != receive->nbytes) {
      send->done = true;
      send->error = receive->error =
          OfAnotherSize(send->key.first, send->key.second, receive->nbytes, send->nbytes).message;
    } else if (zero_copy) {
      send->partner = receive;
      receive->partner = send;
    } else {
      std::memcpy(receive->to, send->from, static_cast<size_t>(send->nbytes));
    }
    receive->inbox->bell.Ring();
    if (send->done) receive->other->bell.Ring();
  }

  const std::shared_ptr<World> world_;
  const int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> MakeThreadTransports(int size) {
  auto world = std::make_shared<World>(size);
  std::vector<std::shared_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) transports.push_back(std::make_shared<ThreadTransport>(world, rank));
  return transports;
}

}  // namespace hvd_ext

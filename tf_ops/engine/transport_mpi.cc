// Ranks as processes of an MPI job: messages on communicators of their own. Where those come from: mpi_job.cc.
#include "engine/transport.h"

#ifdef HVD_EXT_WITH_MPI

#include <algorithm>
#include <cstddef>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/mpi_job.h"

namespace hvd_ext {
namespace {

// Open MPI's TCP transport serialises opposing messages above its eager limit of 64 KiB: two ranks that send 16 MB to
// each other at once took 2.07 times the one-way time, in parts of 60 kB 1.06 times. Also keeps each count within an
// int.
constexpr int64_t kPartNbytes = 60000;
constexpr int kPartsPerTest = 64;
constexpr int kLabelNbytes = sizeof(Label::run) + sizeof(Label::segment);
static_assert(offsetof(Label, segment) == offsetof(Label, run) + sizeof(Label::run), "they travel as one block");

std::string WithPeer(int peer, int tag, int64_t nbytes) {
  return "rank " + std::to_string(peer) + ", tag " + std::to_string(tag) + ", " + std::to_string(nbytes) + " bytes";
}

// One message, as parts in order. Its destructor does not free requests that MPI has not finished: after
// MPI_Request_free the buffer would still be in use, with no way to learn when it no longer is.
class Message : public Request {
 public:
  Message(int peer, Label label, int64_t nbytes, bool receives)
      : peer_(peer), nbytes_(nbytes), receives_(receives), label_(label), came_(label) {
    parts_.reserve(static_cast<size_t>((nbytes + kPartNbytes - 1) / kPartNbytes));
  }

  int peer() const { return peer_; }
  const Label& label() const { return label_; }
  std::string Words() const { return WithPeer(peer_, label_.tag, nbytes_); }

  // Adds a part of a control message, which has no label; the caller posts it.
  MPI_Request* AddPart() { return &parts_.emplace_back(MPI_REQUEST_NULL); }

  // Posts all parts. The run and the segment of the label travel in front of the first one.
  Status Post(void* data, MPI_Comm communicator) {
    for (int64_t at = 0; at < nbytes_; at += kPartNbytes) {
      void* memory = static_cast<char*>(data) + at;
      int count = static_cast<int>(std::min(kPartNbytes, nbytes_ - at));
      MPI_Datatype type = MPI_BYTE;
      if (at == 0) {
        HVD_EXT_RETURN_IF_ERROR(MakeFirstPart(data, count, &type));
        memory = MPI_BOTTOM;
        count = 1;
      }
      MPI_Request* part = AddPart();
      int code = receives_ ? MPI_Irecv(memory, count, type, peer_, label_.tag, communicator, part)
                           : MPI_Isend(memory, count, type, peer_, label_.tag, communicator, part);
      if (at == 0) HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Type_free(&type), Words());
      if (code != MPI_SUCCESS) return MpiFailure(receives_ ? "MPI_Irecv" : "MPI_Isend", code, Words());
    }
    return Status::Ok();
  }

  // Whether the message that has come belongs to another run.
  bool IsMeantForAnother(Label* came) const {
    *came = came_;
    return receives_ && looked_at_ && !came_.Belongs(label_);
  }

  Status Test(bool* done) {
    MPI_Status statuses[kPartsPerTest];
    *done = false;
    while (finished_ < parts_.size()) {
      int n = static_cast<int>(std::min<size_t>(kPartsPerTest, parts_.size() - finished_));
      if (receives_ && finished_ == 0) n = 1;  // another run's message may have fewer parts
      int all = 0;
      int code = MPI_Testall(n, &parts_[finished_], &all, statuses);
      for (int i = 0; i < n && code == MPI_ERR_IN_STATUS; ++i) {
        int of_part = statuses[i].MPI_ERROR;
        if (of_part != MPI_SUCCESS && of_part != MPI_ERR_PENDING) code = of_part;
      }
      looked_at_ = code != MPI_SUCCESS || all != 0;
      if (code != MPI_SUCCESS) return MpiFailure("MPI_Testall", code, Words());
      if (!all) return Status::Ok();
      for (int i = 0; i < n && receives_; ++i) HVD_EXT_RETURN_IF_ERROR(CheckLength(finished_ + i, statuses[i]));
      finished_ += n;
    }
    *done = true;
    return Status::Ok();
  }

 private:
  Status CheckLength(size_t part, const MPI_Status& status) const {
    int came = 0;
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Get_count(&status, MPI_BYTE, &came), Words());
    int64_t expected = std::min(kPartNbytes, nbytes_ - static_cast<int64_t>(part) * kPartNbytes);
    if (part == 0) came -= kLabelNbytes;
    if (came == expected) return Status::Ok();
    return Internal("message from " + Words() + ": its part " + std::to_string(part) + " must have " +
                    std::to_string(expected) + " bytes, " + std::to_string(came) + " came");
  }

  Status MakeFirstPart(void* data, int count, MPI_Datatype* type) {
    int lengths[] = {kLabelNbytes, count};
    MPI_Aint addresses[2];
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Get_address(&came_.run, &addresses[0]), Words());
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Get_address(data, &addresses[1]), Words());
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Type_create_hindexed(2, lengths, addresses, MPI_BYTE, type), Words());
    HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Type_commit(type), Words());
    return Status::Ok();
  }

  const int peer_;
  const int64_t nbytes_;
  const bool receives_;
  const Label label_;
  Label came_;              // of a message that is sent: the label itself
  bool looked_at_ = false;  // MPI has written all that it will write to came_
  std::vector<MPI_Request> parts_;
  size_t finished_ = 0;
};

// A control message travels in parts too. The tag says whether another part follows, since the receiver does not know
// the length.
enum ControlTag : int { kLast = 0, kGoesOn = 1 };

struct Outgoing {
  Outgoing(int peer, std::string text)
      : text(std::move(text)), message(peer, kLast, static_cast<int64_t>(this->text.size()), false) {}
  const std::string text;
  Message message;
};

struct IncomingPart {
  std::string bytes;
  MPI_Request request = MPI_REQUEST_NULL;
  bool last = false;
};

struct Incoming {
  std::string text;  // of the parts that have come
  std::deque<IncomingPart> parts;
};

class MpiTransport : public Transport {
 public:
  MpiTransport(const MpiCommunicators& own, int rank, int size, int64_t largest_tag)
      : own_(own), rank_(rank), size_(size), largest_tag_(largest_tag) {}
  ~MpiTransport() override { MpiTransport::Close(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* between_hosts() const override { return "MPI"; }
  int64_t largest_tag() const override { return largest_tag_; }

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return Post(std::make_unique<Message>(peer, label, nbytes, /*receives=*/false), const_cast<void*>(data), request);
  }

  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return Post(std::make_unique<Message>(peer, label, nbytes, /*receives=*/true), data, request);
  }

  Status Test(Request* request, bool* done) override {
    auto* message = static_cast<Message*>(request);
    Status status = message->Test(done);
    Label came(0);
    if (message->IsMeantForAnother(&came)) return MeantForAnother(message->peer(), message->label(), came);
    return status;
  }

  Status SendControl(int peer, std::string text) override {
    if (peer == rank_) {
      arrived_.emplace_back(peer, std::move(text));
      return Status::Ok();
    }
    outgoing_.push_back(
        std::make_unique<Outgoing>(peer, std::move(text)));  // first: MPI reads it for longer than we do
    Outgoing* sending = outgoing_.back().get();
    int64_t nbytes = static_cast<int64_t>(sending->text.size());
    int64_t at = 0;
    do {
      int count = static_cast<int>(std::min(kPartNbytes, nbytes - at));
      int tag = at + count < nbytes ? kGoesOn : kLast;
      const char* from = sending->text.data() + at;
      HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Isend(from, count, MPI_BYTE, peer, tag, own_.control, sending->message.AddPart()),
                                  "control message to " + WithPeer(peer, tag, nbytes));
      at += count;
    } while (at < nbytes);
    return ReapOutgoing();
  }

  Status ReceiveControl(int* peer, std::string* message) override {
    *peer = -1;
    HVD_EXT_RETURN_IF_ERROR(ReapOutgoing());
    HVD_EXT_RETURN_IF_ERROR(TakeParts());
    HVD_EXT_RETURN_IF_ERROR(FinishParts());
    if (arrived_.empty()) return Status::Ok();
    *peer = arrived_.front().first;
    *message = std::move(arrived_.front().second);
    arrived_.pop_front();
    return Status::Ok();
  }

  Status Subset(const std::vector<int>& ranks, int tag, std::shared_ptr<Transport>* subset) override {
    MpiCommunicators theirs;
    HVD_EXT_RETURN_IF_ERROR(DivideMpi(own_.subsets, ranks, tag, &theirs));
    return MakeMpiTransportOn(theirs, subset);
  }

  bool ControlPending() override { return ReapOutgoing().ok() && !outgoing_.empty(); }

  void Abort(int code) override { EndMpiJob(code); }

  // What MPI may still read or write lives as long as the process.
  void Close() override {
    static auto* sent = new std::list<std::unique_ptr<Outgoing>>;
    static auto* received = new std::list<std::map<int, Incoming>>;
    static auto* mutex = new std::mutex;
    std::lock_guard<std::mutex> lock(*mutex);
    idle_ = outgoing_.empty() && incoming_.empty();
    sent->splice(sent->end(), outgoing_);
    if (!incoming_.empty()) received->push_back(std::move(incoming_));
    incoming_.clear();
  }

  void Release() override {
    if (std::exchange(idle_, false)) FreeMpi(own_);
  }

 private:
  Status Post(std::unique_ptr<Message> message, void* data, std::unique_ptr<Request>* request) {
    HVD_EXT_RETURN_IF_ERROR(message->Post(data, own_.data));
    *request = std::move(message);
    return Status::Ok();
  }

  Status ReapOutgoing() {
    for (auto at = outgoing_.begin(); at != outgoing_.end();) {
      bool done = false;
      HVD_EXT_RETURN_IF_ERROR((*at)->message.Test(&done));
      at = done ? outgoing_.erase(at) : std::next(at);
    }
    return Status::Ok();
  }

  // Posts receives for the parts that have been announced.
  Status TakeParts() {
    constexpr int kAtMost = 64;  // so that many control messages do not keep the engine from its data
    for (int i = 0; i < kAtMost; ++i) {
      int announced = 0;
      MPI_Message handle;
      MPI_Status status;
      HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, own_.control, &announced, &handle, &status),
                                  "control messages of any rank");
      if (!announced) return Status::Ok();
      int nbytes = 0;
      HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Get_count(&status, MPI_BYTE, &nbytes), "control message");
      IncomingPart& part = incoming_[status.MPI_SOURCE].parts.emplace_back();
      part.last = status.MPI_TAG == kLast;
      part.bytes.resize(static_cast<size_t>(nbytes));
      HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Imrecv(part.bytes.data(), nbytes, MPI_BYTE, &handle, &part.request),
                                  "control message from " + WithPeer(status.MPI_SOURCE, status.MPI_TAG, nbytes));
    }
    return Status::Ok();
  }

  // Joins finished parts to messages, per sender in the order in which they were announced.
  Status FinishParts() {
    for (auto at = incoming_.begin(); at != incoming_.end();) {
      Incoming& from = at->second;
      while (!from.parts.empty()) {
        IncomingPart& part = from.parts.front();
        int done = 0;
        HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Test(&part.request, &done, MPI_STATUS_IGNORE),
                                    "control message from rank " + std::to_string(at->first));
        if (!done) break;
        from.text += part.bytes;
        if (part.last) arrived_.emplace_back(at->first, std::exchange(from.text, std::string()));
        from.parts.pop_front();
      }
      at = from.parts.empty() && from.text.empty() ? incoming_.erase(at) : std::next(at);
    }
    return Status::Ok();
  }

  const MpiCommunicators own_;
  const int rank_;
  const int size_;
  const int64_t largest_tag_;
  bool idle_ = false;  // closed, and MPI holds nothing of ours
  std::list<std::unique_ptr<Outgoing>> outgoing_;
  std::map<int, Incoming> incoming_;
  std::deque<std::pair<int, std::string>> arrived_;
};

}  // namespace

Status MakeMpiTransportOn(const MpiCommunicators& communicators, std::shared_ptr<Transport>* transport) {
  int rank = 0, size = 0;
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Comm_rank(communicators.data, &rank), "all ranks");
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Comm_size(communicators.data, &size), "all ranks");
  // Every MPI has this attribute, on every communicator; the smallest that the standard allows is 32767.
  int* largest_tag = nullptr;
  int found = 0;
  HVD_EXT_RETURN_IF_MPI_ERROR(MPI_Comm_get_attr(communicators.data, MPI_TAG_UB, &largest_tag, &found), "all ranks");
  if (!found) return Internal("MPI_Comm_get_attr: MPI does not say which tags it takes (MPI_TAG_UB)");
  *transport = std::make_shared<MpiTransport>(communicators, rank, size, *largest_tag);
  return Status::Ok();
}

}  // namespace hvd_ext

#endif  // HVD_EXT_WITH_MPI

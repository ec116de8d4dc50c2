// Messages between ranks. There are five implementations: MPI (transport_mpi.cc); connections that the caller has made,
// for a job without MPI (transport_mesh.cc); the threads of one process (transport_threads.cc), which the native tests
// use and which carries a job of one rank started without a launcher;
// connections of our own between hosts, in front of MPI (transport_tcp.cc); and shared memory inside a host, in front
// of whatever carries messages between hosts (transport_host.cc).
//
// Everything here is called by whoever has the engine's progress lock, except Abort, Subset, Rings and what is constant
// (rank, size, arena, doorbell, largest_tag), which any thread may call. Policy (time-outs, tags, retries,
// statistics) is the engine's. A failing call returns kCommunication with the call, its code's text and the peer.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/device.h"
#include "shm/arena.h"
#include "shm/doorbell.h"

namespace hvd_ext {

// The longest message that a plan's row is cut into: one that takes long over a slow link must not look like a stall. A
// multiple of every dtype's size.
constexpr int64_t kPieceNbytes = 4 << 20;

// What pairs a message with its receive, and what proves that the right two have been paired. The tag pairs them. The
// run of the tag's lane that the message belongs to, which each rank counts for itself, and the segment of that run
// travel with the message. A receive that meets another label fails, so that a miscount can never give one call the
// data of another.
struct Label {
  Label(int tag, int64_t run = 0, int64_t segment = 0)  // NOLINT: an int is a label of run 0
      : tag(tag), run(static_cast<uint32_t>(run)), segment(static_cast<uint32_t>(segment)) {}

  bool Belongs(const Label& other) const { return run == other.run && segment == other.segment; }

  int32_t tag;
  uint32_t run, segment;  // modulo 2^32
};

// One message under way. Owned by the transport; the caller keeps the pointer until Test reports it done, and keeps the
// buffer alive that long.
class Request {
 public:
  virtual ~Request() = default;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // What carries data between hosts, for people.
  virtual const char* between_hosts() const { return "threads"; }
  // Tags of data messages are in [0, largest_tag()].
  virtual int64_t largest_tag() const { return std::numeric_limits<int32_t>::max(); }

  // Data. Messages of one (sender, receiver, tag) arrive in the order in which they were sent, and match receives in
  // the order in which those were posted. Both sides give the same label and the same nbytes (0 is allowed and moves
  // nothing); Test of a receive that meets anything else fails. A message may be longer than 2^31 - 1 bytes: the MPI
  // transport cuts it into parts, which also keeps each part below the eager limit.
  virtual Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) = 0;
  virtual Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) = 0;
  virtual Status Test(Request* request, bool* done) = 0;

  // Sets how errors name the run of a label: "allreduce 'x' (run 17 of lane 0)". Called before the first message.
  using Names = std::function<std::string(const Label&)>;
  virtual void NameBy(Names names) { names_ = std::move(names); }
  // What a receive fails with that has met a message with the label `came`.
  Status MeantForAnother(int peer, const Label& expected, const Label& came) const;
  // The error of a receive that has met a message of another size.
  static Status OfAnotherSize(int peer, int64_t tag, int64_t expected_nbytes, int64_t came_nbytes);
  // Either of them, or ok where the message is what the receive expects.
  Status CheckMet(int peer, const Label& expected, int64_t expected_nbytes, const Label& came,
                  int64_t came_nbytes) const;

  // Zero-copy receive: from such a peer a message may be received with data == nullptr. When its request is done, the
  // message lies at Received in the peer's memory, until the request is destroyed; only then does the peer's send end.
  // So the receiver must not wait for another rank in between.
  virtual bool IsZeroCopy(int /*peer*/) const { return false; }
  virtual const char* Received(const Request* /*request*/) const { return nullptr; }

  // Memory whose messages the ranks of this host receive without a copy; null if there is none. It outlives the
  // transport as long as it has a reference.
  virtual std::shared_ptr<Arena> arena() const { return nullptr; }

  // Whether messages to and from a peer may lie in memory of the device: each rank's operations reach that of the
  // other. Such a message is received with data == nullptr, and its request is kept until the operations on it have
  // ended.
  bool ReachesDevice(int peer) const { return Reaches(MediumTo(peer)); }
  virtual Medium MediumTo(int /*peer*/) const { return Medium::kNone; }
  // No message is received any more: leaves the peers' memory of the device.
  virtual void LeaveDevices() {}

  // Rung by whoever has work for the engine's thread. Rings says whether all peers ring it too, for each message that
  // comes and each that ends; that can become false, for good.
  virtual Doorbell* doorbell() { return &own_doorbell_; }
  virtual bool Rings() const { return false; }

  // Control messages: whole, of any length, in order for each pair of ranks, on a channel of their own; sending never
  // waits. A rank may send to itself. ReceiveControl returns at once; *peer is -1 when nothing has arrived.
  virtual Status SendControl(int peer, std::string message) = 0;
  virtual Status ReceiveControl(int* peer, std::string* message) = 0;

  // Whether ReceiveControl is to be called now and then also where all peers ring: it finds out there that one is gone.
  virtual bool Watches() const { return false; }

  // Whether a request may be destroyed while it is under way: nothing touches its memory afterwards, but for peers that
  // read a message from shared memory.
  virtual bool Forgets() const { return false; }

  // Whether control messages have not been sent to the end; the engine waits for that before it stops.
  virtual bool ControlPending() = 0;

  // Makes a transport between some of the ranks, of which this is one; its rank i is ranks[i] here. Only these ranks
  // call it, with equal arguments and one subset after the other, from any thread but never from two at a time. Other
  // ranks may meanwhile make subsets with other tags.
  virtual Status Subset(const std::vector<int>& /*ranks*/, int /*tag*/, std::shared_ptr<Transport>* /*subset*/) {
    return Internal("this transport makes no subsets");
  }

  // Ends the job at once and non-zero (MPI_Abort); any thread. The threads transport fails all its peers instead.
  virtual void Abort(int code) = 0;

  // Called after the last message; does not wait. Data requests still under way are cancelled or kept, never freed.
  virtual void Close() = 0;

  // Called after Close where all ranks have stopped with nothing under way, and have left the devices of others: gives
  // back what would else be kept until the process ends. Does not wait.
  virtual void Release() {}

 private:
  Doorbell own_doorbell_;
  Names names_;
};

// A request of a transport in front of another one.
struct RequestInFront : Request {
  RequestInFront(int peer, const Label& label, char* data, int64_t nbytes)
      : peer(peer), label(label), data(data), nbytes(nbytes) {}

  // Tests the request of the transport behind, where that carries this one.
  Status TestCarried(Transport* behind) {
    if (carried == nullptr) return Status::Ok();
    HVD_EXT_RETURN_IF_ERROR(behind->Test(carried.get(), &done));
    if (done) carried.reset();
    return Status::Ok();
  }
  // Whether a message is the one that this receive expects; if not, the receive has failed.
  bool Expects(const Transport& behind, const Label& came, int64_t came_nbytes) {
    error = behind.CheckMet(peer, label, nbytes, came, came_nbytes).message;
    return error.empty();
  }

  const int peer;
  const Label label;
  char* const data;  // a receive's
  const int64_t nbytes;
  bool done = false;
  bool waits = false;  // a receive that has met no message yet
  std::string error;
  std::unique_ptr<Request> carried;  // by the transport behind
};

// A transport in front of another one, which carries the control messages, and the data that this one does not carry:
// without overrides, all of it.
class TransportInFront : public Transport {
 public:
  explicit TransportInFront(std::shared_ptr<Transport> behind) : behind_(std::move(behind)) {}

  int rank() const override { return behind_->rank(); }
  int size() const override { return behind_->size(); }
  const char* between_hosts() const override { return behind_->between_hosts(); }
  int64_t largest_tag() const override { return behind_->largest_tag(); }
  void NameBy(Names names) override {
    Transport::NameBy(names);
    behind_->NameBy(std::move(names));
  }
  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return behind_->Send(peer, label, data, nbytes, request);
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return behind_->Recv(peer, label, data, nbytes, request);
  }
  Status Test(Request* request, bool* done) override { return behind_->Test(request, done); }
  Status SendControl(int peer, std::string message) override { return behind_->SendControl(peer, std::move(message)); }
  Status ReceiveControl(int* peer, std::string* message) override { return behind_->ReceiveControl(peer, message); }
  bool Watches() const override { return behind_->Watches(); }
  bool Forgets() const override { return behind_->Forgets(); }
  bool ControlPending() override { return behind_->ControlPending(); }
  Status Subset(const std::vector<int>& ranks, int tag, std::shared_ptr<Transport>* subset) override {
    return behind_->Subset(ranks, tag, subset);
  }
  void Abort(int code) override { behind_->Abort(code); }
  void Close() override { behind_->Close(); }
  void Release() override { behind_->Release(); }

 protected:
  Transport* behind() const { return behind_.get(); }
  // Hands a request over, and gives the place for that of the transport behind, which carries it.
  static std::unique_ptr<Request>* Carried(std::unique_ptr<RequestInFront> mine, std::unique_ptr<Request>* request) {
    std::unique_ptr<Request>* carried = &mine->carried;
    *request = std::move(mine);
    return carried;
  }

 private:
  const std::shared_ptr<Transport> behind_;
};

// Ranks as threads of one process: element r is rank r's. One rank gives the transport of a job without a launcher.
std::vector<std::shared_ptr<Transport>> MakeThreadTransports(int size);

// Starts MPI with MPI_THREAD_MULTIPLE, or attaches to an MPI that is started already, and duplicates the world.
// Fails with words where MPI has been finalised or was started without thread support. Second and later calls of one
// process give a transport on fresh communicators. MPI is finalised at exit, by us only if we started it (see
// FinishMpi).
Status MakeMpiTransport(std::shared_ptr<Transport>* transport);

// A job on connections that the caller has made: sockets[r] is the one with rank r, that of `rank` is not used. They
// belong to the transport, which closes them.
Status MakeMeshTransport(int rank, const std::vector<int>& sockets, std::shared_ptr<Transport>* transport);

struct TcpOptions {
  enum Use { kNever, kMeasured, kAlways };
  Use use = kAlways;        // kMeasured: unless `between` is clearly faster, as over InfiniBand; rank 0's value counts
  std::string interfaces;   // names of network interfaces or networks ("10.0.0.0/24"), with commas; empty: all
  std::string congestion;   // the name of Linux's congestion control; where it is not there, or empty: the system's
  bool inside_too = false;  // between ranks of one host as well; for tests
  double leaving_s = 5;     // a peer that closes its connection may have left in order: so long it may say so
};

// Puts connections of our own in front of another transport, for the ranks of other hosts that can be reached; all
// ranks call it together, before the first message. A rank that never uses them is not reached. It gives `between`
// where no rank can be reached, or where that is faster. Control messages always go by `between`.
Status MakeTcpTransport(std::shared_ptr<Transport> between, const TcpOptions& options,
                        std::shared_ptr<Transport>* transport);

// Puts shared memory in front of another transport, for the peers with which it works both ways; all ranks call it
// together, before the first message. A rank without arena (null), on another host or in another container, or that
// cannot map the other's: then all messages of that pair go by `between`. `device`: where buckets lie; null: the host.
Status MakeHostTransport(std::shared_ptr<Transport> between, std::shared_ptr<Arena> arena,
                         std::shared_ptr<Device> device, std::shared_ptr<Transport>* transport);

// At process exit (Python's atexit): MPI_Finalize if we started MPI and it is not finalised. `failed`: this rank is
// going down alone, so MPI_Abort with `code` instead: MPI_Finalize would wait for the others.
void FinishMpi(bool failed, int code);

}  // namespace hvd_ext

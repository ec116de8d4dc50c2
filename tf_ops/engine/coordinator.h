// Rank 0's part in the calls: it waits until all ranks have announced a call, compares what must agree, and orders the
// calls. Pure logic: no transport, no clock.
//
// The n-th announcement of a name by one rank belongs to the n-th of every other rank: control messages of one rank
// stay in order, so a rank's announcement goes to the oldest entry of its name that still lacks this rank. That holds
// only while a rank has one call of a name under way. If it has two, two threads have made them, in an order that
// differs from rank to rank. Both calls are then an error on all ranks, because it is not known which calls of the
// other ranks they belong to.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "engine/message.h"

namespace hvd_ext {

// "allreduce 'x'"
std::string NameOfCall(const CallTerms& call);

struct Outgoing {
  int peer;
  ControlMessage message;
};

class Coordinator {
 public:
  // `numbers`: see Config.
  explicit Coordinator(int size, std::vector<int> numbers = {});

  void Receive(int rank, CallAnnouncement announcement, double now_s, std::vector<Outgoing>* out);
  // The rank gives zeros to calls until all ranks have joined (EndJoin), by the plans with these digests. Calls that
  // wait for it start, or are refused where zeros would be wrong.
  void Join(int rank, const std::vector<int64_t>& digests, std::vector<Outgoing>* out);
  void EndJoin();
  // The rank has shut down: refuses all calls that wait, because none can end without it.
  void Leave(int rank, std::vector<Outgoing>* out);
  // Fails with the words for the user once a call has waited for `fatal_s`. Every `warn_s` it tells the ranks that wait
  // that rank 0 knows of them. A call's warning is given once, and again when fewer ranks are missing.
  Status Watch(double now_s, double warn_s, double fatal_s, std::vector<Outgoing>* out,
               std::vector<std::string>* warnings);

  bool waiting() const { return waiting_ > 0; }

 private:
  struct Entry {
    std::vector<CallAnnouncement> announcements;  // by rank
    std::vector<char> here;
    int count = 0;
    double since_s = 0;
    int64_t warnings = 0;
    int warned_of = 0;  // `count` when a warning was printed last
    std::string clash;  // why two calls at once are an error; the ranks that are here have been told, so none waits
  };

  // Why the call that this rank announces must not be under way together with others of its calls, which it refuses;
  // empty where it may.
  std::string Clash(int rank, const CallAnnouncement& coming, std::vector<Outgoing>* out);
  // Whether each rank has announced the call or has joined.
  bool IsComplete(const Entry& entry) const;
  void Finish(const Entry& entry, std::vector<Outgoing>* out) const;
  bool Awaited(const Entry& entry) const;  // a rank waits that has neither been answered nor refused the call itself
  Status Compare(const Entry& entry) const;
  // Refuses a call that needs more than zeros of the ranks that have joined.
  Status CheckZeros(const Entry& entry) const;
  const CallAnnouncement& FirstOf(const Entry& entry) const;  // that of the lowest rank that is here
  std::string Waits(const Entry& entry, double waited_s) const;
  void Refuse(const Entry& entry, const Status& status, std::vector<Outgoing>* out) const;
  std::string NameOf(const Entry& entry) const;  // as the first rank that is here calls it
  Status Gone(const Entry& entry) const;
  int Number(int rank) const;

  int size_;
  std::vector<int> numbers_;
  int gone_ = -1;                              // the first rank that has left
  std::vector<char> joined_;                   // by rank
  std::vector<std::vector<int64_t>> digests_;  // by rank, of those that have joined
  int64_t waiting_ = 0;
  std::unordered_map<std::string, std::deque<Entry>> entries_;
};

}  // namespace hvd_ext

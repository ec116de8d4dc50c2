// Rank 0's part in the calls: waits until all ranks have announced one, compares what must agree, and gives the order.
// Pure logic: no transport, no clock.
//
// The n-th announcement of a name by one rank belongs to the n-th of every other rank: control messages of one rank
// stay in order, so a rank's announcement goes to the oldest entry of its name that still lacks this rank. That holds
// only while a rank has one call of a name under way: two have come from two threads, in any order. Both are an error
// on all ranks then, for nobody knows which calls of the others they are.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "engine/message.h"

namespace hvd_ext {

// kAnnounce's fields from a call; `payload` is an exchange's.
Message Announce(int64_t id, const CallSpec& spec, std::string payload);
// "allreduce 'x'"
std::string NameOfCall(const CallSpec& spec);

struct Outgoing {
  int peer;
  Message message;
};

class Coordinator {
 public:
  // `numbers`: see Config.
  explicit Coordinator(int size, std::vector<int> numbers = {});

  void Receive(int rank, Message announcement, double now_s, std::vector<Outgoing>* out);
  // Refuses what waits: nobody can end a collective without this rank.
  void Leave(int rank, std::vector<Outgoing>* out);
  // A call that has waited for `fatal_s` gives the words with which everything fails. Every `warn_s` the ranks that
  // wait hear that rank 0 knows of it; what is to be printed comes once for each call, and again when fewer are
  // missing.
  Status Watch(double now_s, double warn_s, double fatal_s, std::vector<Outgoing>* out,
               std::vector<std::string>* warnings);

  bool waiting() const { return waiting_ > 0; }

 private:
  struct Entry {
    std::vector<Message> announcements;  // by rank
    std::vector<char> here;
    int count = 0;
    double since_s = 0;
    int64_t warnings = 0;
    int warned_of = 0;  // `count` when a warning was printed last
    std::string clash;  // two calls at once: the words, which all have been told who are here; nobody waits
  };

  // The words for calls of one rank that must not be under way at once: those that are, and the one that comes. Empty:
  // it may come.
  std::string Clash(int rank, const Message& coming, std::vector<Outgoing>* out);
  void Finish(const Entry& entry, std::vector<Outgoing>* out) const;
  bool Awaited(const Entry& entry) const;  // somebody waits who has not been answered or refused it himself
  Status Compare(const Entry& entry) const;
  std::string Waits(const Entry& entry, double waited_s) const;
  void Refuse(const Entry& entry, const Status& status, std::vector<Outgoing>* out) const;
  Status Gone(const Entry& entry) const;
  int Number(int rank) const;

  int size_;
  std::vector<int> numbers_;
  int gone_ = -1;  // the first rank that has left
  int64_t waiting_ = 0;
  std::unordered_map<std::string, std::deque<Entry>> entries_;
};

}  // namespace hvd_ext

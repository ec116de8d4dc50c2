// Control messages between the engines of a job, and their bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/status.h"

namespace hvd_ext {

enum class MessageType : int64_t {
  // Calls. `id` is the receiver's (or announcer's) own number of the call.
  kAnnounce =
      1,  // any -> 0: text = name, numbers = kind, dtype, op, root, plan digest, segment_nbytes, wire dtype, counted,
          // shape...; texts = {payload, terms, the user's dtype}, and where an alltoall has splits, their int64
  kStart = 2,   // 0 -> all: run it now; numbers = dimension 0 of every rank (allgather) or the
                // rows from each rank to each (alltoall), texts = payloads (exchange)
  kRefuse = 3,  // 0 -> who has announced it: end it with `code` and `text`
  kKnown = 4,   // 0 -> those who wait: it knows that they do
  // Lanes. `id` is the lane.
  kLaneFailed = 10,  // any -> all: nothing runs on this lane any more; code, text
  kLaneClosed = 11,  // any -> all: the sender takes part in numbers[0] runs of this lane and no more
  kAsk = 12,         // any -> 0: my run numbers[0] has made no progress for numbers[1] ms; text = its name
  kProbe = 13,       // 0 -> all: how far are you? numbers = {inquiry}
  kReport = 14,   // any -> 0: numbers = {inquiry, state, runs, names missing in all}, texts = the first of these names
  kVerdict = 15,  // 0 -> who has asked: numbers[0] = run, text = what holds it up
  // Life.
  kFailed = 20,  // any -> all: the sender has failed; text
  kLeave = 21,   // any -> all: the sender's last message
};

struct Message {
  MessageType type = MessageType::kLeave;
  int64_t id = 0;
  Code code = Code::kOk;
  std::string text;
  std::vector<int64_t> numbers;
  std::vector<std::string> texts;
};

std::string Encode(const Message& message);

// Refuses bytes that are no whole message (kInternal).
Status Decode(const std::string& bytes, Message* message);

}  // namespace hvd_ext

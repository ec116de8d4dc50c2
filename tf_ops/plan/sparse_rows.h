// The rules of the rows of sparse plans (ir.def), beyond those of a single row.
#pragma once

#include <string>

#include "base/status.h"
#include "plan/plan.h"

namespace hvd_ext {

// The name of an opcode, such as "SEND_SPARSE"; null for a value that is no opcode.
const char* NameOf(Opcode opcode);
// The units of a row as text, such as "[3, 5)".
std::string Units(const Row& row);

// Local rows whose PEER must be this rank.
inline bool IsOwn(Opcode opcode) {
  return opcode == Opcode::SELECT || opcode == Opcode::CLEAR || opcode == Opcode::PACK || opcode == Opcode::FOLD ||
         opcode == Opcode::RESELECT;
}

// Sets the plan's `sparse` and the units of its feedback. Refuses a local row in a round with messages, a second SELECT
// or FOLD, and a row that reads a vector before it exists: the own vector comes from SELECT, PACK, TAKE or RESELECT,
// and a peer's from a RECV_SPARSE of an earlier round.
Status CheckSparseRows(int rank, Plan* plan);

}  // namespace hvd_ext

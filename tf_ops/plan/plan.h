// A plan as the engine runs it: the rows of one rank, decoded from int64 and checked. See ir.def for the language.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace hvd_ext {

enum class Opcode : int64_t {
#define HVD_EXT_OPCODE(name, value) name = value,
#include "plan/ir.def"
};

// Opcodes of sparse plans: see ir.def.
inline bool IsSparse(Opcode opcode) { return opcode >= Opcode::SELECT; }
inline bool IsSparseMessage(Opcode opcode) { return opcode == Opcode::SEND_SPARSE || opcode == Opcode::RECV_SPARSE; }
inline bool IsLocal(Opcode opcode) { return IsSparse(opcode) && !IsSparseMessage(opcode); }

struct Row {
  int64_t round;
  Opcode opcode;
  int peer;
  int64_t begin;             // first unit
  int64_t count;             // units, at least 1
  bool after_sends = false;  // of a RECV_REDUCE: rows of its round send some of its units, and must end first
};

struct Plan {
  int64_t units = 1;
  std::vector<Row> rows;  // sorted by round
  bool sparse = false;    // it has opcodes of sparse plans
  // The units of its SELECT or FOLD row; the count is 0 if it has neither.
  int64_t feedback_begin = 0, feedback_count = 0;
};

// Decodes `n_rows` rows of five int64 (ir.def's columns). Refuses, with a text that names the row and the value: an
// unknown opcode, a peer outside [0, size) or equal to `rank`, units outside [0, units), a count below 1, rounds that
// decrease, and within one round a unit that is overwritten by one row and sent or received by another. In sparse plans
// it also refuses a local row in a round with messages, a second SELECT or FOLD, and a read of entries that do not
// exist yet (sparse_rows.h).
Status Decode(const int64_t* rows, int64_t n_rows, int64_t units, int rank, int size, Plan* plan);

// Returns the first element of unit `unit` when `elements` are divided into `units`: floor(unit * elements / units),
// without overflow. Unit u holds the elements [UnitBegin(u), UnitBegin(u + 1)).
int64_t UnitBegin(int64_t unit, int64_t units, int64_t elements);

}  // namespace hvd_ext

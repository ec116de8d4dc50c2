#include "plan/plan.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "plan/sparse_rows.h"

namespace hvd_ext {
namespace {

enum Column : int {
#define HVD_EXT_COLUMN(name, index) k##name = index,
#include "plan/ir.def"
  kColumns
};

std::string Number(int64_t value) { return std::to_string(value); }

// Two rows of one round may touch a unit only if neither overwrites it. If two rows overwrote it, the message that
// arrives later would win. If one sends it, a reduction can wait in its scratch memory until the unit has left, but a
// message that overwrites cannot.
bool MayOverlap(Opcode a, Opcode b) { return a != Opcode::RECV && b != Opcode::RECV; }

Status CheckRound(const std::vector<Row>& rows, size_t first, size_t end) {
  std::vector<size_t> order;
  for (size_t i = first; i < end; ++i) {
    if (!IsSparse(rows[i].opcode)) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rows[a].begin < rows[b].begin; });
  // Rows come in the order of their first units, so a row overlaps an earlier one exactly if it begins before the
  // furthest end so far.
  const Row* furthest[3] = {nullptr, nullptr, nullptr};
  constexpr Opcode kOpcodes[3] = {Opcode::SEND, Opcode::RECV, Opcode::RECV_REDUCE};
  for (size_t i : order) {
    const Row& row = rows[i];
    for (int k = 0; k < 3; ++k) {
      const Row*& other = furthest[k];
      if (other != nullptr && row.begin < other->begin + other->count && !MayOverlap(row.opcode, other->opcode)) {
        return Invalid("row " + Number(static_cast<int64_t>(i)) + ": " + NameOf(row.opcode) + " of units " +
                       Units(row) + " overlaps " + NameOf(other->opcode) + " of units " + Units(*other) + " (row " +
                       Number(other - rows.data()) + ") in round " + Number(row.round) +
                       "; a unit that is overwritten in a round must not be sent or received again in it");
      }
      if (row.opcode == kOpcodes[k] && (other == nullptr || row.begin + row.count > other->begin + other->count)) {
        other = &row;
      }
    }
  }
  return Status::Ok();
}

// Marks the reductions of one round whose units are also sent in it.
void MarkReductions(std::vector<Row>* rows, size_t first, size_t end) {
  std::vector<std::pair<int64_t, int64_t>> sent;  // begin of a row, and the furthest end of the rows up to this one
  for (size_t i = first; i < end; ++i) {
    const Row& row = (*rows)[i];
    if (row.opcode == Opcode::SEND) sent.emplace_back(row.begin, row.begin + row.count);
  }
  std::sort(sent.begin(), sent.end());
  for (size_t i = 1; i < sent.size(); ++i) sent[i].second = std::max(sent[i].second, sent[i - 1].second);
  for (size_t i = first; i < end; ++i) {
    Row& row = (*rows)[i];
    if (row.opcode != Opcode::RECV_REDUCE) continue;
    auto behind = std::lower_bound(sent.begin(), sent.end(), std::make_pair(row.begin + row.count, int64_t{0}));
    row.after_sends = behind != sent.begin() && std::prev(behind)->second > row.begin;
  }
}

Status DecodeRow(const int64_t* values, const std::string& name, int64_t units, int rank, int size, Row* row) {
  row->opcode = static_cast<Opcode>(values[kOPCODE]);
  if (NameOf(row->opcode) == nullptr) {
    return Invalid(name + ": opcode " + Number(values[kOPCODE]) + " is unknown to this library (plan version " +
                   Number(HVD_EXT_PLAN_VERSION) + "); build the library again: python -m hvd_ext build");
  }
  int64_t peer = values[kPEER];
  if (peer < 0 || peer >= size) {
    return Invalid(name + ": peer " + Number(peer) + " must be in [0, " + Number(size) + ")");
  }
  bool own_allowed = row->opcode == Opcode::SCATTER_ADD, own_needed = IsOwn(row->opcode);
  if (peer == rank && !own_allowed && !own_needed) {
    return Invalid(name + ": peer " + Number(peer) + " must be another rank than this one");
  }
  if (peer != rank && own_needed) {
    return Invalid(name + ": peer " + Number(peer) + " of " + NameOf(row->opcode) + " must be this rank, " +
                   Number(rank));
  }
  row->peer = static_cast<int>(peer);
  row->begin = values[kBEGIN];
  row->count = values[kCOUNT];
  if (row->begin < 0 || row->begin >= units) {
    return Invalid(name + ": begin " + Number(row->begin) + " must be in [0, " + Number(units) + ")");
  }
  if (row->count < 1 || row->count > units - row->begin) {
    return Invalid(name + ": count " + Number(row->count) + " must be in [1, " + Number(units - row->begin) +
                   "], the units from begin " + Number(row->begin) + " to the end");
  }
  row->round = values[kROUND];
  return Status::Ok();
}

}  // namespace

const char* NameOf(Opcode opcode) {
  switch (opcode) {
#define HVD_EXT_OPCODE(name, value) \
  case Opcode::name:                \
    return #name;
#include "plan/ir.def"
  }
  return nullptr;
}

std::string Units(const Row& row) { return "[" + Number(row.begin) + ", " + Number(row.begin + row.count) + ")"; }

Status Decode(const int64_t* rows, int64_t n_rows, int64_t units, int rank, int size, Plan* plan) {
  if (units < 1) return Invalid("units (" + Number(units) + ") must be at least 1");
  if (n_rows < 0) return Invalid("the number of rows (" + Number(n_rows) + ") must not be negative");
  if (rank < 0 || rank >= size) return Invalid("rank (" + Number(rank) + ") must be in [0, " + Number(size) + ")");
  Plan decoded;
  decoded.units = units;
  decoded.rows.resize(static_cast<size_t>(n_rows));
  for (size_t i = 0, first_of_round = 0; i < decoded.rows.size(); ++i) {
    const std::string name = "row " + std::to_string(i);
    Row& row = decoded.rows[i];
    HVD_EXT_RETURN_IF_ERROR(DecodeRow(rows + i * kColumns, name, units, rank, size, &row));
    int64_t least = i == 0 ? 0 : decoded.rows[i - 1].round;
    if (row.round < least) {
      return Invalid(name + ": round " + Number(row.round) + " must not be less than " + Number(least) +
                     (i == 0 ? ", the first" : ", the round of the row before"));
    }
    if (row.round != least) first_of_round = i;
    bool last_of_round = i + 1 == decoded.rows.size() || rows[(i + 1) * kColumns + kROUND] != row.round;
    if (!last_of_round) continue;
    HVD_EXT_RETURN_IF_ERROR(CheckRound(decoded.rows, first_of_round, i + 1));
    MarkReductions(&decoded.rows, first_of_round, i + 1);
  }
  HVD_EXT_RETURN_IF_ERROR(CheckSparseRows(rank, &decoded));
  *plan = std::move(decoded);
  return Status::Ok();
}

int64_t UnitBegin(int64_t unit, int64_t units, int64_t elements) {
  return static_cast<int64_t>(static_cast<__int128>(unit) * elements / units);
}

}  // namespace hvd_ext

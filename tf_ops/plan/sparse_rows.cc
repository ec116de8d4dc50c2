#include "plan/sparse_rows.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>

namespace hvd_ext {
namespace {

struct Span {
  int64_t begin = 0, end = 0;

  bool Holds(const Row& row) const { return begin <= row.begin && row.begin + row.count <= end; }
  std::string Words() const { return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")"; }
};

// Tracks which entries exist while the rows run.
class Vectors {
 public:
  explicit Vectors(int rank) : rank_(rank) {}

  Status Run(const Row& row, const std::string& name, Plan* plan) {
    switch (row.opcode) {
      case Opcode::SELECT:
      case Opcode::FOLD:
        if (plan->feedback_count > 0) {
          return Invalid(name + ": " + NameOf(row.opcode) +
                         " must be the plan's only SELECT or FOLD; error feedback would run twice");
        }
        plan->feedback_begin = row.begin;
        plan->feedback_count = row.count;
        if (row.opcode == Opcode::FOLD) return Status::Ok();
        selected_ = {row.begin, row.begin + row.count};
        Make(row);
        return Status::Ok();
      case Opcode::PACK:
        Make(row);
        return Status::Ok();
      case Opcode::RESELECT:
        if (!selected_.Holds(row)) {
          return Invalid(name + ": RESELECT of units " + Units(row) + " must be in the units of a SELECT before it, " +
                         selected_.Words());
        }
        if (!sums_) own_.clear();
        sums_ = true;
        for (const Span& part : own_) {
          if (row.begin < part.end && part.begin < row.begin + row.count) {
            return Invalid(name + ": RESELECT of units " + Units(row) + " must not overlap another, of units " +
                           part.Words());
          }
        }
        own_.push_back({row.begin, row.begin + row.count});
        return Status::Ok();
      case Opcode::SEND_SPARSE:
        return CheckOwn(row, name);
      case Opcode::RECV_SPARSE:
        return Receive(row, name);
      case Opcode::SCATTER_ADD:
        return row.peer == rank_ ? CheckOwn(row, name) : CheckCame(row, name);
      case Opcode::MERGE:
        if (const Span own = own_.empty() ? Span{} : own_.front();
            !selected_.Holds(row) || own.begin < selected_.begin || own.end > selected_.end) {
          return Invalid(name + ": MERGE of units " + Units(row) + " must be in the units of a SELECT before it, " +
                         selected_.Words() + ", and so must the own vector, " + own.Words());
        }
        HVD_EXT_RETURN_IF_ERROR(CheckOwn(row, name));
        return CheckCame(row, name);
      case Opcode::TAKE:
        HVD_EXT_RETURN_IF_ERROR(CheckCame(row, name));
        Make(row);
        return Status::Ok();
      default:
        return Status::Ok();
    }
  }

  void EndRound() {
    for (auto& [peer, pieces] : came_) {
      for (auto& [begin, piece] : pieces) piece.readable = true;
    }
    came_now_ = false;
  }
  bool came_now() const { return came_now_; }

 private:
  struct Piece {
    int64_t end;
    bool readable;
  };

  void Make(const Row& row) {
    own_ = {{row.begin, row.begin + row.count}};
    sums_ = false;
  }

  std::string OwnWords() const {
    std::string words;
    for (const Span& part : own_) words += (words.empty() ? "" : " and ") + part.Words();
    return words.empty() ? "not been made" : words;
  }

  Status CheckOwn(const Row& row, const std::string& name) const {
    if (std::any_of(own_.begin(), own_.end(), [&row](const Span& part) { return part.Holds(row); }))
      return Status::Ok();
    return Invalid(name + ": " + NameOf(row.opcode) + " of units " + Units(row) +
                   " must be of units of the own vector, which has " + OwnWords() +
                   "; SELECT, PACK, TAKE or RESELECT them first");
  }

  Status CheckCame(const Row& row, const std::string& name) const {
    auto peer = came_.find(row.peer);
    if (peer != came_.end()) {
      auto piece = peer->second.find(row.begin);
      if (piece != peer->second.end() && piece->second.end == row.begin + row.count) return Status::Ok();
    }
    return Invalid(name + ": " + NameOf(row.opcode) + " of units " + Units(row) + " of rank " +
                   std::to_string(row.peer) + " must be of just the units of a RECV_SPARSE before it");
  }

  // A received piece replaces all pieces that it overlaps.
  Status Receive(const Row& row, const std::string& name) {
    std::map<int64_t, Piece>& pieces = came_[row.peer];
    auto at = pieces.lower_bound(row.begin);
    if (at != pieces.begin() && std::prev(at)->second.end > row.begin) --at;
    while (at != pieces.end() && at->first < row.begin + row.count) {
      if (!at->second.readable) {
        return Invalid(name + ": RECV_SPARSE of units " + Units(row) + " from rank " + std::to_string(row.peer) +
                       " must not overlap another of its round, of units [" + std::to_string(at->first) + ", " +
                       std::to_string(at->second.end) + ")");
      }
      at = pieces.erase(at);
    }
    pieces[row.begin] = {row.begin + row.count, false};
    came_now_ = true;
    return Status::Ok();
  }

  const int rank_;
  Span selected_;
  std::vector<Span> own_;                         // the parts of the own vector: one, or those of RESELECTs
  bool sums_ = false;                             // RESELECT has made it
  std::map<int, std::map<int64_t, Piece>> came_;  // by peer, then first unit
  bool came_now_ = false;                         // a piece was received in this round
};

}  // namespace

Status CheckSparseRows(int rank, Plan* plan) {
  const std::vector<Row>& rows = plan->rows;
  plan->sparse = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return IsSparse(row.opcode); });
  if (!plan->sparse) return Status::Ok();
  Vectors vectors(rank);
  for (size_t i = 0, first = 0; i < rows.size(); ++i) {
    const std::string name = "row " + std::to_string(i);
    if (rows[i].round != rows[first].round) {
      first = i;
      if (vectors.came_now()) vectors.EndRound();
    }
    if (IsLocal(rows[i].opcode) != IsLocal(rows[first].opcode)) {
      return Invalid(name + ": " + NameOf(rows[i].opcode) + " is in round " + std::to_string(rows[i].round) + " with " +
                     NameOf(rows[first].opcode) + " (row " + std::to_string(first) +
                     "); a round has either messages or local rows");
    }
    HVD_EXT_RETURN_IF_ERROR(vectors.Run(rows[i], name, plan));
  }
  return Status::Ok();
}

}  // namespace hvd_ext

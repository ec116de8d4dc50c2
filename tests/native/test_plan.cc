// What Decode accepts, and what it refuses.
#include "harness.h"
#include "plan/plan.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kSend = 1, kRecv = 2, kRecvReduce = 3, kSelect = 4, kSendSparse = 5, kRecvSparse = 6, kClear = 7,
                  kAdd = 8, kPack = 9, kMerge = 10, kTake = 11, kFold = 12, kReselect = 13;
using Rows = std::vector<std::vector<int64_t>>;  // columns: round, opcode, peer, begin, count

// Decodes for a rank of 4 with 8 units.
Status DecodeRows(const Rows& rows, Plan* plan = nullptr, int rank = 0) {
  std::vector<int64_t> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  Plan decoded;
  return Decode(flat.data(), static_cast<int64_t>(rows.size()), 8, rank, 4, plan == nullptr ? &decoded : plan);
}

void Refuses(const Rows& rows, const std::string& words, int rank = 0) {
  CHECK_FAILS(DecodeRows(rows, nullptr, rank), Code::kInvalid, words);
}

TEST("plan: rows decode to what they say") {
  Plan plan;
  CHECK_OK(DecodeRows({{0, kSend, 1, 0, 4}, {0, kRecvReduce, 3, 4, 4}, {2, kRecv, 2, 0, 8}}, &plan));
  CHECK_EQ(plan.units, 8);
  CHECK_EQ(plan.rows.size(), 3u);
  const Row &second = plan.rows[1], &third = plan.rows[2];
  CHECK(second.round == 0 && second.opcode == Opcode::RECV_REDUCE && third.round == 2 && third.opcode == Opcode::RECV);
  CHECK(second.peer == 3 && second.begin == 4 && second.count == 4);
}

TEST("plan: a job of one rank has a plan without rows, and a plan that is refused leaves the target alone") {
  Plan plan;
  CHECK_OK(Decode(nullptr, 0, 1, 0, 1, &plan));
  CHECK_EQ(plan.rows.size(), 0u);
  plan.units = 77;
  CHECK(!DecodeRows({{0, kSend, 9, 0, 1}}, &plan).ok());
  CHECK_EQ(plan.units, 77);
}

TEST("plan: unknown opcodes, peers outside the job, units outside the buffer and rounds that decrease are refused") {
  Refuses({{0, kSend, 1, 0, 1}, {0, 14, 1, 1, 1}}, "row 1: opcode 14 is unknown");
  Refuses({{0, 0, 1, 0, 1}}, "row 0: opcode 0 is unknown");
  Refuses({{0, kSend, 4, 0, 1}}, "row 0: peer 4 must be in [0, 4)");
  Refuses({{0, kSend, -1, 0, 1}}, "row 0: peer -1 must be in [0, 4)");
  Refuses({{0, kSend, (int64_t{1} << 32) + 1, 0, 1}}, "row 0: peer 4294967297");
  Refuses({{0, kSend, 0, 0, 1}}, "row 0: peer 0 must be another rank");
  CHECK_OK(DecodeRows({{0, kSend, 0, 0, 1}}, nullptr, /*rank=*/2));
  Refuses({{0, kSend, 1, -1, 1}}, "row 0: begin -1 must be in [0, 8)");
  Refuses({{0, kSend, 1, 8, 1}}, "row 0: begin 8 must be in [0, 8)");
  Refuses({{0, kSend, 1, 0, 9}}, "row 0: count 9 must be in [1, 8]");
  Refuses({{0, kSend, 1, 5, 4}}, "row 0: count 4 must be in [1, 3]");
  Refuses({{0, kSend, 1, 5, 0}}, "row 0: count 0 must be in [1, 3]");
  Refuses({{0, kSend, 1, 1, INT64_MAX}}, "count 9223372036854775807 must be in [1, 7]");
  Refuses({{3, kSend, 1, 0, 1}, {2, kSend, 1, 0, 1}}, "row 1: round 2 must not be less than 3");
  Refuses({{-1, kSend, 1, 0, 1}}, "row 0: round -1 must not be less than 0");
  Plan plan;
  CHECK_FAILS(Decode(nullptr, 0, 0, 0, 1, &plan), Code::kInvalid, "units (0) must be at least 1");
  CHECK_FAILS(Decode(nullptr, -1, 1, 0, 1, &plan), Code::kInvalid, "(-1) must not be negative");
  CHECK_FAILS(Decode(nullptr, 0, 1, 3, 3, &plan), Code::kInvalid, "rank (3) must be in [0, 3)");
}

TEST("plan: a unit that is overwritten, and sent or received too, in one round is refused") {
  Refuses({{0, kSend, 1, 0, 4}, {0, kRecv, 2, 3, 2}},
          "row 1: RECV of units [3, 5) overlaps SEND of units [0, 4) (row 0) in round 0");
  // Rows between the two that overlap, and rows of an earlier round, change nothing.
  Refuses({{0, kRecv, 3, 0, 8}, {1, kRecv, 1, 0, 6}, {1, kRecv, 2, 6, 1}, {1, kSend, 3, 5, 1}},
          "row 3: SEND of units [5, 6) overlaps RECV of units [0, 6) (row 1) in round 1");
  Refuses({{0, kSend, 1, 0, 8}, {0, kSend, 2, 1, 1}, {0, kRecv, 3, 4, 1}},
          "RECV of units [4, 5) overlaps SEND of units [0, 8)");
  Refuses({{0, kRecv, 1, 0, 4}, {0, kRecv, 2, 3, 4}}, "row 1: RECV of units [3, 7) overlaps RECV of units [0, 4)");
  Refuses({{0, kRecvReduce, 1, 2, 1}, {0, kRecv, 2, 0, 8}}, "overlaps RECV");
  CHECK_OK(DecodeRows({{0, kRecv, 1, 4, 4}, {0, kSend, 2, 0, 4}, {1, kRecv, 1, 0, 4}, {1, kSend, 2, 4, 4}}));
}

TEST("plan: several rows of a round may send a unit, or add to it") {
  CHECK_OK(DecodeRows({{0, kSend, 1, 0, 8}, {0, kSend, 2, 0, 8}, {0, kSend, 3, 2, 3}}));
  CHECK_OK(DecodeRows({{0, kRecvReduce, 1, 0, 8}, {0, kRecvReduce, 2, 0, 8}, {0, kRecvReduce, 3, 4, 1}}));
}

TEST("plan: a reduction of units that are sent in its round waits for the sends") {
  Plan plan;
  CHECK_OK(DecodeRows({{0, kRecvReduce, 1, 0, 8},
                       {0, kRecvReduce, 1, 1, 3},
                       {0, kRecvReduce, 2, 3, 1},
                       {0, kRecvReduce, 3, 5, 1},
                       {0, kSend, 2, 2, 1},
                       {0, kSend, 3, 6, 2},
                       {1, kRecvReduce, 1, 0, 8},
                       {2, kSend, 1, 0, 8}},
                      &plan));
  std::vector<bool> marks;
  for (const Row& row : plan.rows) marks.push_back(row.after_sends);
  CHECK(marks == (std::vector<bool>{true, true, false, false, false, false, false, false}));
}

TEST("plan: units divide elements without gaps") {
  for (int64_t units : {1, 2, 3, 7, 16}) {
    for (int64_t elements : {0, 1, 2, 6, 7, 8, 1009}) {
      CHECK_EQ(UnitBegin(0, units, elements), 0);
      CHECK_EQ(UnitBegin(units, units, elements), elements);
      for (int64_t unit = 0; unit < units; ++unit) {
        int64_t length = UnitBegin(unit + 1, units, elements) - UnitBegin(unit, units, elements);
        CHECK(length == elements / units || length == elements / units + 1);
      }
    }
  }
  CHECK_EQ(UnitBegin(2, 3, INT64_MAX), 6148914691236517204);  // floor(2 * (2^63 - 1) / 3)
}

// The rows of sparse plans, decoded for rank 1.
void Takes(const Rows& rows) { CHECK_OK(DecodeRows(rows, nullptr, /*rank=*/1)); }
void RefusesSparse(const Rows& rows, const std::string& words) { Refuses(rows, words, /*rank=*/1); }

TEST("sparse plan: rows decode, and the plan knows what it selects") {
  Plan plan;
  CHECK_OK(DecodeRows({{0, kSelect, 1, 2, 4},
                       {1, kSendSparse, 0, 2, 4},
                       {1, kRecvSparse, 0, 2, 4},
                       {2, kClear, 1, 2, 4},
                       {2, kAdd, 0, 2, 4},
                       {2, kAdd, 1, 2, 4}},
                      &plan, 1));
  CHECK(plan.sparse);
  CHECK_EQ(plan.feedback_begin, 2);
  CHECK_EQ(plan.feedback_count, 4);
  CHECK_OK(DecodeRows({{0, kFold, 1, 3, 1}}, &plan, 1));
  CHECK_EQ(plan.feedback_begin, 3);
  CHECK_OK(DecodeRows({{0, kSend, 0, 3, 1}}, &plan, 1));
  CHECK(!plan.sparse);
  CHECK_EQ(plan.feedback_count, 0);
}

TEST("sparse plan: a local row must be about this rank, a message about another") {
  for (int64_t opcode : {kSelect, kClear, kPack, kFold, kReselect})
    RefusesSparse({{0, opcode, 2, 0, 8}}, "must be this rank, 1");
  for (int64_t opcode : {kSendSparse, kRecvSparse, kMerge, kTake}) {
    RefusesSparse({{0, opcode, 1, 0, 8}}, "peer 1 must be another rank than this one");
  }
  RefusesSparse({{0, kAdd, 4, 0, 8}}, "peer 4 must be in [0, 4)");
}

TEST("sparse plan: a round has either messages or local rows") {
  RefusesSparse({{0, kSend, 0, 0, 1}, {0, kClear, 1, 4, 1}}, "row 1: CLEAR is in round 0 with SEND (row 0)");
  RefusesSparse({{0, kSelect, 1, 0, 8}, {0, kSendSparse, 0, 0, 8}},
                "row 1: SEND_SPARSE is in round 0 with SELECT (row 0)");
  Takes({{0, kSelect, 1, 0, 8}, {1, kSend, 0, 0, 1}, {1, kSendSparse, 0, 0, 8}});
}

TEST("sparse plan: merging gives back to the residual, so the own vector lies in it") {
  RefusesSparse({{0, kSelect, 1, 0, 1}, {0, kPack, 1, 0, 4}, {1, kRecvSparse, 0, 0, 1}, {2, kMerge, 0, 0, 1}},
                "and so must the own vector, [0, 4)");
}

TEST("sparse plan: what is selected from sums lies in the selected units, in parts that do not overlap") {
  const Rows two = {{0, kSelect, 1, 0, 8}, {0, kReselect, 1, 0, 2}, {0, kReselect, 1, 4, 2}};
  const auto then = [&two](const std::vector<int64_t>& row) {
    Rows rows = two;
    rows.push_back(row);
    return rows;
  };
  Takes(then({1, kSendSparse, 0, 4, 2}));
  RefusesSparse(then({0, kReselect, 1, 5, 2}),
                "row 3: RESELECT of units [5, 7) must not overlap another, of units [4, 6)");
  RefusesSparse(then({1, kSendSparse, 0, 0, 6}), "must be of units of the own vector, which has [0, 2) and [4, 6)");
  RefusesSparse({{0, kReselect, 1, 0, 2}}, "must be in the units of a SELECT before it, [0, 0)");
  RefusesSparse({{0, kSelect, 1, 0, 4}, {0, kReselect, 1, 3, 2}}, "must be in the units of a SELECT before it, [0, 4)");
}

TEST("sparse plan: error feedback is done once") {
  RefusesSparse({{0, kSelect, 1, 0, 4}, {0, kSelect, 1, 4, 4}}, "row 1: SELECT must be the plan's only SELECT or FOLD");
  RefusesSparse({{0, kFold, 1, 0, 4}, {3, kSelect, 1, 4, 4}}, "row 1: SELECT must be the plan's only SELECT or FOLD");
}

TEST("sparse plan: nothing of the own vector is read before it is there") {
  RefusesSparse({{0, kSendSparse, 0, 0, 8}},
                "row 0: SEND_SPARSE of units [0, 8) must be of units of the own vector, which "
                "has not been made");
  RefusesSparse({{0, kAdd, 1, 0, 8}}, "SCATTER_ADD of units [0, 8) must be of units of the own vector");
  RefusesSparse({{0, kSelect, 1, 2, 4}, {1, kSendSparse, 0, 1, 4}},
                "SEND_SPARSE of units [1, 5) must be of units of the own "
                "vector, which has [2, 6)");
  RefusesSparse({{0, kSelect, 1, 2, 4}, {1, kPack, 1, 0, 1}, {2, kSendSparse, 0, 2, 4}}, "which has [0, 1)");
  Takes({{0, kPack, 1, 2, 4}, {1, kSendSparse, 0, 3, 2}, {2, kAdd, 1, 2, 2}});
}

TEST("sparse plan: nothing of a peer's vector is read before it has come, or in other units") {
  for (int64_t opcode : {kAdd, kTake}) {
    RefusesSparse({{0, opcode, 2, 0, 8}}, "of rank 2 must be of just the units of a RECV_SPARSE before it");
    RefusesSparse({{0, kRecvSparse, 2, 0, 8}, {1, opcode, 3, 0, 8}}, "of rank 3 must be of just");
    RefusesSparse({{0, kRecvSparse, 2, 0, 8}, {1, opcode, 2, 0, 4}}, "must be of just the units");
    RefusesSparse({{0, kRecvSparse, 2, 2, 4}, {1, kRecvSparse, 2, 5, 2}, {2, opcode, 2, 2, 4}},
                  "must be of just the units");
    Takes({{0, kRecvSparse, 2, 2, 4}, {0, kRecvSparse, 2, 6, 2}, {2, opcode, 2, 2, 4}, {2, opcode, 2, 6, 2}});
    Takes({{0, kRecvSparse, 2, 2, 4}, {1, kRecvSparse, 2, 2, 4}, {2, opcode, 2, 2, 4}});
  }
  RefusesSparse({{0, kRecvSparse, 2, 2, 4}, {0, kRecvSparse, 2, 5, 2}},
                "must not overlap another of its round, of units [2, 6)");
  RefusesSparse({{0, kRecvSparse, 2, 5, 2}, {0, kRecvSparse, 2, 2, 4}},
                "must not overlap another of its round, of units [5, 7)");
}

TEST("sparse plan: a merge needs what is selected and what has come") {
  RefusesSparse({{0, kRecvSparse, 2, 0, 8}, {1, kMerge, 2, 0, 8}}, "must be in the units of a SELECT before it");
  RefusesSparse({{0, kSelect, 1, 0, 4}, {1, kRecvSparse, 2, 0, 8}, {2, kMerge, 2, 0, 8}},
                "must be in the units of a SELECT");
  RefusesSparse({{0, kSelect, 1, 0, 8}, {1, kMerge, 2, 0, 8}}, "must be of just the units of a RECV_SPARSE");
  Takes({{0, kSelect, 1, 0, 8}, {1, kRecvSparse, 2, 0, 8}, {2, kMerge, 2, 0, 8}, {3, kSendSparse, 0, 0, 8}});
  Takes({{0, kRecvSparse, 2, 0, 8}, {1, kTake, 2, 0, 8}, {2, kSendSparse, 3, 0, 8}, {3, kAdd, 1, 0, 8}});
}

}  // namespace
}  // namespace hvd_ext::test

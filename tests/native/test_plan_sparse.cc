// The rows of sparse plans: what Decode accepts, and what it refuses.
#include <string>
#include <vector>

#include "harness.h"
#include "plan/plan.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kSend = 1, kSelect = 4, kSendSparse = 5, kRecvSparse = 6, kClear = 7, kAdd = 8, kPack = 9,
                  kMerge = 10, kTake = 11, kFold = 12;
using Rows = std::vector<std::vector<int64_t>>;  // columns: round, opcode, peer, begin, count

// Decodes for rank 1 of 4 with 8 units.
Status DecodeRows(const Rows& rows, Plan* plan) {
  std::vector<int64_t> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  return Decode(flat.data(), static_cast<int64_t>(rows.size()), 8, 1, 4, plan);
}

void Takes(const Rows& rows) {
  Plan plan;
  CHECK_OK(DecodeRows(rows, &plan));
}

void Refuses(const Rows& rows, const std::string& words) {
  Plan plan;
  CHECK_FAILS(DecodeRows(rows, &plan), Code::kInvalid, words);
}

TEST("sparse plan: rows decode, and the plan knows what it selects") {
  Plan plan;
  CHECK_OK(DecodeRows({{0, kSelect, 1, 2, 4},
                       {1, kSendSparse, 0, 2, 4},
                       {1, kRecvSparse, 0, 2, 4},
                       {2, kClear, 1, 2, 4},
                       {2, kAdd, 0, 2, 4},
                       {2, kAdd, 1, 2, 4}},
                      &plan));
  CHECK(plan.sparse);
  CHECK_EQ(plan.feedback_begin, 2);
  CHECK_EQ(plan.feedback_count, 4);
  CHECK_OK(DecodeRows({{0, kFold, 1, 3, 1}}, &plan));
  CHECK_EQ(plan.feedback_begin, 3);
  CHECK_OK(DecodeRows({{0, kSend, 0, 3, 1}}, &plan));
  CHECK(!plan.sparse);
  CHECK_EQ(plan.feedback_count, 0);
}

TEST("sparse plan: a local row must be about this rank, a message about another") {
  for (int64_t opcode : {kSelect, kClear, kPack, kFold}) Refuses({{0, opcode, 2, 0, 8}}, "must be this rank, 1");
  for (int64_t opcode : {kSendSparse, kRecvSparse, kMerge, kTake}) {
    Refuses({{0, opcode, 1, 0, 8}}, "peer 1 must be another rank than this one");
  }
  Refuses({{0, kAdd, 4, 0, 8}}, "peer 4 must be in [0, 4)");
}

TEST("sparse plan: a round has either messages or local rows") {
  Refuses({{0, kSend, 0, 0, 1}, {0, kClear, 1, 4, 1}}, "row 1: CLEAR is in round 0 with SEND (row 0)");
  Refuses({{0, kSelect, 1, 0, 8}, {0, kSendSparse, 0, 0, 8}}, "row 1: SEND_SPARSE is in round 0 with SELECT (row 0)");
  Takes({{0, kSelect, 1, 0, 8}, {1, kSend, 0, 0, 1}, {1, kSendSparse, 0, 0, 8}});
}

TEST("sparse plan: merging gives back to the residual, so the own vector lies in it") {
  Refuses({{0, kSelect, 1, 0, 1}, {0, kPack, 1, 0, 4}, {1, kRecvSparse, 0, 0, 1}, {2, kMerge, 0, 0, 1}},
          "and so must the own vector, [0, 4)");
}

TEST("sparse plan: error feedback is done once") {
  Refuses({{0, kSelect, 1, 0, 4}, {0, kSelect, 1, 4, 4}}, "row 1: SELECT must be the plan's only SELECT or FOLD");
  Refuses({{0, kFold, 1, 0, 4}, {3, kSelect, 1, 4, 4}}, "row 1: SELECT must be the plan's only SELECT or FOLD");
}

TEST("sparse plan: nothing of the own vector is read before it is there") {
  Refuses({{0, kSendSparse, 0, 0, 8}},
          "row 0: SEND_SPARSE of units [0, 8) must be of units of the own vector, which "
          "has not been made");
  Refuses({{0, kAdd, 1, 0, 8}}, "SCATTER_ADD of units [0, 8) must be of units of the own vector");
  Refuses({{0, kSelect, 1, 2, 4}, {1, kSendSparse, 0, 1, 4}},
          "SEND_SPARSE of units [1, 5) must be of units of the own "
          "vector, which has [2, 6)");
  Refuses({{0, kSelect, 1, 2, 4}, {1, kPack, 1, 0, 1}, {2, kSendSparse, 0, 2, 4}}, "which has [0, 1)");
  Takes({{0, kPack, 1, 2, 4}, {1, kSendSparse, 0, 3, 2}, {2, kAdd, 1, 2, 2}});
}

TEST("sparse plan: nothing of a peer's vector is read before it has come, or in other units") {
  for (int64_t opcode : {kAdd, kTake}) {
    Refuses({{0, opcode, 2, 0, 8}}, "of rank 2 must be of just the units of a RECV_SPARSE before it");
    Refuses({{0, kRecvSparse, 2, 0, 8}, {1, opcode, 3, 0, 8}}, "of rank 3 must be of just");
    Refuses({{0, kRecvSparse, 2, 0, 8}, {1, opcode, 2, 0, 4}}, "must be of just the units");
    Refuses({{0, kRecvSparse, 2, 2, 4}, {1, kRecvSparse, 2, 5, 2}, {2, opcode, 2, 2, 4}}, "must be of just the units");
    Takes({{0, kRecvSparse, 2, 2, 4}, {0, kRecvSparse, 2, 6, 2}, {2, opcode, 2, 2, 4}, {2, opcode, 2, 6, 2}});
    Takes({{0, kRecvSparse, 2, 2, 4}, {1, kRecvSparse, 2, 2, 4}, {2, opcode, 2, 2, 4}});
  }
  Refuses({{0, kRecvSparse, 2, 2, 4}, {0, kRecvSparse, 2, 5, 2}},
          "must not overlap another of its round, of units [2, 6)");
  Refuses({{0, kRecvSparse, 2, 5, 2}, {0, kRecvSparse, 2, 2, 4}},
          "must not overlap another of its round, of units [5, 7)");
}

TEST("sparse plan: a merge needs what is selected and what has come") {
  Refuses({{0, kRecvSparse, 2, 0, 8}, {1, kMerge, 2, 0, 8}}, "must be in the units of a SELECT before it");
  Refuses({{0, kSelect, 1, 0, 4}, {1, kRecvSparse, 2, 0, 8}, {2, kMerge, 2, 0, 8}}, "must be in the units of a SELECT");
  Refuses({{0, kSelect, 1, 0, 8}, {1, kMerge, 2, 0, 8}}, "must be of just the units of a RECV_SPARSE");
  Takes({{0, kSelect, 1, 0, 8}, {1, kRecvSparse, 2, 0, 8}, {2, kMerge, 2, 0, 8}, {3, kSendSparse, 0, 0, 8}});
  Takes({{0, kRecvSparse, 2, 0, 8}, {1, kTake, 2, 0, 8}, {2, kSendSparse, 3, 0, 8}, {3, kAdd, 1, 0, 8}});
}

}  // namespace
}  // namespace hvd_ext::test

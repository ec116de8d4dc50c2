#include <string>
#include <vector>

#include "harness.h"
#include "plan/plan.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kSend = 1, kRecv = 2, kRecvReduce = 3;
using Rows = std::vector<std::vector<int64_t>>;  // columns: round, opcode, peer, begin, count

// Decodes for rank 0 of 4 with 8 units.
Status DecodeRows(const Rows& rows, Plan* plan = nullptr, int rank = 0) {
  std::vector<int64_t> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  Plan decoded;
  return Decode(flat.data(), static_cast<int64_t>(rows.size()), 8, rank, 4, plan == nullptr ? &decoded : plan);
}

void Refuses(const Rows& rows, const std::string& words) { CHECK_FAILS(DecodeRows(rows), Code::kInvalid, words); }

TEST("plan: rows decode to what they say") {
  Plan plan;
  CHECK_OK(DecodeRows({{0, kSend, 1, 0, 4}, {0, kRecvReduce, 3, 4, 4}, {2, kRecv, 2, 0, 8}}, &plan));
  CHECK_EQ(plan.units, 8);
  CHECK_EQ(plan.rows.size(), 3u);
  CHECK_EQ(plan.rows[1].round, 0);
  CHECK(plan.rows[1].opcode == Opcode::RECV_REDUCE);
  CHECK_EQ(plan.rows[1].peer, 3);
  CHECK_EQ(plan.rows[1].begin, 4);
  CHECK_EQ(plan.rows[1].count, 4);
  CHECK(plan.rows[2].opcode == Opcode::RECV);
  CHECK_EQ(plan.rows[2].round, 2);
}

TEST("plan: a job of one rank has a plan without rows") {
  Plan plan;
  CHECK_OK(Decode(nullptr, 0, 1, 0, 1, &plan));
  CHECK_EQ(plan.rows.size(), 0u);
}

TEST("plan: a plan that is refused leaves the target alone") {
  Plan plan;
  plan.units = 77;
  CHECK(!DecodeRows({{0, kSend, 9, 0, 1}}, &plan).ok());
  CHECK_EQ(plan.units, 77);
}

TEST("plan: an unknown opcode is refused") {
  Refuses({{0, kSend, 1, 0, 1}, {0, 13, 1, 1, 1}}, "row 1: opcode 13 is unknown");
  Refuses({{0, 0, 1, 0, 1}}, "row 0: opcode 0 is unknown");
}

TEST("plan: a peer outside the job is refused, and the rank itself") {
  Refuses({{0, kSend, 4, 0, 1}}, "row 0: peer 4 must be in [0, 4)");
  Refuses({{0, kSend, -1, 0, 1}}, "row 0: peer -1 must be in [0, 4)");
  Refuses({{0, kSend, (int64_t{1} << 32) + 1, 0, 1}}, "row 0: peer 4294967297");
  Refuses({{0, kSend, 0, 0, 1}}, "row 0: peer 0 must be another rank");
  CHECK_OK(DecodeRows({{0, kSend, 0, 0, 1}}, nullptr, /*rank=*/2));
}

TEST("plan: units outside the buffer are refused") {
  Refuses({{0, kSend, 1, -1, 1}}, "row 0: begin -1 must be in [0, 8)");
  Refuses({{0, kSend, 1, 8, 1}}, "row 0: begin 8 must be in [0, 8)");
  Refuses({{0, kSend, 1, 0, 9}}, "row 0: count 9 must be in [1, 8]");
  Refuses({{0, kSend, 1, 5, 4}}, "row 0: count 4 must be in [1, 3]");
  Refuses({{0, kSend, 1, 5, 0}}, "row 0: count 0 must be in [1, 3]");
  Refuses({{0, kSend, 1, 1, INT64_MAX}}, "count 9223372036854775807 must be in [1, 7]");
}

TEST("plan: rounds that decrease are refused") {
  Refuses({{3, kSend, 1, 0, 1}, {2, kSend, 1, 0, 1}}, "row 1: round 2 must not be less than 3");
  Refuses({{-1, kSend, 1, 0, 1}}, "row 0: round -1 must not be less than 0");
}

TEST("plan: a unit that is sent and overwritten in one round is refused") {
  Refuses({{0, kSend, 1, 0, 4}, {0, kRecv, 2, 3, 2}},
          "row 1: RECV of units [3, 5) overlaps SEND of units [0, 4) (row 0) in round 0");
  // Rows between the two that overlap, and rows of an earlier round, change nothing.
  Refuses({{0, kRecv, 3, 0, 8}, {1, kRecv, 1, 0, 6}, {1, kRecv, 2, 6, 1}, {1, kSend, 3, 5, 1}},
          "row 3: SEND of units [5, 6) overlaps RECV of units [0, 6) (row 1) in round 1");
  Refuses({{0, kSend, 1, 0, 8}, {0, kSend, 2, 1, 1}, {0, kRecv, 3, 4, 1}},
          "RECV of units [4, 5) overlaps SEND of units [0, 8)");
}

TEST("plan: a unit that is overwritten and received again in one round is refused") {
  Refuses({{0, kRecv, 1, 0, 4}, {0, kRecv, 2, 3, 4}}, "row 1: RECV of units [3, 7) overlaps RECV of units [0, 4)");
  Refuses({{0, kRecvReduce, 1, 2, 1}, {0, kRecv, 2, 0, 8}}, "overlaps RECV");
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

TEST("plan: neighbours in one round do not meet") {
  CHECK_OK(DecodeRows({{0, kRecv, 1, 4, 4}, {0, kSend, 2, 0, 4}, {1, kRecv, 1, 0, 4}, {1, kSend, 2, 4, 4}}));
}

TEST("plan: numbers that make no plan are refused") {
  Plan plan;
  CHECK_FAILS(Decode(nullptr, 0, 0, 0, 1, &plan), Code::kInvalid, "units (0) must be at least 1");
  CHECK_FAILS(Decode(nullptr, -1, 1, 0, 1, &plan), Code::kInvalid, "(-1) must not be negative");
  CHECK_FAILS(Decode(nullptr, 0, 1, 3, 3, &plan), Code::kInvalid, "rank (3) must be in [0, 3)");
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

}  // namespace
}  // namespace hvd_ext::test

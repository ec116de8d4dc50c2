// The executor on its own: lanes, windows, tags, failures, and what becomes of work that a failure interrupts.
#include <algorithm>

#include "engine/executor.h"
#include "harness.h"
#include "scripted_transport.h"

namespace hvd_ext::test {
namespace {

std::shared_ptr<const Plan> PlanOf(std::vector<Row> rows, int64_t units = 1) {
  auto plan = std::make_shared<Plan>();
  plan->units = units;
  plan->rows = std::move(rows);
  return plan;
}

struct Bench {
  std::vector<std::string> ended;  // "name code message"
  ScriptedTransport local_transport;
  BufferPool local_pool;
  ScriptedTransport& transport;
  BufferPool& pool;
  Executor executor;

  explicit Bench(int64_t window) : Bench(window, &local_transport, &local_pool) {}
  Bench(int64_t window, ScriptedTransport* over, BufferPool* from)
      : transport(*over), pool(*from), executor(over, from, window) {}

  std::shared_ptr<Buffer> Enqueue(int64_t lane, const std::string& name, std::shared_ptr<const Plan> plan,
                                  int64_t elements, int64_t segment_nbytes) {
    Run run;
    run.what = name;
    run.plan = std::move(plan);
    run.elements = elements;
    run.segment_nbytes = segment_nbytes;
    run.buffer = std::make_shared<Buffer>(pool.Take(elements * 4));
    std::fill_n(reinterpret_cast<float*>(run.buffer->data()), elements, 1.0f);
    run.done = [this, name](const Status& s) {
      ended.push_back(name + " " + std::to_string(static_cast<int>(s.code)) + " " + s.message);
    };
    std::shared_ptr<Buffer> buffer = run.buffer;
    executor.Enqueue(lane, std::move(run), now++);
    return buffer;
  }
  bool Pass() {
    bool moved = false;
    CHECK_OK(executor.Progress(now++, &moved));
    return moved;
  }
  double now = 0;
};

std::vector<int> TagsUnderWay(const ScriptedTransport& transport) {
  std::vector<int> tags;
  for (const auto& posted : transport.posted) {
    if (!posted->done) tags.push_back(posted->tag);
  }
  return tags;
}

const Row kSendToOne{0, Opcode::SEND, 1, 0, 1};

TEST("executor: a lane starts its segments in order, and a tag is used again only when its segment has ended") {
  Bench bench(3);
  bench.Enqueue(2, "a", PlanOf({kSendToOne}), 4, 4);
  bench.Enqueue(2, "b", PlanOf({kSendToOne}), 2, 4);
  bench.Pass();
  CHECK(TagsUnderWay(bench.transport) == (std::vector<int>{6, 7, 8}));
  bench.transport.End(1);
  bench.Pass();
  bench.Pass();
  CHECK(TagsUnderWay(bench.transport) == (std::vector<int>{6, 8}));  // segment 3 waits for tag 6
  bench.transport.End(0);
  bench.Pass();
  bench.Pass();
  CHECK(TagsUnderWay(bench.transport) == (std::vector<int>{8, 6, 7}));  // the next run is in flight too
  CHECK_EQ(bench.ended.size(), 0u);
  for (size_t i = 0; i < 5; ++i) bench.transport.End(i);
  bench.Pass();
  CHECK_EQ(bench.ended.size(), 1u);
  bench.Pass();
  bench.transport.End(5);
  bench.Pass();
  CHECK(bench.ended == (std::vector<std::string>{"a 0 ", "b 0 "}));
  CHECK(!bench.executor.busy());
}

TEST("executor: a segment starts when what it holds has been copied, and those behind it keep their order") {
  Bench bench(4);
  Run run;
  run.plan = PlanOf({kSendToOne});
  run.elements = 4;
  run.segment_nbytes = 4;
  run.buffer = std::make_shared<Buffer>(bench.pool.Take(16));
  auto arriving = std::make_shared<Arriving>(run.buffer, 4, 10);  // element 1 and a half of element 2
  run.arriving = arriving;
  run.done = [](const Status& status) { CHECK_OK(status); };
  bench.executor.Enqueue(0, std::move(run), bench.now++);
  bench.Pass();
  CHECK_EQ(bench.transport.posted.size(), 1u);  // element 3 is there, but element 1 goes first
  CHECK(!bench.Pass());
  arriving->copied = 7;
  CHECK(!bench.Pass());
  arriving->copied = 8;
  bench.Pass();
  CHECK_EQ(bench.transport.posted.size(), 2u);
  arriving->copied = 10;
  bench.Pass();
  CHECK_EQ(bench.transport.posted.size(), 4u);
  for (size_t i = 0; i < 4; ++i) bench.transport.End(i);
  bench.Pass();
  CHECK(!bench.executor.busy());
}

TEST("executor: a lane whose tags would not fit is refused") {
  constexpr int64_t kOpenMpi = (int64_t{1} << 31) - 1, kLeastOfMpi = 32767;
  CHECK_OK(CheckLane((int64_t{1} << 28) - 1, 8, kOpenMpi));
  CHECK_FAILS(CheckLane(int64_t{1} << 28, 8, kOpenMpi), Code::kInvalid, "too many channels have been opened");
  CHECK_OK(CheckLane(4095, 8, kLeastOfMpi));
  CHECK_FAILS(CheckLane(4096, 8, kLeastOfMpi), Code::kInvalid, "lane (4096) with a window of 8 segments needs tags");
}

TEST("executor: lanes do not wait for each other") {
  Bench bench(1);
  bench.Enqueue(0, "call", PlanOf({kSendToOne}), 1, 0);
  bench.Enqueue(5, "bucket", PlanOf({kSendToOne}), 1, 0);
  bench.Pass();
  CHECK(TagsUnderWay(bench.transport) == (std::vector<int>{0, 5}));
  bench.transport.End(1);
  bench.Pass();
  CHECK(bench.ended == std::vector<std::string>{"bucket 0 "});
}

TEST("executor: receives are posted before sends, and a round only when the one before has ended") {
  Bench bench(1);
  bench.Enqueue(0, "x",
                PlanOf({{0, Opcode::SEND, 1, 0, 1}, {0, Opcode::RECV_REDUCE, 2, 1, 1}, {1, Opcode::RECV, 3, 0, 2}}, 2),
                10, 0);
  bench.Pass();
  const auto& posted = bench.transport.posted;
  CHECK_EQ(posted.size(), 2u);
  CHECK(!posted[0]->sends && posted[1]->sends);
  bench.transport.End(0);
  bench.Pass();
  CHECK_EQ(posted.size(), 2u);
  bench.transport.End(1);
  bench.Pass();
  CHECK_EQ(posted.size(), 3u);
  CHECK_EQ(posted[2]->nbytes, 40);
}

TEST("executor: what arrives early is added in the order of the rows") {
  Bench bench(1);
  std::vector<Row> rows;
  for (int peer : {1, 2, 3}) rows.push_back({0, Opcode::RECV_REDUCE, peer, 0, 1});
  auto buffer = bench.Enqueue(0, "x", PlanOf(rows), 1, 0);
  bench.Pass();
  const float values[3] = {1e8f, -1e8f,
                           0.25f};  // (1 + 1e8) - 1e8 + 0.25 = 0.25 in float32, other orders give 1 or 1.25
  for (size_t i : {2, 1, 0}) {
    *static_cast<float*>(bench.transport.posted[i]->data) = values[i];
    bench.transport.End(i);
    bench.Pass();
  }
  CHECK_EQ(*reinterpret_cast<float*>(buffer->data()), 0.25f);
  CHECK(bench.ended == std::vector<std::string>{"x 0 "});
}

TEST("executor: what is added to units that are sent in the same round waits until they have left") {
  Bench bench(1);
  Row added{0, Opcode::RECV_REDUCE, 1, 0, 1};
  added.after_sends = true;
  Row elsewhere{0, Opcode::SEND, 2, 1, 1};
  auto buffer = bench.Enqueue(0, "x", PlanOf({added, elsewhere, {0, Opcode::SEND, 1, 0, 1}}, 2), 2, 0);
  float* data = reinterpret_cast<float*>(buffer->data());
  bench.Pass();
  *static_cast<float*>(bench.transport.posted[0]->data) = 41.0f;
  bench.transport.End(0);
  bench.Pass();
  CHECK_EQ(data[0], 1.0f);
  bench.transport.End(2);  // the send of this unit; the send of the other unit does not matter
  bench.Pass();
  CHECK_EQ(data[0], 42.0f);
  CHECK_EQ(bench.ended.size(), 0u);
  bench.transport.End(1);
  bench.Pass();
  CHECK(bench.ended == std::vector<std::string>{"x 0 "});
  CHECK_EQ(data[1], 1.0f);
}

TEST("executor: units without elements send nothing, and runs without elements end at their turn") {
  Bench bench(2);
  std::vector<Row> rows = {{0, Opcode::SEND, 1, 0, 1}, {0, Opcode::RECV, 1, 1, 1}, {1, Opcode::SEND, 1, 3, 1}};
  bench.Enqueue(0, "one", PlanOf(rows, 4), 1, 0);  // its element is in the last unit
  bench.Enqueue(0, "none", PlanOf(rows, 4), 0, 0);
  bench.Pass();
  CHECK_EQ(bench.transport.posted.size(), 1u);
  bench.Pass();
  CHECK(bench.ended == std::vector<std::string>{"none 0 "});
  bench.transport.End(0);
  bench.Pass();
  CHECK_EQ(bench.ended.size(), 2u);
}

TEST("executor: a long row goes as several messages, so that its progress is seen") {
  Bench bench(1);
  auto buffer = bench.Enqueue(0, "x", PlanOf({{0, Opcode::RECV_REDUCE, 1, 0, 1}}), (9 << 20) / 4, 0);
  bench.Pass();
  const auto& posted = bench.transport.posted;
  CHECK_EQ(posted.size(), 3u);
  int64_t at = 0;
  for (size_t i = 0; i < 3; ++i) {
    CHECK_EQ(posted[i]->nbytes, i < 2 ? 4 << 20 : 1 << 20);
    std::fill_n(static_cast<float*>(posted[i]->data), posted[i]->nbytes / 4, static_cast<float>(i));
  }
  for (size_t i : {1, 0, 2}) {
    bench.transport.End(i);
    CHECK(bench.Pass());
  }
  for (size_t i = 0; i < 3; ++i) {
    for (int64_t n = 0; n < posted[i]->nbytes / 4; ++n, ++at) {
      CHECK(reinterpret_cast<float*>(buffer->data())[at] == static_cast<float>(i + 1));
    }
  }
}

TEST("executor: a failed lane ends its work and all that comes later, other lanes go on") {
  Bench bench(1);
  bench.Enqueue(1, "a", PlanOf({kSendToOne}), 1, 0);
  bench.Enqueue(1, "b", PlanOf({kSendToOne}), 1, 0);
  bench.Enqueue(2, "c", PlanOf({kSendToOne}), 1, 0);
  bench.Pass();
  bench.executor.Fail(1, Communication("gone"));
  bench.executor.Fail(1, Communication("later news"));
  bench.Enqueue(1, "d", PlanOf({kSendToOne}), 1, 0);
  CHECK(bench.ended == (std::vector<std::string>{"a 3 gone", "b 3 gone", "d 3 gone"}));
  CHECK(bench.executor.abandoned());
  CHECK_EQ(bench.executor.runs(1), 3);
  bench.transport.End(1);
  bench.Pass();
  CHECK_EQ(bench.ended.back(), "c 0 ");
}

TEST("executor: memory of messages that are cut off stays valid for the transport") {
  ScriptedTransport transport;
  BufferPool pool;
  {
    Bench bench(1, &transport, &pool);
    bench.Enqueue(0, "x", PlanOf({{0, Opcode::RECV_REDUCE, 1, 0, 1}, {0, Opcode::RECV, 2, 0, 1}}), 1000, 0);
    bench.Pass();
    bench.executor.FailAll(Communication("gone"));
    CHECK(bench.ended == std::vector<std::string>{"x 3 gone"});
  }
  for (const auto& posted : transport.posted) {
    std::fill_n(static_cast<char*>(posted->data), posted->nbytes, 'x');  // the address sanitizer watches
    Buffer other = pool.Take(4000);
    CHECK(other.data() != posted->data);
  }
}

TEST("executor: an error of the transport names the work") {
  Bench bench(1);
  bench.Enqueue(0, "allreduce 'x'", PlanOf({kSendToOne}), 1, 0);
  bench.Pass();
  bench.transport.error = Communication("no route");
  bool moved = false;
  CHECK_FAILS(bench.executor.Progress(9, &moved), Code::kCommunication, "allreduce 'x': no route");
}

TEST("executor: a lane that waits says for whom, since when and with what") {
  Bench bench(2);
  CHECK_EQ(bench.executor.Views().size(), 0u);
  bench.Enqueue(4, "old", PlanOf({{0, Opcode::SEND, 3, 0, 1}}), 1, 0);
  bench.Enqueue(4, "new", PlanOf({{0, Opcode::RECV, 1, 0, 1}}), 1, 0);
  bench.now = 50;
  bench.Pass();
  bench.Pass();
  LaneView view = bench.executor.Views().at(0);
  CHECK_EQ(view.lane, 4);
  CHECK_EQ(view.run, 0);
  CHECK_EQ(view.what, "old");
  CHECK_EQ(view.progress_s, 50.0);
  CHECK(view.peers == (std::vector<int>{1, 3}));
  bench.transport.End(0);
  bench.Pass();
  view = bench.executor.Views().at(0);
  CHECK_EQ(view.run, 1);
  CHECK_EQ(view.progress_s, 52.0);
  CHECK(view.peers == std::vector<int>{1});
}

}  // namespace
}  // namespace hvd_ext::test

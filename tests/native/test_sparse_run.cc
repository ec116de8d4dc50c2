// Rows that the steps of test_engine_sparse.cc do not use, and vectors that arrive late, damaged or never.
#include <map>

#include "engine/executor.h"
#include "scripted_transport.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

// gTop-k on 4 ranks: pairs of ranks merge, then pairs of pairs, and rank 0's result goes back the same way.
Rows MergeTree(int rank) {
  Rows rows;
  rows.Add(0, kSelect, rank, 0, 1);
  auto pass = [&](int64_t round, int receiver, int sender, int64_t then) {
    if (rank == sender) rows.Add(round, kSendSparse, receiver, 0, 1);
    if (rank != receiver) return;
    rows.Add(round, kRecvSparse, sender, 0, 1);
    rows.Add(round + 1, then, sender, 0, 1);
  };
  pass(1, 0, 1, kMerge);
  pass(1, 2, 3, kMerge);
  pass(3, 0, 2, kMerge);
  pass(5, 2, 0, kTake);
  pass(7, 1, 0, kTake);
  pass(7, 3, 2, kTake);
  rows.Add(9, kClear, rank, 0, 1);
  rows.Add(9, kAdd, rank, 0, 1);
  return rows;
}

int64_t OpenMerging(Engine* engine, const Bucket& bucket) {
  Rows fold = StarAllreduce(engine->rank(), 4);
  fold.Add(5, kFold, engine->rank(), 0, 1);
  return OpenChannel(engine, SpecOf(bucket, AddPlan(engine, MergeTree(engine->rank())), AddPlan(engine, fold)));
}

TEST("sparse run: merging keeps the k largest sums, the lower element of two as large") {
  OnEngines(4, [](int rank, Engine* engine) {
    const Bucket bucket{{8}, {}};
    const int64_t channel = OpenMerging(engine, bucket);
    // k = 2. Ranks 0 and 1 make {1: 9, 3: 4, 6: 4}, of which 6 goes back to the residual; ranks 2 and 3 make {0: -20,
    // 3: 3}.
    const std::map<int, std::vector<float>> data = {{0, {0, 5, 0, 4, 0, 0, 0, 0}},
                                                    {1, {0, 4, 0, 0, 0, 0, 4, 0}},
                                                    {2, {-20, 0, 0, 3, 0, 0, 0, 0}},
                                                    {3, {0, 0, 0, 0, 0, 0, 0, 0}}};
    const std::vector<float> seen = Step(engine, channel, bucket, 0.25, data.at(rank));
    CHECK(seen == (std::vector<float>{-20, 9, 0, 0, 0, 0, 0, 0}));
    std::vector<float> left(8);
    if (rank == 0) left[3] = 7;  // left over from the last merge
    if (rank == 0) left[6] = 4;  // left over from the first merge
    CHECK(KeptOf(engine, channel) == left);
  });
}

TEST("sparse run: what merging leaves out is kept: nothing is lost, with halves on the way too") {
  for (DType wire : {DType::kFloat32, DType::kFloat16}) {
    Bucket bucket{{300}, {}};
    bucket.sparse.value_wire = wire;
    std::vector<std::vector<float>> kept(4), sums(4, std::vector<float>(300));
    std::vector<double> given(300);
    for (int step = 0; step < 5; ++step) {
      const std::vector<float> sum = GradientSum(0, 4, 300, step);
      for (size_t i = 0; i < 300; ++i) given[i] += sum[i];
    }
    OnEngines(4, [&](int rank, Engine* engine) {
      const int64_t channel = OpenMerging(engine, bucket);
      for (int step = 0; step < 5; ++step) {
        const std::vector<float> seen = Step(engine, channel, bucket, 0.1, Gradient(rank, 300, step));
        CHECK(std::count(seen.begin(), seen.end(), 0.0f) >= 270);
        for (size_t i = 0; i < 300; ++i) sums[static_cast<size_t>(rank)][i] += seen[i];
      }
      kept[static_cast<size_t>(rank)] = KeptOf(engine, channel);
    });
    for (const std::vector<float>& sum : sums) CHECK(sum == sums[0]);
    for (size_t i = 0; i < 300; ++i)
      CHECK_EQ(given[i], double{sums[0][i]} + kept[0][i] + kept[1][i] + kept[2][i] + kept[3][i]);
  }
}

TEST("sparse run: a mark goes through merging and back to all") {
  for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (int of = 0; of < 4; ++of) {
      OnEngines(4, [=](int rank, Engine* engine) {
        const Bucket bucket{{50}, {}};
        const int64_t channel = OpenMerging(engine, bucket);
        std::vector<float> data = Gradient(rank, 50, 0);
        if (rank == of) data[49] = bad;
        CHECK(std::isnan(Step(engine, channel, bucket, 0.1, data, /*commit=*/false)[0]));
      });
    }
  }
}

TEST("sparse run: packing takes what is not zero, and makes of -0 what all others hold") {
  OnEngines(2, [](int rank, Engine* engine) {
    Rows rows;
    rows.Add(0, kPack, rank, 0, 1);
    rows.Add(1, kSendSparse, 1 - rank, 0, 1);
    rows.Add(1, kRecvSparse, 1 - rank, 0, 1);
    rows.Add(2, kAdd, 1 - rank, 0, 1);
    const Bucket bucket{{6}, {}};
    const int64_t plan = AddPlan(engine, rows);
    const int64_t channel = OpenChannel(engine, SpecOf(bucket, plan, AddPlan(engine, Rows{})));
    const std::vector<float> mine = {-0.0f, 0.0f, 1e-42f, 3.0f, rank == 0 ? 70000.0f : 0.0f, -0.0f};
    const std::vector<float> seen = Step(engine, channel, bucket, 0.1, mine);
    const std::vector<float> sum = {0.0f, 0.0f, 2 * 1e-42f, 6.0f, 70000.0f, 0.0f};
    for (size_t i = 0; i < 6; ++i) CHECK_EQ(BitsOf(seen[i]), BitsOf(sum[i]));
    TopKStatistics statistics;
    CHECK_OK(engine->GetTopKStatistics(channel, &statistics));
    CHECK_EQ(statistics.entries, rank == 0 ? 3 : 2);
  });
}

struct LateBench {
  std::vector<std::string> ended;
  ScriptedTransport peers;
  BufferPool pool;
  Executor executor{&peers, &pool, 4};
  std::shared_ptr<Feedback> feedback =
      std::make_shared<Feedback>(SparseSpec{}, FeedbackShard{0, 8, false}, std::vector<int64_t>{});
  std::shared_ptr<SparseCounters> counters = std::make_shared<SparseCounters>();
  std::shared_ptr<Buffer> buffer;

  void Enqueue(const std::vector<Row>& rows) {
    auto plan = std::make_shared<Plan>();
    plan->rows = rows;
    plan->units = 2;
    plan->sparse = true;
    Run run;
    run.what = "bucket 0";
    run.plan = plan;
    run.elements = 8;
    run.sparse = std::make_shared<SparseRun>(feedback, TopKStep{0.5, {}}, 1, counters);
    run.buffer = buffer = std::make_shared<Buffer>(pool.Take(32));
    std::fill_n(reinterpret_cast<float*>(buffer->data()), 8, 1.0f);
    run.done = [this](const Status& s) { ended.push_back(s.message); };
    executor.Enqueue(1, std::move(run), 0);
  }
  Status Pass() {
    bool moved = false;
    return executor.Progress(0, &moved);
  }
  // A message about 4 elements with values 10, 20, ... at the positions.
  VectorMessage Message(const std::vector<int32_t>& positions) {
    SparseVector vector;
    vector.Reserve(static_cast<int64_t>(positions.size()), &pool);
    for (int32_t position : positions) {
      vector.position()[vector.count] = position;
      vector.value()[vector.count] = 10.0f * static_cast<float>(vector.count + 1);
      ++vector.count;
    }
    return EncodeSparse(vector, 0, 4, SparseIndices::kRaw, &pool);
  }
};

const std::vector<Row> kTwoFromOne = {{0, Opcode::RECV_SPARSE, 1, 0, 1}, {0, Opcode::RECV_SPARSE, 1, 1, 1},
                                      {0, Opcode::RECV_SPARSE, 3, 0, 1}, {1, Opcode::SCATTER_ADD, 1, 0, 1},
                                      {1, Opcode::SCATTER_ADD, 1, 1, 1}, {1, Opcode::SCATTER_ADD, 3, 0, 1}};

TEST("sparse run: bodies are asked for in the order of their heads, whatever ends first") {
  LateBench bench;
  bench.Enqueue(kTwoFromOne);
  CHECK_OK(bench.Pass());
  CHECK_EQ(bench.peers.posted.size(), 3u);  // the receives of the three heads
  const VectorMessage first = bench.Message({0, 3}), second = bench.Message({1}), empty = bench.Message({});
  bench.peers.End(1, &second.head, sizeof(VectorHead));
  CHECK_OK(bench.Pass());
  CHECK_EQ(bench.peers.posted.size(), 3u);  // the length of the body before it is not known yet
  CHECK(bench.executor.Views().at(0).peers == (std::vector<int>{1, 3}));
  bench.peers.End(2, &empty.head, sizeof(VectorHead));
  CHECK_OK(bench.Pass());
  CHECK(bench.executor.Views().at(0).peers == std::vector<int>{1});
  bench.peers.End(0, &first.head, sizeof(VectorHead));
  CHECK_OK(bench.Pass());
  CHECK_EQ(bench.peers.posted.size(), 5u);
  CHECK_EQ(bench.peers.posted[3]->nbytes, 16);
  CHECK_EQ(bench.peers.posted[4]->nbytes, 8);
  bench.peers.End(4, second.body.data(), 8);
  CHECK_OK(bench.Pass());
  CHECK_EQ(bench.ended.size(), 0u);
  bench.peers.End(3, first.body.data(), 16);
  CHECK_OK(bench.Pass());
  CHECK(bench.ended == std::vector<std::string>{""});
  const float* data = reinterpret_cast<const float*>(bench.buffer->data());
  CHECK(std::vector<float>(data, data + 8) == (std::vector<float>{11, 1, 1, 21, 1, 11, 1, 1}));
}

TEST("sparse run: a damaged head or body is an error that names the rank or the work") {
  {
    LateBench bench;
    bench.Enqueue(kTwoFromOne);
    CHECK_OK(bench.Pass());
    const std::string nonsense(sizeof(VectorHead), 'x');
    bench.peers.End(2, nonsense.data(), nonsense.size());
    CHECK_FAILS(bench.Pass(), Code::kCommunication,
                "bucket 0: from rank 3: a message of a compressed gradient is damaged");
  }
  LateBench bench;
  bench.Enqueue({kTwoFromOne[0], kTwoFromOne[3]});
  CHECK_OK(bench.Pass());
  const VectorMessage message = bench.Message({0, 3});
  bench.peers.End(0, &message.head, sizeof(VectorHead));
  CHECK_OK(bench.Pass());
  const std::string nonsense(16, '\x7f');
  bench.peers.End(1, nonsense.data(), nonsense.size());
  CHECK_FAILS(bench.Pass(), Code::kCommunication, "bucket 0: a message of a compressed gradient is damaged");
}

TEST("sparse run: memory of vectors that are cut off stays valid for the transport") {
  LateBench bench;
  bench.Enqueue(kTwoFromOne);
  CHECK_OK(bench.Pass());
  bench.executor.Fail(1, Communication("cut off"));
  CHECK(bench.executor.abandoned());
  CHECK(bench.ended == std::vector<std::string>{"cut off"});
  bench.buffer.reset();
  const VectorHead head;
  for (size_t i = 0; i < 3; ++i) bench.peers.End(i, &head, sizeof(head));  // a sanitizer sees a write into freed memory
}

TEST("sparse run: the runs of one bucket follow each other") {
  LateBench bench;
  bench.Enqueue({kTwoFromOne[0]});
  bench.Enqueue({kTwoFromOne[2]});
  CHECK_OK(bench.Pass());
  CHECK_OK(bench.Pass());
  CHECK_EQ(bench.peers.posted.size(), 1u);
  const VectorMessage empty = bench.Message({});
  bench.peers.End(0, &empty.head, sizeof(VectorHead));
  CHECK_OK(bench.Pass());
  CHECK_OK(bench.Pass());
  CHECK_EQ(bench.peers.posted.size(), 2u);
  CHECK_EQ(bench.peers.posted[1]->peer, 3);
  bench.peers.End(1, &empty.head, sizeof(VectorHead));
  CHECK_OK(bench.Pass());
  CHECK_EQ(bench.ended.size(), 2u);
}

}  // namespace
}  // namespace hvd_ext::test

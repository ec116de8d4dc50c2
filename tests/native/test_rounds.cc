// The rules of partial rounds without an engine: who opens a round, and who takes part when.
#include <algorithm>
#include <cstring>
#include <random>

#include "engine/channel.h"
#include "engine/partial_gate.h"
#include "engine/partial_rounds.h"
#include "engine/rounds.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

PartialSpec Rules(Sync sync, int64_t quorum = 1, int64_t staleness = 2, uint64_t seed = 7) {
  PartialSpec rules;
  rules.sync = sync;
  rules.quorum = quorum;
  rules.staleness = staleness;
  rules.seed = seed;
  return rules;
}

TEST("rounds: ranks are drawn evenly, and the same for the same seed") {
  for (int64_t candidates : {1, 2, 3, 7, 32}) {
    std::vector<int64_t> drawn(static_cast<size_t>(candidates));
    const int64_t rounds = 4000 * candidates;
    for (int64_t round = 1; round <= rounds; ++round) {
      const int64_t rank = DrawnFor(11, round, candidates);
      CHECK(rank >= 0 && rank < candidates);
      CHECK_EQ(rank, DrawnFor(11, round, candidates));
      ++drawn[static_cast<size_t>(rank)];
    }
    for (int64_t count : drawn) CHECK(count > 3600 && count < 4400);  // 6 standard deviations
  }
  int same = 0;
  for (int64_t round = 1; round <= 1000; ++round) same += DrawnFor(1, round, 4) == DrawnFor(2, round, 4) ? 1 : 0;
  CHECK(same > 150 && same < 350);
}

TEST("rounds: a rank that has left takes part in all rounds up to the end, and the bound holds again behind it") {
  for (int64_t staleness : {0, 2}) {
    RoundGate gate(staleness);
    int64_t round = 0;
    bool on_time = false;
    gate.Arrive(1);
    gate.Open(9);
    gate.Leave();
    for (int64_t wanted = 1; wanted <= 3; ++wanted) CHECK(gate.Begin(&round, &on_time) && round == wanted);
    RoundGate ended = gate;
    ended.End(3);  // the rounds behind it are those of ranks that train on
    CHECK(!ended.Begin(&round, &on_time) && ended.AtBound());
    ended.Return();
    CHECK(!ended.Begin(&round, &on_time));
    ended.Arrive(4);
    CHECK(ended.Begin(&round, &on_time) && round == 4 && on_time);
    gate.End(5);
    for (int64_t wanted = 4; wanted <= 5; ++wanted) CHECK(gate.Begin(&round, &on_time) && round == wanted);
    CHECK(!gate.Begin(&round, &on_time));
  }
}

// A partial channel of one rank with one tensor of one element, without an engine.
struct Alone {
  Alone() {
    ChannelSpec spec;
    spec.name = "Adam";
    spec.tensor_names = {"a", "who takes part"};
    spec.elements = {1, PartialGate::TableElements(1)};
    spec.buckets = {{DType::kFloat32, {}, ReduceOp::kSum, 0, 0, {0}}, {DType::kInt32, {}, ReduceOp::kSum, 0, 0, {1}}};
    const auto plan = std::make_shared<const Plan>();
    std::shared_ptr<const Layout> layout;
    CHECK_OK(Layout::Make(spec, {plan, plan}, {nullptr, nullptr}, &layout));
    gate = std::make_shared<PartialGate>("Adam", layout, Rules(Sync::kSolo), 0, 1, &pool);
    channel = std::make_unique<Channel>("Adam", std::vector<std::string>{"a"}, layout, 1, gate, nullptr);
  }

  // A step of this rank; returns where the tensor was submitted to.
  const char* Submit(float value) {
    Channel::Begun begun;
    CHECK_OK(channel->BeginStep(std::nullopt, /*skips=*/false, &begun));
    std::shared_ptr<ChannelStep> step;
    std::shared_ptr<Arriving> arriving;
    std::shared_ptr<Buffer> buffer;
    CHECK_OK(channel->Reserve(0, 4, &pool, &step, &buffer, &arriving));
    std::memcpy(buffer->data(), &value, sizeof(value));
    bool ready = false;
    CHECK_OK(channel->Arrive(step, 0, &ready));
    CHECK(ready);
    return buffer->data();
  }

  // Begins the next round; returns its runs.
  std::vector<Channel::Ready> Begin() {
    CHECK(channel->BeginRound());
    std::vector<Channel::Ready> runs(2);
    for (Channel::Ready& run : runs) CHECK(channel->TakeReady(&run));
    return runs;
  }

  void End(const std::vector<Channel::Ready>& runs) {
    std::vector<Delivery> ended;
    for (const Channel::Ready& run : runs) {
      channel->EndRun(run.step.get(), run.bucket, Status::Ok(), run.buffer, &ended);
    }
    DeliverAll(ended);
  }

  BufferPool pool;
  std::shared_ptr<PartialGate> gate;
  std::unique_ptr<Channel> channel;
};

TEST("rounds: the later one of two that run may end first") {
  Alone rank;
  PartialGate& gate = *rank.gate;
  rank.Submit(1);
  gate.Open(3);
  std::vector<std::vector<Channel::Ready>> runs(1);
  for (int64_t round = 1; round <= 3; ++round) {
    runs.push_back(rank.Begin());
    CHECK_EQ(runs.back()[0].step->number, round);
  }
  gate.AwaitRound([](const Status&, bool) {});
  CHECK_EQ(gate.WaitsFor(), int64_t{0});  // it waits for rounds that run
  int64_t step = 0, over = 0, before = 0;
  for (int64_t round : {2, 1, 3}) {
    rank.End(runs[static_cast<size_t>(round)]);
    rank.channel->Progress(&step, &over);
    CHECK(over >= before && over >= round);
    before = over;
    gate.Came(0, round);  // of a round that is over, and of one that is not: none is taken for another
    gate.Came(0, 4 - round);
  }
  gate.AwaitRound([](const Status&, bool) {});
  CHECK_EQ(gate.WaitsFor(), int64_t{0});  // round 2 is over already
  rank.Submit(2);
  rank.Submit(3);
  CHECK_EQ(gate.WaitsFor(), int64_t{0});
  rank.Submit(4);
  CHECK_EQ(gate.WaitsFor(), int64_t{4});
  std::vector<RoundInfo> rounds = gate.Rounds(1, 10);
  CHECK_EQ(rounds.size(), size_t{3});
  for (size_t i = 0; i < rounds.size(); ++i) CHECK_EQ(rounds[i].round, static_cast<int64_t>(i) + 1);
  rounds = gate.Rounds(2, 1);
  CHECK(rounds.size() == 1 && rounds[0].round == 2);
}

TEST(
    "rounds: a gradient in time is reduced where it was submitted to, and late ones are held there for the next "
    "round") {
  Alone rank;
  const auto value_of = [](const Channel::Ready& run) {
    float value = 0;
    std::memcpy(&value, run.buffer->data(), sizeof(value));
    return value;
  };
  const char* submitted = rank.Submit(1);
  rank.gate->Open(3);
  std::vector<Channel::Ready> runs = rank.Begin();
  CHECK(runs[0].buffer->data() == submitted && value_of(runs[0]) == 1);
  for (int64_t round = 2; round <= 3; ++round) {
    rank.End(runs);
    runs = rank.Begin();
    CHECK_EQ(value_of(runs[0]), 0);
  }
  rank.End(runs);
  submitted = rank.Submit(2);
  rank.Submit(4);
  rank.Submit(8);
  rank.gate->Open(4);
  runs = rank.Begin();
  CHECK(runs[0].buffer->data() == submitted && value_of(runs[0]) == 14);
  rank.End(runs);
}

TEST("rounds: a round that is not open says whose gradients it waits for") {
  RoundOpener quorum(Rules(Sync::kQuorum, 3), 4);
  CHECK(!quorum.Waits().begun);
  quorum.Arrive(2, 1, false);
  RoundWait wait = quorum.Waits();
  CHECK(wait.begun && wait.round == 1 && wait.count == 2);
  CHECK(wait.ranks == (std::vector<int>{0, 1, 3}));
  quorum.Leave(3);
  CHECK(quorum.Waits().ranks == (std::vector<int>{0, 1}));
  quorum.Arrive(0, 1, false);
  quorum.Arrive(1, 1, false);
  CHECK_EQ(quorum.Opened(), 1);
  CHECK(!quorum.Waits().begun);

  const int drawn = static_cast<int>(DrawnFor(7, 1, 4)), other = (drawn + 1) % 4;
  RoundOpener majority(Rules(Sync::kMajority), 4);
  majority.Arrive(other, 1, false);
  CHECK(majority.Waits().count == 1 && majority.Waits().ranks == (std::vector<int>{drawn}));

  RoundOpener flushed(Rules(Sync::kSolo), 3);
  flushed.Arrive(1, 1, true);
  CHECK_EQ(flushed.Opened(), 0);
  CHECK(flushed.Waits().count == 2 && flushed.Waits().ranks == (std::vector<int>{0, 2}));
}

TEST("rounds: a round opens at the first, the drawn, the Q-th or the last gradient") {
  for (int64_t round = 1; round <= 50; ++round) {
    for (int64_t quorum = 1; quorum <= 4; ++quorum) {
      RoundOpener opener(Rules(Sync::kQuorum, quorum), 4);
      for (int rank = 0; rank < 4; ++rank) {
        opener.Arrive(rank, 1, false);
        CHECK_EQ(opener.Opened(), rank + 1 >= quorum ? 1 : 0);
      }
    }
    PartialSpec rules = Rules(Sync::kMajority);
    rules.before = round;
    RoundOpener majority(rules, 4);
    const int64_t drawn = DrawnFor(rules.seed, round + 1, 4);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank != drawn) majority.Arrive(rank, 1, false);
    }
    CHECK_EQ(majority.Opened(), 0);
    majority.Arrive(static_cast<int>(drawn), 1, false);
    CHECK_EQ(majority.Opened(), 1);
  }
  RoundOpener solo(Rules(Sync::kSolo), 3), full(Rules(Sync::kFull), 3), flushed(Rules(Sync::kSolo), 3);
  solo.Arrive(2, 1, false);
  CHECK_EQ(solo.Opened(), 1);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_EQ(full.Opened(), 0);
    full.Arrive(rank, 1, false);
    flushed.Arrive(rank, 1, rank == 0);  // the first says that all are to come
    CHECK_EQ(flushed.Opened(), rank < 2 ? 0 : 1);
  }
  CHECK_EQ(full.Opened(), 1);
  flushed.Arrive(1, 2, false);
  CHECK_EQ(flushed.Opened(), 2);
}

TEST("rounds: nobody waits for a rank that has left, and all are back when all have left") {
  RoundOpener opened_by_leaving(Rules(Sync::kQuorum, 2), 2);
  opened_by_leaving.Arrive(0, 1, false);
  CHECK_EQ(opened_by_leaving.Opened(), 0);
  opened_by_leaving.Leave(1);
  CHECK_EQ(opened_by_leaving.Opened(), 1);
  for (Sync sync : {Sync::kFull, Sync::kSolo, Sync::kMajority, Sync::kQuorum}) {
    RoundOpener opener(Rules(sync, 3), 3);
    opener.Leave(0);
    for (int64_t step = 1; step <= 20; ++step) {
      opener.Arrive(1, step, false);
      opener.Arrive(2, step, false);
      CHECK_EQ(opener.Opened(), step);
    }
    opener.Leave(1);
    opener.Arrive(2, 21, false);
    CHECK_EQ(opener.Opened(), 21);
    CHECK(!opener.TakeEnd());
    opener.Leave(2);
    CHECK(opener.TakeEnd());
    CHECK(!opener.TakeEnd());
    CHECK_EQ(opener.Opened(), 21);
    for (int rank = 0; rank < 3; ++rank) opener.Arrive(rank, 22, false);
    CHECK_EQ(opener.Opened(), 22);
  }
}

// Ranks as a list of what each may do next; what happens is drawn. Lemma 5.1: all ranks take part in each round once
// and in one order (1, 2); what is given and held is what was computed (3); nothing is staler than the bound (4).
TEST("rounds: whatever the order of events, no gradient is staler than the bound and none is lost") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 150; ++trial) {
    const int size = 1 + static_cast<int>(random() % 6);
    const int64_t staleness = random() % 5;
    const Sync sync = static_cast<Sync>(random() % 4);
    const int64_t steps = 25;
    RoundOpener opener(Rules(sync, 1 + static_cast<int64_t>(random() % size), staleness, random()), size);
    std::vector<RoundGate> gates(static_cast<size_t>(size), RoundGate(staleness));
    std::vector<int64_t> computed(static_cast<size_t>(size)), given(computed), heard(computed);
    // a slow rank is drawn seldom
    std::vector<int> weights;
    for (int rank = 0; rank < size; ++rank) weights.push_back(1 + static_cast<int>(random() % 20));
    std::discrete_distribution<int> drawn(weights.begin(), weights.end());
    for (int events = 0; events < 200000; ++events) {
      const int rank = drawn(random);
      const size_t r = static_cast<size_t>(rank);
      RoundGate& gate = gates[r];
      int64_t slowest = steps;
      for (const RoundGate& one : gates) slowest = std::min(slowest, one.begun());
      if (random() % 2 == 0) {
        // it computes its next step when its last one's round is over, which is when all have begun it
        if (computed[r] < steps && slowest >= computed[r]) {
          gate.Arrive(++computed[r]);
          opener.Arrive(rank, computed[r], false);
        }
        continue;
      }
      heard[r] = std::max(heard[r], opener.Opened());
      gate.Open(heard[r]);
      int64_t round = 0;
      bool on_time = false;
      const int64_t before = gate.begun();
      while (gate.Begin(&round, &on_time)) {
        CHECK_EQ(round, gate.begun());
        CHECK_EQ(on_time, computed[r] >= round);
        for (int64_t step = given[r] + 1; step <= computed[r]; ++step) CHECK(round - step <= staleness);
        CHECK(round - computed[r] <= staleness);  // a rank that is further behind is waited for
        given[r] = computed[r];
      }
      CHECK(gate.begun() >= before);
      if (slowest == steps) break;
    }
    for (int rank = 0; rank < size; ++rank) CHECK_EQ(gates[static_cast<size_t>(rank)].begun(), steps);
  }
}

TEST("rounds: the word reaches every rank once, along the hosts") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    const int size = 1 + static_cast<int>(random() % 40);
    std::vector<int> hosts;
    for (int rank = 0; rank < size; ++rank) hosts.push_back(static_cast<int>(random() % 9));
    std::vector<int> heard(static_cast<size_t>(size)), order{0};
    heard[0] = 1;
    for (size_t i = 0; i < order.size(); ++i) {
      for (int peer : RelaysOf(hosts, order[i])) {
        ++heard[static_cast<size_t>(peer)];
        order.push_back(peer);
      }
    }
    for (int count : heard) CHECK_EQ(count, 1);
  }
}

}  // namespace
}  // namespace hvd_ext::test

// Partial rounds by engines: each gradient is given to one round, no later than the bound and never lost, and results
// are the same on all ranks.
#include <limits>
#include <random>

#include "engines.h"

namespace hvd_ext::test {
namespace {

using Floats = std::vector<float>;  // all tensors of a step, one after the other

constexpr int64_t kSizes[] = {5, 0, 130, 1}, kTensors = 4, kElements = 136;

// Small whole numbers: sums are exact, and differ for each rank, step and element.
Floats GradientOf(size_t rank, int64_t step) {
  Floats values;
  for (int64_t i = 0; i < kElements; ++i) {
    values.push_back(static_cast<float>((static_cast<int64_t>(rank) + 1) * 1000 + step * 7 + i % 15));
  }
  return values;
}

void AddTo(Floats* sum, const Floats& values) {
  for (size_t i = 0; i < values.size(); ++i) (*sum)[i] += values[i];
}

ChannelSpec PartialOfAll(Engine* engine, const PartialSpec& rules, bool holds_again = false) {
  const int size = engine->size();
  const int64_t plan = AddPlan(engine, RingAllreduce(engine->rank(), size));
  ChannelSpec spec = ChannelOf(
      "Adam", {kSizes, kSizes + kTensors},
      {{DType::kFloat32, {}, ReduceOp::kSum, plan, 64, {2, 0}}, {DType::kFloat32, {}, ReduceOp::kSum, plan, 64, {1, 3}}});
  spec.partial = rules;
  spec.partial->plan = plan;
  for (int rank = 0; rank < size; ++rank) spec.partial->hosts.push_back(rank / 2);
  spec.partial->holds_again = holds_again;
  return spec;
}

PartialSpec Rules(Sync sync, int64_t quorum, int64_t staleness) {
  PartialSpec rules;
  rules.sync = sync;
  rules.quorum = quorum;
  rules.staleness = staleness;
  rules.seed = 3;
  return rules;
}

// Submits the gradients of a step; the first error.
Status Give(Engine* engine, int64_t channel, int64_t step, float factor, int64_t* ticket) {
  Floats values = GradientOf(static_cast<size_t>(engine->rank()), step);
  for (float& value : values) value *= factor;
  HVD_EXT_RETURN_IF_ERROR(engine->BeginStep(channel));
  const float* at = values.data();
  for (int64_t tensor = 0; tensor < kTensors; at += kSizes[tensor++]) {
    HVD_EXT_RETURN_IF_ERROR(engine->Submit(channel, tensor, at, kSizes[tensor] * 4, ticket));
  }
  return Status::Ok();
}

// Waits for the results of a step; the first error, which may be that of a step before.
Status Take(Engine* engine, int64_t channel, int64_t ticket, Floats* sum) {
  Collects results;
  for (int64_t i = 0; i < kTensors; ++i) results.push_back(StartCollect(engine, channel, i, ticket, kSizes[i] * 4));
  std::string bytes;
  Status status;
  for (auto& future : results) {
    Result result = Await(std::move(future), "a tensor");
    if (status.ok()) status = result.status;
    bytes += result.data;
  }
  sum->resize(bytes.size() / 4);
  if (!bytes.empty()) std::memcpy(sum->data(), bytes.data(), bytes.size());
  return status;
}

Floats Taken(Engine* engine, int64_t channel, int64_t ticket) {
  Floats sum;
  CHECK_OK(Take(engine, channel, ticket, &sum));
  return sum;
}

Status StatusOfStep(Engine* engine, int64_t channel, int64_t step) {
  int64_t ticket = 0;
  Floats sum;
  HVD_EXT_RETURN_IF_ERROR(Give(engine, channel, step, 1, &ticket));
  return Take(engine, channel, ticket, &sum);
}

Floats Stepped(Engine* engine, int64_t channel, int64_t step, float factor = 1) {
  int64_t ticket = 0;
  CHECK_OK(Give(engine, channel, step, factor, &ticket));
  CHECK_EQ(ticket, step);
  return Taken(engine, channel, ticket);
}

RoundInfo InfoOf(Engine* engine, int64_t channel, int64_t round) {
  std::vector<RoundInfo> rounds;
  CHECK_OK(engine->GetRounds(channel, round, 1, &rounds));
  CHECK_EQ(rounds.size(), size_t{1});
  return rounds[0];
}

bool NextRoundOf(Engine* engine, int64_t channel) {
  auto answer = std::make_shared<std::promise<std::pair<Status, bool>>>();
  engine->AwaitRound(channel, [answer](const Status& s, bool more) { answer->set_value({s, more}); });
  auto [status, more] = Await(answer->get_future(), "the next round");
  CHECK_OK(status);
  return more;
}

struct Seen {
  std::vector<Floats> sums;  // by round, from 0
  std::vector<RoundInfo> rounds;
  Floats held;
};

// Ranks train `steps` steps each, with random delays, and take what rounds the others have left.
Seen Trained(Engine* engine, const PartialSpec& rules, int steps, unsigned seed) {
  std::mt19937 random(seed * 31 + static_cast<unsigned>(engine->rank()));
  const int64_t channel = OpenChannel(engine, PartialOfAll(engine, rules));
  Seen seen;
  for (int step = 1; step <= steps; ++step) {
    if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    seen.sums.push_back(Stepped(engine, channel, step));
  }
  CHECK_OK(engine->Leave(channel));
  while (NextRoundOf(engine, channel)) {
    int64_t ticket = 0;
    CHECK_OK(engine->SkipStep(channel, &ticket));
    seen.sums.push_back(Taken(engine, channel, ticket));
  }
  CHECK_OK(engine->GetRounds(channel, 1, 1000, &seen.rounds));
  for (int64_t tensor = 0; tensor < kTensors; ++tensor) {
    bool held = false;
    seen.held.resize(seen.held.size() + static_cast<size_t>(kSizes[tensor]));
    CHECK_OK(engine->ReadHeld(channel, tensor, seen.held.data() + seen.held.size() - kSizes[tensor], &held));
  }
  return seen;
}

// Trains, and replays the rounds by who has taken part: each must have the sum of what was given and no older than the
// bound, and what was not given must be held.
void CheckTraining(const PartialSpec& rules, const std::vector<int>& steps, unsigned seed) {
  std::vector<Seen> seen(steps.size());
  OnEngines(static_cast<int>(steps.size()), [&](int rank, Engine* engine) {
    seen[static_cast<size_t>(rank)] = Trained(engine, rules, steps[static_cast<size_t>(rank)], seed);
  });
  const std::vector<RoundInfo>& rounds = seen[0].rounds;
  CHECK_EQ(rounds.size(), static_cast<size_t>(*std::max_element(steps.begin(), steps.end())));
  std::vector<int64_t> given(steps.size());  // the newest step of each rank that was given
  for (size_t t = 0; t < rounds.size(); ++t) {
    Floats expected(kElements);
    for (size_t rank = 0; rank < steps.size(); ++rank) {
      const int64_t last = std::min<int64_t>(rounds[t].arrived[rank], steps[rank]);  // later ones were skipped
      while (given[rank] < last) AddTo(&expected, GradientOf(rank, ++given[rank]));
      CHECK(rounds[t].round - rounds[t].arrived[rank] <= rules.staleness || rounds[t].round > steps[rank]);
    }
    for (const Seen& of_rank : seen) {
      CHECK_EQ(of_rank.sums.size(), rounds.size());
      CHECK(of_rank.rounds[t].arrived == rounds[t].arrived);
      CHECK(of_rank.sums[t] == expected);
    }
  }
  for (size_t rank = 0; rank < steps.size(); ++rank) {
    Floats held(kElements);
    while (given[rank] < steps[rank]) AddTo(&held, GradientOf(rank, ++given[rank]));
    CHECK(seen[rank].held == held);
  }
}

constexpr Sync kSyncs[] = {Sync::kFull, Sync::kSolo, Sync::kMajority, Sync::kQuorum};

TEST("partial rounds: results are what a replay gives, and what was not given is held, in every mode") {
  unsigned seed = 1;
  for (Sync sync : kSyncs) {
    for (int size : Sizes(5)) {
      for (int64_t staleness : {0, 1, 4}) {
        CheckTraining(Rules(sync, (size + 1) / 2, staleness), std::vector<int>(static_cast<size_t>(size), 12), ++seed);
      }
    }
    // Ranks with unequal numbers of steps end together.
    CheckTraining(Rules(sync, 2, 3), {25, 4, 13}, ++seed);
    CheckTraining(Rules(sync, 3, 0), {0, 15, 7, 15}, ++seed);
  }
}

TEST("partial: a round that waits for a rank which has left, or closed the channel, fails on all ranks") {
  Config config = QuickConfig();
  config.leave_grace_s = 0.1;
  for (Sync sync : {Sync::kFull, Sync::kSolo, Sync::kQuorum}) {
    for (int gone : {0, 1, 2}) {
      for (bool closes : {false, true}) {
        std::atomic<int> told{0};
        OnEngines(3, config, [&](int rank, Engine* engine) {
          const int64_t channel = OpenChannel(engine, PartialOfAll(engine, Rules(sync, 3, 1)));
          for (int64_t step = 1; step <= 2; ++step) CHECK_OK(StatusOfStep(engine, channel, step));
          CHECK_OK(Call(engine, BarrierSpec("all have two steps"), "").status);
          if (rank != gone) {
            Status status;
            for (int64_t step = 3; step <= 4 && status.ok(); ++step) status = StatusOfStep(engine, channel, step);
            const std::string words = closes ? " has closed the channel" : " has shut down";
            CHECK_FAILS(status, Code::kCommunication, "rank " + std::to_string(gone) + words);
            ++told;
            Until("the other survivor", [&] { return told == 2; });
          } else if (closes) {
            CHECK_OK(engine->CloseChannel(channel));
            Until("the survivors", [&] { return told == 2; });
          }
          engine->Stop();
        });
      }
    }
  }
}

TEST("partial rounds: a flushed round takes all gradients, and leaves nothing held") {
  OnEngines(3, [](int rank, Engine* engine) {
    const int64_t channel = OpenChannel(engine, PartialOfAll(engine, Rules(Sync::kSolo, 1, 4)));
    for (int step = 1; step <= 20; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(rank));
      if (step % 5 == 0) CHECK_OK(engine->Flush(channel, 1));
      Stepped(engine, channel, step);
      if (step % 5 != 0) continue;
      for (int64_t arrived : InfoOf(engine, channel, step).arrived) CHECK_EQ(arrived, step);
      bool held = true;
      CHECK_OK(engine->ReadHeld(channel, 0, nullptr, &held));
      CHECK(!held);
    }
  });
}

TEST("partial rounds: a rank that falls behind the bound is waited for, one within it is not") {
  std::atomic<int64_t> fast{0};
  OnEngines(2, [&](int rank, Engine* engine) {
    const int64_t channel = OpenChannel(engine, PartialOfAll(engine, Rules(Sync::kSolo, 1, 3)));
    if (rank == 1) {
      // rank 0 takes the steps 1 to 3 alone, and cannot take the fourth
      Until("the steps of rank 0", [&] { return fast == 3; });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      CHECK_EQ(fast.load(), 3);
      int64_t step = -1, over = -1;
      CHECK_OK(engine->Progress(channel, &step, &over));
      CHECK_EQ(step, 0);
      CHECK_EQ(over, 3);
    }
    for (int step = 1; step <= 4; ++step) {
      Stepped(engine, channel, step);
      if (rank == 0) fast = step;
    }
  });
}

TEST("partial rounds: a round that is not finite gives finite gradients back to their ranks") {
  OnEngines(2, [](int rank, Engine* engine) {
    const int64_t channel = OpenChannel(engine, PartialOfAll(engine, Rules(Sync::kFull, 1, 0), true));
    Stepped(engine, channel, 1, rank == 1 ? std::numeric_limits<float>::infinity() : 1);
    Floats expected = GradientOf(0, 1);
    for (size_t r : {0, 1}) AddTo(&expected, GradientOf(r, 2));
    CHECK(Stepped(engine, channel, 2) == expected);
  });
}

TEST("partial rounds: flags travel with a round, and all ranks read the same") {
  OnEngines(3, [](int rank, Engine* engine) {
    const int64_t channel = OpenChannel(engine, PartialOfAll(engine, Rules(Sync::kFull, 1, 0)));
    CHECK_OK(engine->SetFlags(channel, rank == 1 ? 5 : 0));
    Stepped(engine, channel, 1);
    CHECK(InfoOf(engine, channel, 1).flags == (std::vector<int64_t>{0, 5, 0}));
  });
}

TEST("partial rounds: what cannot be is refused in words") {
  Engines engines(1);
  Engine* engine = engines[0];
  int64_t channel = -1, plain = -1, ticket = 0;
  ChannelSpec spec = PartialOfAll(engine, Rules(Sync::kQuorum, 2, 4));
  CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, "quorum");
  spec.partial->quorum = 1;
  spec.partial->staleness = -1;
  CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, "staleness");
  spec.partial->staleness = 4;
  spec.partial->hosts.clear();
  CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, "host");
  spec.partial->hosts = {0};
  CHECK_OK(engine->OpenChannel(spec, &channel));
  CHECK_FAILS(engine->SkipStep(channel, &ticket), Code::kInvalid, "not over");
  CHECK_FAILS(engine->SwitchLayout(channel, spec), Code::kInvalid, "keep their layout");
  CHECK_FAILS(engine->SetQuorum(channel, 2), Code::kInvalid, "quorum");
  CHECK_FAILS(engine->SetFlags(channel, -1), Code::kInvalid, "flags");
  float value = 1;
  CHECK_FAILS(engine->Submit(channel, 3, &value, 4, &ticket), Code::kInvalid,
              "before the first step");  // no step was begun
  CHECK_OK(engine->BeginStep(channel));
  CHECK_FAILS(engine->Submit(channel, 3, &value, 8, &ticket), Code::kInvalid, "bytes");
  CHECK_OK(engine->Submit(channel, 3, &value, 4, &ticket));
  CHECK_FAILS(engine->Submit(channel, 3, &value, 4, &ticket), Code::kInvalid, "twice");
  CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid,
              "half-way: 1 of 4 tensors were submitted ('a', 'b', 'c' were not); nothing of it has been sent");
  Stepped(engine, channel, 1);
  spec.partial.reset();
  CHECK_OK(engine->OpenChannel(spec, &plain));
  CHECK_FAILS(engine->SkipStep(plain, &ticket), Code::kInvalid, "wait for all ranks");
  CHECK_FAILS(engine->Flush(plain, 1), Code::kInvalid, "wait for all ranks");
}

}  // namespace
}  // namespace hvd_ext::test

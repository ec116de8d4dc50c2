// Partial rounds on engines: late gradients are given later and never lost, results are the same on all ranks.
#include <atomic>
#include <chrono>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engines.h"

namespace hvd_ext::test {
namespace {

constexpr int64_t kSizes[] = {5, 0, 130, 1};
constexpr int64_t kTensors = 4;

// Small whole numbers: sums are exact, and differ for each rank, step and element.
float ValueOf(int rank, int64_t step, int64_t tensor, int64_t i) {
  return static_cast<float>((rank + 1) * 1000 + step * 7 + tensor * 3 + i % 5);
}

ChannelSpec PartialOfAll(Engine* engine, const RoundRules& rules, bool holds_again = false) {
  const int size = engine->size();
  const int64_t plan = AddPlan(engine, RingAllreduce(engine->rank(), size));
  ChannelSpec spec;
  spec.name = "Adam";
  for (int64_t i = 0; i < kTensors; ++i) {
    spec.tensor_names.push_back("t" + std::to_string(i));
    spec.elements.push_back(kSizes[i]);
  }
  spec.buckets.push_back({DType::kFloat32, ReduceOp::kSum, plan, 64, {2, 0}});
  spec.buckets.push_back({DType::kFloat32, ReduceOp::kSum, plan, 64, {1, 3}});
  spec.partial.emplace();
  spec.partial->rules = rules;
  spec.partial->plan = plan;
  for (int rank = 0; rank < size; ++rank) spec.partial->hosts.push_back(rank / 2);
  spec.partial->holds_again = holds_again;
  return spec;
}

RoundRules Rules(Sync sync, int64_t quorum, int64_t staleness) {
  RoundRules rules;
  rules.sync = sync;
  rules.quorum = quorum;
  rules.staleness = staleness;
  rules.seed = 3;
  return rules;
}

std::vector<std::vector<float>> Collected(Engine* engine, int64_t channel, int64_t ticket) {
  std::vector<std::future<Result>> results;
  for (int64_t i = 0; i < kTensors; ++i) results.push_back(StartCollect(engine, channel, i, ticket, kSizes[i] * 4));
  std::vector<std::vector<float>> sums;
  for (int64_t i = 0; i < kTensors; ++i) {
    Result result = Await(std::move(results[static_cast<size_t>(i)]), "tensor " + std::to_string(i));
    CHECK_OK(result.status);
    std::vector<float> values(static_cast<size_t>(kSizes[i]));
    if (!values.empty()) std::memcpy(values.data(), result.data.data(), result.data.size());
    sums.push_back(std::move(values));
  }
  return sums;
}

Status Give(Engine* engine, int64_t channel, int64_t step, float factor, int64_t* ticket) {
  Status status = engine->BeginStep(channel);
  for (int64_t tensor = 0; tensor < kTensors && status.ok(); ++tensor) {
    std::vector<float> values;
    for (int64_t i = 0; i < kSizes[tensor]; ++i) {
      values.push_back(factor * ValueOf(engine->rank(), step, tensor, i));
    }
    status = engine->Submit(channel, tensor, values.data(), kSizes[tensor] * 4, ticket);
  }
  return status;
}

int64_t Given(Engine* engine, int64_t channel, int64_t step, float factor = 1) {
  int64_t ticket = 0;
  CHECK_OK(Give(engine, channel, step, factor, &ticket));
  CHECK_EQ(ticket, step);
  return ticket;
}

bool NextRoundOf(Engine* engine, int64_t channel) {
  auto answer = std::make_shared<std::promise<std::pair<Status, bool>>>();
  engine->AwaitRound(channel, [answer](const Status& s, bool more) { answer->set_value({s, more}); });
  auto [status, more] = Await(answer->get_future(), "the next round");
  CHECK_OK(status);
  return more;
}

struct Seen {
  std::vector<std::vector<std::vector<float>>> sums;  // by round, from 0
  std::vector<RoundInfo> rounds;
  std::vector<std::vector<float>> held;
};

// Ranks train `steps` steps each, with random delays, and take what rounds the others have left.
Seen Trained(Engine* engine, const RoundRules& rules, const std::vector<int>& steps, unsigned seed) {
  std::mt19937 random(seed * 31 + static_cast<unsigned>(engine->rank()));
  int64_t channel = -1;
  CHECK_OK(engine->OpenChannel(PartialOfAll(engine, rules), &channel));
  Seen seen;
  for (int step = 1; step <= steps[static_cast<size_t>(engine->rank())]; ++step) {
    if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    seen.sums.push_back(Collected(engine, channel, Given(engine, channel, step)));
  }
  CHECK_OK(engine->Leave(channel));
  while (NextRoundOf(engine, channel)) {
    int64_t ticket = 0;
    CHECK_OK(engine->SkipStep(channel, &ticket));
    seen.sums.push_back(Collected(engine, channel, ticket));
  }
  CHECK_OK(engine->GetRounds(channel, 1, 1000, &seen.rounds));
  for (int64_t tensor = 0; tensor < kTensors; ++tensor) {
    bool held = false;
    seen.held.emplace_back(static_cast<size_t>(kSizes[tensor]));
    CHECK_OK(engine->ReadHeld(channel, tensor, seen.held.back().data(), &held));
  }
  return seen;
}

// The status of one step, all of whose tensors are collected.
// The first error of a step, which may be one of a step before that is known by now.
Status StatusOfStep(Engine* engine, int64_t channel, int64_t step) {
  int64_t ticket = 0;
  Status status = Give(engine, channel, step, 1, &ticket);
  if (!status.ok()) return status;
  std::vector<std::future<Result>> results;
  for (int64_t i = 0; i < kTensors; ++i) results.push_back(StartCollect(engine, channel, i, ticket, kSizes[i] * 4));
  for (auto& result : results) {
    Status one = Await(std::move(result), "a step").status;
    if (status.ok()) status = one;
  }
  return status;
}

// What round after round must be, by who has taken part; *given becomes the newest step of each rank that was given.
std::vector<std::vector<std::vector<float>>> Replayed(const std::vector<RoundInfo>& rounds,
                                                      const std::vector<int>& steps, std::vector<int64_t>* given) {
  std::vector<std::vector<std::vector<float>>> sums;
  for (const RoundInfo& round : rounds) {
    std::vector<std::vector<float>> sum;
    for (int64_t tensor = 0; tensor < kTensors; ++tensor) sum.emplace_back(static_cast<size_t>(kSizes[tensor]));
    for (size_t rank = 0; rank < given->size(); ++rank) {
      const int64_t last = std::min<int64_t>(round.arrived[rank], steps[rank]);  // later ones were skipped
      for (int64_t step = (*given)[rank] + 1; step <= last; ++step) {
        for (int64_t tensor = 0; tensor < kTensors; ++tensor) {
          for (int64_t i = 0; i < kSizes[tensor]; ++i) {
            sum[static_cast<size_t>(tensor)][static_cast<size_t>(i)] +=
                ValueOf(static_cast<int>(rank), step, tensor, i);
          }
        }
      }
      (*given)[rank] = std::max((*given)[rank], last);
    }
    sums.push_back(std::move(sum));
  }
  return sums;
}

void CheckTraining(const RoundRules& rules, const std::vector<int>& steps, unsigned seed) {
  const int size = static_cast<int>(steps.size());
  Engines engines(size);
  std::vector<Seen> seen(steps.size());
  engines.Each(
      [&](int rank, Engine* engine) { seen[static_cast<size_t>(rank)] = Trained(engine, rules, steps, seed); });
  const std::vector<RoundInfo>& rounds = seen[0].rounds;
  CHECK_EQ(rounds.size(), static_cast<size_t>(*std::max_element(steps.begin(), steps.end())));
  std::vector<int64_t> given(steps.size());
  const auto expected = Replayed(rounds, steps, &given);
  for (const Seen& one : seen) {
    CHECK_EQ(one.sums.size(), rounds.size());
    for (size_t t = 0; t < rounds.size(); ++t) {
      CHECK(one.rounds[t].arrived == rounds[t].arrived);
      CHECK(one.sums[t] == expected[t]);
      for (size_t rank = 0; rank < steps.size(); ++rank) {
        const int64_t behind = rounds[t].round - rounds[t].arrived[rank];
        CHECK(behind <= rules.staleness || rounds[t].round > steps[rank]);
      }
    }
  }
  // what was not given is held
  for (size_t rank = 0; rank < steps.size(); ++rank) {
    for (int64_t tensor = 0; tensor < kTensors; ++tensor) {
      for (int64_t i = 0; i < kSizes[tensor]; ++i) {
        float held = 0;
        for (int64_t step = given[rank] + 1; step <= steps[rank]; ++step) {
          held += ValueOf(static_cast<int>(rank), step, tensor, i);
        }
        CHECK_EQ(seen[rank].held[static_cast<size_t>(tensor)][static_cast<size_t>(i)], held);
      }
    }
  }
}

TEST(
    "partial rounds: results are what a replay gives, and what was not given is held, in every mode for 1 to 6 ranks") {
  unsigned seed = 1;
  for (Sync sync : {Sync::kFull, Sync::kSolo, Sync::kMajority, Sync::kQuorum}) {
    for (int size = 1; size <= 6; ++size) {
      for (int64_t staleness : {0, 1, 4}) {
        CheckTraining(Rules(sync, (size + 1) / 2, staleness), std::vector<int>(static_cast<size_t>(size), 15), ++seed);
      }
    }
  }
}

TEST("partial: a round that waits for a rank which has left, or closed the channel, fails on all ranks") {
  for (Sync sync : {Sync::kFull, Sync::kSolo, Sync::kQuorum}) {
    for (int gone : {0, 1, 2}) {
      for (bool closes : {false, true}) {
        Engines engines(3);
        std::atomic<int> told{0};
        engines.Each([&](int rank, Engine* engine) {
          int64_t channel = -1;
          CHECK_OK(engine->OpenChannel(PartialOfAll(engine, Rules(sync, 3, 1)), &channel));
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

TEST("partial rounds: ranks with unequal numbers of steps end together") {
  unsigned seed = 100;
  for (Sync sync : {Sync::kFull, Sync::kSolo, Sync::kMajority, Sync::kQuorum}) {
    CheckTraining(Rules(sync, 2, 3), {30, 4, 17}, ++seed);
    CheckTraining(Rules(sync, 3, 0), {0, 20, 9, 20}, ++seed);
  }
}

TEST("partial rounds: a flushed round takes all gradients, and leaves nothing held") {
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(PartialOfAll(engine, Rules(Sync::kSolo, 1, 4)), &channel));
    for (int step = 1; step <= 20; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(rank));
      if (step % 5 == 0) CHECK_OK(engine->Flush(channel, 1));
      Collected(engine, channel, Given(engine, channel, step));
      std::vector<RoundInfo> rounds;
      CHECK_OK(engine->GetRounds(channel, step, 1, &rounds));
      CHECK_EQ(rounds.size(), size_t{1});
      if (step % 5 != 0) continue;
      for (int64_t arrived : rounds[0].arrived) CHECK_EQ(arrived, step);
      bool held = true;
      CHECK_OK(engine->ReadHeld(channel, 0, nullptr, &held));
      CHECK(!held);
    }
  });
}

TEST("partial rounds: a rank that falls behind the bound is waited for, one within it is not") {
  Engines engines(2);
  std::atomic<int64_t> fast{0};
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(PartialOfAll(engine, Rules(Sync::kSolo, 1, 3)), &channel));
    if (rank == 1) {
      // rank 0 takes the steps 1 to 3 alone, and cannot take the fourth
      while (fast < 3) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      CHECK_EQ(fast.load(), 3);
      int64_t step = -1, over = -1;
      CHECK_OK(engine->Progress(channel, &step, &over));
      CHECK_EQ(step, 0);
      CHECK_EQ(over, 3);
    }
    for (int step = 1; step <= 4; ++step) {
      Collected(engine, channel, Given(engine, channel, step));
      if (rank == 0) fast = step;
    }
  });
}

TEST("partial rounds: a round that is not finite gives finite gradients back to their ranks") {
  Engines engines(2);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(PartialOfAll(engine, Rules(Sync::kFull, 1, 0), true), &channel));
    const float infinite = std::numeric_limits<float>::infinity();
    Collected(engine, channel, Given(engine, channel, 1, rank == 1 ? infinite : 1));
    const auto sums = Collected(engine, channel, Given(engine, channel, 2));
    for (int64_t i = 0; i < kSizes[2]; ++i) {
      const float expected = ValueOf(0, 1, 2, i) + ValueOf(0, 2, 2, i) + ValueOf(1, 2, 2, i);
      CHECK_EQ(sums[2][static_cast<size_t>(i)], expected);
    }
  });
}

TEST("partial rounds: flags travel with a round, and all ranks read the same") {
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    int64_t channel = -1;
    CHECK_OK(engine->OpenChannel(PartialOfAll(engine, Rules(Sync::kFull, 1, 0)), &channel));
    CHECK_OK(engine->SetFlags(channel, rank == 1 ? 5 : 0));
    Collected(engine, channel, Given(engine, channel, 1));
    std::vector<RoundInfo> rounds;
    CHECK_OK(engine->GetRounds(channel, 1, 1, &rounds));
    CHECK(rounds[0].flags == (std::vector<int64_t>{0, 5, 0}));
  });
}

TEST("partial rounds: what cannot be is refused in words") {
  Engines engines(1);
  Engine* engine = engines[0];
  int64_t channel = -1, plain = -1, ticket = 0;
  ChannelSpec spec = PartialOfAll(engine, Rules(Sync::kQuorum, 2, 4));
  CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, "quorum");
  spec.partial->rules = Rules(Sync::kSolo, 1, -1);
  CHECK_FAILS(engine->OpenChannel(spec, &channel), Code::kInvalid, "staleness");
  spec.partial->rules = Rules(Sync::kSolo, 1, 4);
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
  CHECK_FAILS(engine->BeginStep(channel), Code::kInvalid, "half-way");  // left half-way
  Collected(engine, channel, Given(engine, channel, 1));
  spec.partial.reset();
  CHECK_OK(engine->OpenChannel(spec, &plain));
  CHECK_FAILS(engine->SkipStep(plain, &ticket), Code::kInvalid, "wait for all ranks");
  CHECK_FAILS(engine->Flush(plain, 1), Code::kInvalid, "wait for all ranks");
}

}  // namespace
}  // namespace hvd_ext::test

// Ranks that have joined give zeros to the steps and sums of the others, until all ranks have joined.
#include <algorithm>
#include <mutex>
#include <random>

#include "engine/stall.h"
#include "sparse_engines.h"

namespace hvd_ext::test {
namespace {

struct JoinResult {
  Status status;
  int last = -1;
  std::vector<std::string> payloads;
};

std::future<JoinResult> StartJoin(Engine* engine, const std::vector<KnownPlan>& plans = {}) {
  auto promise = std::make_shared<std::promise<JoinResult>>();
  engine->Join(plans, "of " + std::to_string(engine->rank()),
               [promise](const Status& status, int last, const std::vector<std::string>& payloads) {
                 promise->set_value({status, last, payloads});
               });
  return promise->get_future();
}

// Joins, and returns the rank that was the last.
int JoinAll(Engine* engine, const std::vector<KnownPlan>& plans = {}) {
  JoinResult result = Await(StartJoin(engine, plans), "join");
  CHECK_OK(result.status);
  CHECK_EQ(static_cast<int>(result.payloads.size()), engine->size());
  for (int rank = 0; rank < engine->size(); ++rank) {
    CHECK_EQ(result.payloads[static_cast<size_t>(rank)], "of " + std::to_string(rank));
  }
  return result.last;
}

constexpr int64_t kDigest = 77;

CallSpec SumSpec(const std::string& name, int64_t plan, ReduceOp op = ReduceOp::kSum) {
  CallSpec spec = AllreduceSpec(name, plan, 13, DType::kFloat32, op);
  spec.plan_digest = kDigest;
  return spec;
}

// The sum over the ranks whose counts are above `step`.
std::string SumOfActive(const std::vector<int>& counts, int step, int64_t elements, int seed, DType dtype) {
  return Tensor(dtype, elements, [&](int64_t i) {
    int sum = 0;
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      if (counts[rank] > step) sum += Value(static_cast<int>(rank), i, seed);
    }
    return sum;
  });
}

TEST("join: with any numbers of steps and calls per rank, epoch after epoch, the sums are those of the active ranks") {
  std::mt19937 random(7);
  for (int size : Sizes(6)) {
    for (int trial = 0; trial < (ShowsLess() ? 2 : 6); ++trial) {
      constexpr int kEpochs = 3;
      std::vector<std::vector<int>> counts(kEpochs, std::vector<int>(static_cast<size_t>(size)));
      for (auto& of_ranks : counts) {
        for (int& count : of_ranks) count = static_cast<int>(random() % 6);
      }
      std::vector<std::vector<int>> lasts(kEpochs, std::vector<int>(static_cast<size_t>(size)));
      OnEngines(size, [&](int rank, Engine* engine) {
        const int64_t plan = AddPlan(engine, RingAllreduce(rank, size)),
                      star = AddPlan(engine, StarAllreduce(rank, size));
        const int64_t large = trial == 0 && size == 2 ? 140000 : 300;  // large enough to be sent while it is copied
        const ChannelSpec spec = ChannelOf(
            "Adam", {40, 0, 7, large}, {SumOf(plan, large / 4, {3}), SumOf(star, 0, {1, 2}), SumOf(plan, 100, {0})});
        const ChannelSpec other = ChannelOf("SGD", {3}, {SumOf(star, 0, {0})});
        const int64_t channel = OpenChannel(engine, spec), second = OpenChannel(engine, other);
        for (int epoch = 0; epoch < kEpochs; ++epoch) {
          const std::vector<int>& of_epoch = counts[static_cast<size_t>(epoch)];
          for (int step = 0; step < of_epoch[static_cast<size_t>(rank)]; ++step) {
            const int seed = 10 * epoch + step;
            Collects results = StartStep(engine, channel, spec, seed);
            Collects of_other;
            if (step % 2 == 0) of_other = StartStep(engine, second, other, seed);
            for (size_t i = 0; i < results.size(); ++i) {
              Result result = Await(std::move(results[i]), "tensor " + std::to_string(i));
              CHECK_OK(result.status);
              CHECK(result.data ==
                    SumOfActive(of_epoch, step, spec.elements[i], seed + static_cast<int>(i), DType::kFloat32));
            }
            for (auto& future : of_other) {
              CHECK(Await(std::move(future), "SGD").data == SumOfActive(of_epoch, step, 3, seed, DType::kFloat32));
            }
            const CallSpec call = SumSpec("x" + std::to_string(step), plan);
            Result summed = Await(StartAllreduce(engine, call, seed), call.name);
            CHECK_OK(summed.status);
            CHECK(summed.data == SumOfActive(of_epoch, step, 13, seed, DType::kFloat32));
          }
          lasts[static_cast<size_t>(epoch)][static_cast<size_t>(rank)] = JoinAll(engine, {{kDigest, plan}});
          // all ranks together again
          CheckStep(StartStep(engine, channel, spec, 99), spec, size, 99);
          CheckAllreduce(engine, SumSpec("together", plan), epoch);
        }
        int64_t begun = 0, over = 0;
        CHECK_OK(engine->Progress(channel, &begun, &over));
        int64_t expected = kEpochs;
        for (const auto& of_ranks : counts) expected += *std::max_element(of_ranks.begin(), of_ranks.end());
        CHECK_EQ(over, expected);
      });
      for (int epoch = 0; epoch < kEpochs; ++epoch) {
        const std::vector<int>& last = lasts[static_cast<size_t>(epoch)];
        for (int of_rank : last) CHECK_EQ(of_rank, last[0]);
        const std::vector<int>& of_ranks = counts[static_cast<size_t>(epoch)];
        CHECK_EQ(of_ranks[static_cast<size_t>(last[0])], *std::max_element(of_ranks.begin(), of_ranks.end()));
      }
    }
  }
}

TEST("join: nothing of a residual is lost, and an uncommitted step of the others is not committed") {
  std::mt19937 random(11);
  for (const Shape& shape : {Shape{2, 2}, Shape{3, 1}, Shape{1, 2}}) {
    const int size = shape.size();
    const Bucket bucket{{140, 65}, {}};
    std::vector<int> counts;
    for (int rank = 0; rank < size; ++rank) counts.push_back(rank == 1 ? 0 : 1 + static_cast<int>(random() % 6));
    const int most = *std::max_element(counts.begin(), counts.end());
    std::vector<std::vector<float>> received(static_cast<size_t>(size));
    OnEngines(size, [&](int rank, Engine* engine) {
      const int64_t channel = OpenHiTopK(engine, bucket, shape);
      const size_t elements = static_cast<size_t>(bucket.elements());
      auto step = [&](double density, int seed, bool commit) {
        return Step(engine, channel, bucket, density, Gradient(rank, bucket.elements(), seed), commit);
      };
      std::vector<float> sum(elements);
      auto add = [&](const std::vector<float>& result) {
        for (size_t i = 0; i < elements; ++i) sum[i] += result[i];
      };
      for (int i = 0; i < counts[static_cast<size_t>(rank)]; ++i) {
        const bool commit = i != 1;
        const std::vector<float> result = step(0.1, i, commit);
        if (commit) add(result);
      }
      JoinAll(engine);
      TopKStatistics statistics = engine->GetTopKStatistics(channel, &statistics).ok() ? statistics : TopKStatistics{};
      CHECK_EQ(statistics.committed, most - (most > 1));
      CHECK_EQ(statistics.dropped, most > 1);
      // A dense step of zeros sends all that was kept.
      CHECK_OK(engine->BeginTopKStep(channel, 1.0));
      std::vector<float> zeros(elements);
      CHECK_OK(Exchange(engine, channel, bucket, &zeros));
      CHECK_OK(engine->EndStep(channel, true));
      for (float kept : KeptOf(engine, channel)) CHECK(kept == 0);
      add(zeros);
      received[static_cast<size_t>(rank)] = sum;
    });
    // A rank with all steps has received all that any rank gave in the steps that were committed.
    std::vector<float> given(static_cast<size_t>(bucket.elements()));
    for (int rank = 0; rank < size; ++rank) {
      for (int i = 0; i < counts[static_cast<size_t>(rank)]; ++i) {
        const std::vector<float> gradient = Gradient(rank, bucket.elements(), i);
        for (size_t e = 0; i != 1 && e < given.size(); ++e) given[e] += gradient[e];
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      if (counts[static_cast<size_t>(rank)] == most) CHECK(received[static_cast<size_t>(rank)] == given);
    }
  }
}

TEST("join: what zeros would make wrong is refused on all ranks that call it, and the engine continues to work") {
  for (int joiner : {0, 2}) {
    std::atomic<int> ended{0};
    std::atomic<bool> checked{false};
    OnEngines(3, [&](int rank, Engine* engine) {
      const int64_t plan = AddPlan(engine, RingAllreduce(rank, 3)), gather = AddPlan(engine, RingAllgather(rank, 3));
      const KnownPlan known{kDigest, plan};
      if (rank == joiner) {
        std::future<JoinResult> join = StartJoin(engine, {known});
        Until("the refusals", [&] { return ended == 2; });
        CHECK_FAILS(Exchange(engine, "mine", "x").first, Code::kInvalid,
                    "exchange 'mine': this rank has joined (hvd_ext.join)");
        CHECK_FAILS(Await(StartJoin(engine), "join").status, Code::kInvalid, "another thread of this rank has joined");
        checked = true;
        CHECK_OK(Await(std::move(join), "join").status);
      } else {
        CHECK(!Exchange(engine, "early", "x").first.ok());  // it waits for the join
        const std::string who = ": rank " + std::to_string(joiner) + " has joined (hvd_ext.join)";
        const CallSpec gathering = SpecOf(Kind::kAllgather, "g", gather, {2});
        CHECK_FAILS(Call(engine, gathering, Input(DType::kFloat32, 2, rank)).status, Code::kInvalid,
                    "allgather 'g'" + who + "; until all ranks have joined, only barriers and allreduces with op Sum");
        for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
          const Status status = Await(StartAllreduce(engine, SumSpec("m", plan, op)), "m").status;
          CHECK_FAILS(status, Code::kInvalid, std::string("allreduce 'm' with op ") + NameOf(op) + who);
        }
        CallSpec unknown = SumSpec("u", plan);
        unknown.plan_digest = 1;
        CHECK_FAILS(Await(StartAllreduce(engine, unknown), "u").status, Code::kInvalid,
                    "allreduce 'u'" + who + " without having used its algorithm");
        CHECK_FAILS(Exchange(engine, "e", "x").first, Code::kInvalid,
                    "exchange 'e'" + who + ", and it needs all ranks; let each rank train one step");
        CHECK_OK(Call(engine, BarrierSpec("b"), "").status);
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
          const Result result = Await(StartAllreduce(engine, SumSpec("s", plan, op)), "s");
          CHECK_OK(result.status);
          std::vector<int> counts(3, 1);
          counts[static_cast<size_t>(joiner)] = 0;
          std::string sum = SumOfActive(counts, 0, 13, 0, DType::kFloat32);
          if (op == ReduceOp::kAverage) Divide(DType::kFloat32, sum.data(), 3, 13);
          CHECK(result.data == sum);
        }
        ++ended;
        Until("the joiner's checks", [&] { return checked.load(); });
        JoinAll(engine, {known});
      }
      CHECK_OK(Call(engine, SpecOf(Kind::kAllgather, "g", gather, {2}), Input(DType::kFloat32, 2, rank)).status);
      CHECK_OK(Exchange(engine, "e", "x").first);
    });
  }
}

TEST("join: an exchange on which ranks that have joined agree has an empty payload of them") {
  OnEngines(3, [&](int rank, Engine* engine) {
    if (rank != 1) {
      auto agreed = [&](const std::string& name) {
        auto promise = std::make_shared<std::promise<std::vector<std::string>>>();
        engine->Exchange(
            name, "from " + std::to_string(rank),
            [promise](const Status& status, const std::vector<std::string>& payloads) {
              CHECK_OK(status);
              promise->set_value(payloads);
            },
            /*agrees=*/true);
        return Await(promise->get_future(), name);
      };
      CHECK(agreed("a") == (std::vector<std::string>{"from 0", "", "from 2"}));
    }
    JoinAll(engine);
  });
}

TEST("join: a rank that leaves ends the joins of the others, and a failure does so too") {
  OnEngines(3, [](int rank, Engine* engine) {
    if (rank == 1) {
      engine->Stop();
      return;
    }
    const JoinResult result = Await(StartJoin(engine), "join");
    CHECK_FAILS(result.status, Code::kCommunication, "join: rank 1 has shut down");
    CHECK_FAILS(Await(StartJoin(engine), "join").status, Code::kCommunication, "has shut down");
    engine->Stop();
  });
  Engines engines(3);
  engines.Each([&](int rank, Engine* engine) {
    std::future<JoinResult> join;
    if (rank != 1) join = StartJoin(engine);
    if (rank == 1) engines.transport(1)->Abort(9);
    if (rank != 1) CHECK(Await(std::move(join), "join").status.code == Code::kCommunication);
  });
}

TEST("join: a step that was begun and left before anything of it was sent does not disturb those that follow") {
  OnEngines(3, [](int rank, Engine* engine) {
    const ChannelSpec spec = ChannelOf("SGD", {5, 6}, {SumOf(AddPlan(engine, RingAllreduce(rank, 3)), 0, {0, 1})});
    const int64_t channel = OpenChannel(engine, spec);
    CheckStep(StartStep(engine, channel, spec, 0), spec, 3, 0);
    int64_t ticket = 0;
    if (rank == 0) {
      CHECK_OK(engine->BeginStep(channel));
      CHECK_OK(SubmitInput(engine, channel, spec, 0, 1, &ticket));  // half a step, which nothing ends
    }
    if (rank == 1) {
      CHECK_OK(engine->BeginStep(channel));  // a step that is given up and begun again
    }
    if (rank > 0) {
      for (int step = 1; step < 4; ++step) {
        Collects results = StartStep(engine, channel, spec, step);
        for (size_t i = 0; i < results.size(); ++i) {
          CHECK(Await(std::move(results[i]), "result").data ==
                SumOfActive({0, 9, 9}, 0, spec.elements[i], step + static_cast<int>(i), DType::kFloat32));
        }
      }
    }
    JoinAll(engine);
    CheckStep(StartStep(engine, channel, spec, 5), spec, 3, 5);
  });
}

TEST("join: a rank that waits in a join is in no warning; the rank that is awaited is") {
  static std::mutex mutex;
  static std::vector<std::string> heard;
  heard.clear();
  SetWarningSink([](const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex);
    heard.push_back(text);
  });
  Config config = QuickConfig();
  config.stall_warn_s = 0.05;
  OnEngines(3, config, [&](int rank, Engine* engine) {
    const ChannelSpec spec = ChannelOf("SGD", {5}, {SumOf(AddPlan(engine, RingAllreduce(rank, 3)), 0, {0})});
    const int64_t channel = OpenChannel(engine, spec);
    CheckStep(StartStep(engine, channel, spec, 0), spec, 3, 0);
    if (rank == 2) {
      // Others may be named before, where they are slow; each new list of names is a warning.
      Until("a warning that awaits this rank alone", [&] {
        std::lock_guard<std::mutex> lock(mutex);
        return std::any_of(heard.begin(), heard.end(), [](const std::string& text) {
          return text.find("for rank 2 (it has not begun the step)") != std::string::npos;
        });
      });
    }
    if (rank > 0) {
      for (auto& result : StartStep(engine, channel, spec, 1)) CHECK_OK(Await(std::move(result), "result").status);
    }
    JoinAll(engine);
  });
  SetWarningSink(nullptr);
}

}  // namespace
}  // namespace hvd_ext::test

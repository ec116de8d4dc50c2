// Engines over shared memory, and callers that help.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "engines.h"
#include "hosts.h"

namespace hvd_ext::test {
namespace {

// The tests of other files again, over another transport.
void Again(std::vector<std::shared_ptr<Transport>> (*transports)(int), const std::vector<std::string>& beginnings) {
  auto before = TransportsOfEngines();
  TransportsOfEngines() = transports;
  int run = 0;
  std::string failed;
  for (const Test& test : Tests()) {
    for (const std::string& beginning : beginnings) {
      if (std::strncmp(test.name, beginning.c_str(), beginning.size()) != 0) continue;
      ++run;
      try {
        test.run();
      } catch (const std::exception& error) {
        failed += std::string("\n    '") + test.name + "': " + error.what();
      }
    }
  }
  TransportsOfEngines() = before;
  if (!failed.empty()) throw Failure("over shared memory:" + failed);
  CHECK(run >= static_cast<int>(beginnings.size()));
}

TEST("shared memory: the engine's tests pass") {
  Again(MakeHostTransports<kRoomyArena>, {"engine: ", "channel: ", "wire: ", "leave: ", "stop: ", "mismatch: "});
}

TEST("shared memory: the engine's tests pass where hardly anything fits into it") {
  Again(MakeHostTransports<kSmallArena>, {"engine: ", "channel: ", "wire: "});
}

// An allreduce by a caller that helps.
Result Helped(Engine* engine, const CallSpec& spec, const std::string& input, bool* here) {
  std::atomic<bool> ended{false};
  Result result;
  std::thread::id by;
  Engine::Helper helper(engine);
  engine->Call(
      spec, input.data(),
      [&](const std::vector<int64_t>&, void** memory) {
        result.data.resize(input.size());
        *memory = result.data.data();
        return Status::Ok();
      },
      [&](const Status& status) {
        result.status = status;
        by = std::this_thread::get_id();
        ended = true;
      });
  helper.Until(ended);
  Until("the end of a call", [&] { return ended.load(); });
  *here = by == std::this_thread::get_id();
  return result;
}

void CallersHelp() {
  constexpr int kSize = 3, kCalls = 100;
  Engines engines(kSize);
  std::atomic<int> here{0};
  engines.Each([&](int rank, Engine* engine) {
    int64_t plan = AddPlan(engine, RingAllreduce(rank, kSize));
    for (int i = 0; i < kCalls; ++i) {
      CallSpec spec = AllreduceSpec("x", plan, 1000);
      std::string input = Input(DType::kFloat32, 1000, rank, i);
      bool was_here = false;
      // Now and then without help, so that the engine's thread has its turns.
      Result result = i % 10 == rank ? Call(engine, spec, input) : Helped(engine, spec, input, &was_here);
      here += was_here;
      CHECK_OK(result.status);
      CHECK(result.data == Reduced(DType::kFloat32, ReduceOp::kSum, 1000, kSize, i));
    }
  });
  CHECK(here > 0);
}

TEST("help: callers that wait do the engine's work, in turn with its thread") { CallersHelp(); }

TEST("help: callers that wait do the engine's work over shared memory") {
  TransportsOfEngines() = MakeHostTransports<kRoomyArena>;
  try {
    CallersHelp();
  } catch (...) {
    TransportsOfEngines() = MakeThreadTransports;
    throw;
  }
  TransportsOfEngines() = MakeThreadTransports;
}

TEST("help: only one caller helps at a time, and none in a callback; the others wait") {
  Engines engines(1);
  Engine* engine = engines[0];
  std::atomic<bool> never{false}, inside{false}, ended{false};
  {
    Engine::Helper first(engine);
    std::thread([&] {
      Engine::Helper second(engine);
      second.Until(never);  // returns at once
    }).join();
    engine->Call(BarrierSpec("x"), nullptr, nullptr, [&](const Status& status) {
      CHECK_OK(status);
      Engine::Helper third(engine);
      third.Until(never);
      inside = true;
      ended = true;
    });
    first.Until(ended);
    CHECK(inside);
  }
  CHECK_OK(Call(engine, BarrierSpec("y"), "").status);  // the engine's thread is back
}

TEST("help: a stop ends the help, and what was waited for fails") {
  Config config = QuickConfig();
  config.drain_s = config.farewell_s = 0.1;
  Engines engines(2, config);
  std::atomic<bool> ended{false}, helping{false};
  Status seen;
  std::thread caller([&] {
    Engine::Helper helper(engines[0]);
    engines[0]->Call(BarrierSpec("alone"), nullptr, nullptr, [&](const Status& status) {
      seen = status;
      ended = true;
    });
    helping = true;
    helper.Until(ended);
  });
  Until("the help", [&] { return helping.load(); });
  engines[0]->Stop();
  caller.join();
  Until("the end", [&] { return ended.load(); });
  CHECK(!seen.ok());
}

}  // namespace
}  // namespace hvd_ext::test

// Engines over shared memory, and callers that make the engine's progress.
#include "engines.h"
#include "hosts.h"

namespace hvd_ext::test {
namespace {

// Under sanitizers each test runs over one of the arenas.
TEST("shared memory: the engine's tests pass") {
  Again(MakeHostTransports<kRoomyArena>, {"engine: ", "leave: ", "stop: "});
  if (!IsSanitized()) Again(MakeHostTransports<kRoomyArena>, {"channel: ", "early start: "});
}

TEST("shared memory: the engine's tests pass where hardly anything fits into it") {
  Again(MakeHostTransports<kSmallArena>, {"channel: ", "early start: "});
  if (!IsSanitized()) Again(MakeHostTransports<kSmallArena>, {"engine: "});
}

// Calls an allreduce, and makes progress meanwhile. Returns whether the call ended on this thread.
bool CheckWithProgress(Engine* engine, const CallSpec& spec, int seed) {
  std::atomic<bool> ended{false};
  std::promise<Result> promise;
  Result result;
  std::thread::id by;
  const std::string input = Input(spec.dtype, spec.shape[0], engine->rank(), seed);
  Engine::CallerProgress progress(engine);
  engine->Call(
      spec, input.data(),
      [&](const std::vector<int64_t>& shape, void** memory) {
        result.shape = shape;
        result.data.resize(input.size());
        *memory = result.data.data();
        return Status::Ok();
      },
      [&](const Status& status) {
        result.status = status;
        promise.set_value(result);
        by = std::this_thread::get_id();
        ended = true;
      });
  progress.Until(ended);
  Until("the end of a call", [&] { return ended.load(); });
  CheckReduced(promise.get_future(), spec, engine->size(), seed);
  return by == std::this_thread::get_id();
}

TEST("progress: callers that wait make it, in turn with the engine's thread, over shared memory too, be it full") {
  for (MakeTransports make :
       {&MakeThreadTransports, &MakeHostTransports<kRoomyArena>, &MakeHostTransports<kSmallArena>}) {
    const Over over(make);
    std::atomic<int> here{0};
    OnEngines(3, [&](int rank, Engine* engine) {
      const CallSpec spec = AllreduceSpec("x", AddPlan(engine, RingAllreduce(rank, 3)), 1000);
      for (int i = 0; i < 60; ++i) {
        // Some calls make no progress themselves, so that the engine's thread has its turns.
        if (i % 10 == rank) {
          CheckAllreduce(engine, spec, i);
        } else {
          here += CheckWithProgress(engine, spec, i);
        }
      }
    });
    CHECK(here > 0);
  }
}

TEST("progress: only one caller makes it at a time, and none in a callback; the others wait") {
  Engines engines(1);
  Engine* engine = engines[0];
  std::atomic<bool> never{false}, inside{false}, ended{false};
  {
    std::unique_ptr<Engine::CallerProgress> first = TakeProgress(engine);
    std::thread([&] {
      Engine::CallerProgress second(engine);
      second.Until(never);  // returns at once
    }).join();
    engine->Call(BarrierSpec("x"), nullptr, nullptr, [&](const Status& status) {
      CHECK_OK(status);
      Engine::CallerProgress third(engine);
      third.Until(never);
      inside = true;
      ended = true;
    });
    first->Until(ended);
    CHECK(inside);
  }
  CHECK_OK(Call(engine, BarrierSpec("y"), "").status);  // the engine's thread works again
}

TEST("progress: a caller that is not waiting yet moves other work on, pass by pass") {
  Engines engines(1);
  Engine* engine = engines[0];
  std::unique_ptr<Engine::CallerProgress> progress = TakeProgress(engine);
  std::future<Result> call = StartCall(engine, BarrierSpec("x"), "");
  CHECK(call.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);  // the thread stands aside
  Until("the call", [&] {
    progress->Copied(int64_t{1} << 20);
    return call.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  });
  CHECK_OK(call.get().status);
}

TEST("progress: a stop ends a caller's, and what was waited for fails") {
  Config config = QuickConfig();
  config.drain_s = config.handshake_s = 0.1;
  Engines engines(2, config);
  std::atomic<bool> ended{false}, making{false};
  Status seen;
  std::thread caller([&] {
    Engine::CallerProgress progress(engines[0]);
    engines[0]->Call(BarrierSpec("alone"), nullptr, nullptr, [&](const Status& status) {
      seen = status;
      ended = true;
    });
    making = true;
    progress.Until(ended);
  });
  Until("the progress", [&] { return making.load(); });
  engines[0]->Stop();
  caller.join();
  Until("the end", [&] { return ended.load(); });
  CHECK(!seen.ok());
}

}  // namespace
}  // namespace hvd_ext::test

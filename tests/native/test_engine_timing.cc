// Results must not depend on the order in which messages arrive.
#include <string>
#include <vector>

#include "engines.h"
#include "slow_transport.h"

namespace hvd_ext::test {
namespace {

// Numbers whose sum depends on the order of the additions.
std::string Rough(int64_t elements, int rank) {
  std::string bytes;
  for (int64_t i = 0; i < elements; ++i) {
    float x = 1.0f / static_cast<float>(1 + (rank * 31 + i * 17) % 23) * (rank % 3 == 0 ? 3e4f : -7e-3f);
    bytes.append(reinterpret_cast<const char*>(&x), sizeof(x));
  }
  return bytes;
}

std::vector<std::string> RunSlowly(int size, Rows (*rows)(int, int), uint32_t seed, int64_t window, int64_t elements) {
  Config config = QuickConfig();
  config.window = window;
  auto inner = MakeThreadTransports(size);
  std::vector<std::shared_ptr<Engine>> engines(size);
  std::vector<std::string> results(size);
  for (int rank = 0; rank < size; ++rank) {
    auto transport = std::make_shared<SlowTransport>(inner[rank], seed * 100 + rank, seed == 0 ? 0 : 9);
    CHECK_OK(Engine::Start(transport, config, 1, &engines[rank]));
  }
  RunThreads(
      size,
      [&](int rank) {
        Engine* engine = engines[rank].get();
        CallSpec spec = AllreduceSpec("x", AddPlan(engine, rows(rank, size)), elements);
        spec.op = ReduceOp::kAverage;
        spec.segment_nbytes = 60;
        Result result = Call(engine, spec, Rough(elements, rank));
        CHECK_OK(result.status);
        results[rank] = result.data;
        engine->Stop();
      },
      [&] { inner[0]->Abort(1); });
  return results;
}

TEST("timing: results are bit-identical on all ranks and from run to run, whatever comes first") {
  for (int size : {2, 3, 5, 8}) {
    for (auto rows : {RingAllreduce, StarAllreduce}) {
      std::string first = RunSlowly(size, rows, 0, 4, 211)[0];
      for (uint32_t seed : {1, 2, 3}) {
        for (const std::string& result : RunSlowly(size, rows, seed, 1 + seed, 211)) CHECK(result == first);
      }
    }
  }
}

TEST("timing: rows of one round reduce in the order of the rows") {
  std::string expected = Rough(97, 0);
  for (int rank = 1; rank < 6; ++rank) Add(DType::kFloat32, expected.data(), Rough(97, rank).data(), 97);
  Divide(DType::kFloat32, expected.data(), 6, 97);
  for (uint32_t seed : {1, 2, 3, 4}) CHECK(RunSlowly(6, StarAllreduce, seed, 8, 97)[0] == expected);
}

}  // namespace
}  // namespace hvd_ext::test

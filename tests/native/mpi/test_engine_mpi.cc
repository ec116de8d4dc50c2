// Engines over MPI, on any number of ranks; started and stopped again and again in one process.
#include <dirent.h>

#include "engines.h"

namespace hvd_ext::test {
namespace {

// An engine whose ranks share so much memory of their host; with 0 they go by MPI alone.
std::shared_ptr<Engine> Fresh(int64_t generation, int64_t shared_nbytes = 0) {
  std::shared_ptr<Transport> transport;
  CHECK_OK(MakeMpiTransport(&transport));
  if (shared_nbytes > 0) {
    std::shared_ptr<Transport> mpi = transport;
    std::shared_ptr<Arena> arena;
    CHECK_OK(Arena::Make(shared_nbytes, &arena));
    CHECK_OK(MakeHostTransport(mpi, arena, nullptr, &transport));
  }
  std::shared_ptr<Engine> engine;
  CHECK_OK(Engine::Start(transport, QuickConfig(), generation, &engine));
  return engine;
}

int OpenFiles() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  CHECK(folder != nullptr);
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST("mpi engine: collectives of every dtype and length are right, with and without shared memory, again and again") {
  int before = -1;
  int64_t generation = 0;
  for (int64_t shared_nbytes : {0, 256 << 20, 200 << 10, 0}) {  // 200 kB have room for nearly nothing
    std::shared_ptr<Engine> engine = Fresh(++generation, shared_nbytes);
    const int rank = engine->rank(), size = engine->size();
    const int64_t ring = AddPlan(engine.get(), RingAllreduce(rank, size));
    const int64_t star = AddPlan(engine.get(), StarAllreduce(rank, size));
    for (int64_t elements : {0, 1, size - 1, size + 1, 100003, 1100003}) {
      std::vector<CallSpec> specs;
      std::vector<std::future<Result>> results;
      for (DType dtype : kReducible) {
        for (int64_t plan : {ring, star}) {
          const std::string name = "x" + std::to_string(specs.size());
          specs.push_back(AllreduceSpec(name, plan, elements, dtype, ReduceOp::kAverage));
          specs.back().segment_nbytes = elements > 1000000 ? 0 : 65536;
          results.push_back(StartAllreduce(engine.get(), specs.back()));
        }
      }
      for (size_t i = 0; i < specs.size(); ++i) CheckReduced(std::move(results[i]), specs[i], size);
    }
    CHECK(!engine->Stop());
    engine.reset();
    if (before < 0) before = OpenFiles();
    CHECK_EQ(OpenFiles(), before);  // no file is left open
  }
}

TEST("mpi engine: steps of a channel, gathers, exchanges and mismatches side by side") {
  std::shared_ptr<Engine> engine = Fresh(7);
  int rank = engine->rank(), size = engine->size();
  int64_t ring = AddPlan(engine.get(), RingAllreduce(rank, size)),
          gather = AddPlan(engine.get(), RingAllgather(rank, size));
  const ChannelSpec spec = ChannelOf(
      "SGD", {200001, 17}, {{DType::kFloat16, {}, ReduceOp::kSum, ring, 65536, {1}}, SumOf(ring, 65536, {0})});
  const int64_t channel = OpenChannel(engine.get(), spec);
  for (int step = 0; step < 5; ++step) {
    Collects results = StartStep(engine.get(), channel, spec, step);
    std::future<Result> parts =
        StartCall(engine.get(), SpecOf(Kind::kAllgather, "parts", gather, {rank, 5}, DType::kBytes),
                  Input(DType::kBytes, rank * 5, rank));
    Status wrong = Call(engine.get(), SpecOf(Kind::kAllgather, "wrong", gather, {1, rank}, DType::kBytes),
                        Input(DType::kBytes, rank, rank))
                       .status;
    CHECK(wrong.code == (size == 1 ? Code::kOk : Code::kMismatch));
    auto [status, payloads] = Exchange(engine.get(), "hosts", std::string(static_cast<size_t>(rank) * 100000, 'h'));
    CHECK_OK(status);
    CHECK_EQ(payloads.back().size(), static_cast<size_t>(size - 1) * 100000);
    std::string all;
    for (int r = 0; r < size; ++r) all += Input(DType::kBytes, r * 5, r);
    CHECK(Await(std::move(parts), "parts").data == all);
    CheckStep(std::move(results), spec, size, step);
  }
  CHECK(!engine->Stop());
}

TEST("mpi engine: a rank that leaves early is named by the others") {
  std::shared_ptr<Engine> engine = Fresh(8);
  CHECK_OK(Call(engine.get(), BarrierSpec("all"), "").status);
  int last = engine->size() - 1;
  if (engine->rank() != last) {
    // When several ranks leave one after the other, any of them may be the first that the others hear of.
    CHECK_FAILS(Call(engine.get(), BarrierSpec("more"), "").status, Code::kCommunication,
                "has shut down: it called shutdown()");
  }
  CHECK(!engine->Stop());
}

}  // namespace
}  // namespace hvd_ext::test

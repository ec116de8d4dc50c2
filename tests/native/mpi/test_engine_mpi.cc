// Engines over MPI, on any number of ranks; started and stopped again and again in one process.
#include <memory>
#include <string>
#include <vector>

#include "engines.h"

namespace hvd_ext::test {
namespace {

std::shared_ptr<Engine> Fresh(int64_t generation) {
  std::shared_ptr<Transport> transport;
  CHECK_OK(MakeMpiTransport(&transport));
  std::shared_ptr<Engine> engine;
  CHECK_OK(Engine::Start(transport, QuickConfig(), generation, &engine));
  return engine;
}

TEST("mpi engine: collectives of every dtype and length are right, and the engine starts again") {
  for (int64_t generation = 1; generation <= 3; ++generation) {
    std::shared_ptr<Engine> engine = Fresh(generation);
    int rank = engine->rank(), size = engine->size();
    int64_t ring = AddPlan(engine.get(), RingAllreduce(rank, size)),
            star = AddPlan(engine.get(), StarAllreduce(rank, size));
    for (int64_t elements : {0, 1, size - 1, size + 1, 100003}) {
      std::vector<std::future<Result>> results;
      for (DType dtype : kReducible) {
        for (int64_t plan : {ring, star}) {
          std::string name = (plan == ring ? "ring" : "star") + std::to_string(static_cast<int>(dtype));
          CallSpec spec = AllreduceSpec(name, plan, elements, dtype, ReduceOp::kAverage);
          spec.segment_nbytes = 65536;
          results.push_back(StartCall(engine.get(), spec, Input(dtype, elements, rank)));
        }
      }
      size_t next = 0;
      for (DType dtype : kReducible) {
        for (int i = 0; i < 2; ++i) {
          Result result = Await(std::move(results[next++]), "allreduce");
          CHECK_OK(result.status);
          CHECK(result.data == Reduced(dtype, ReduceOp::kAverage, elements, size));
        }
      }
    }
    CHECK(!engine->Stop());
  }
}

TEST("mpi engine: steps of a channel, gathers, exchanges and mismatches side by side") {
  std::shared_ptr<Engine> engine = Fresh(7);
  int rank = engine->rank(), size = engine->size();
  int64_t ring = AddPlan(engine.get(), RingAllreduce(rank, size)),
          gather = AddPlan(engine.get(), RingAllgather(rank, size));
  ChannelSpec channel_spec;
  channel_spec.name = "SGD";
  channel_spec.tensor_names = {"a", "b"};
  channel_spec.elements = {200001, 17};
  channel_spec.buckets = {{DType::kFloat16, ReduceOp::kSum, ring, 65536, {1}},
                          {DType::kFloat32, ReduceOp::kSum, ring, 65536, {0}}};
  int64_t channel = -1, ticket = 0;
  CHECK_OK(engine->OpenChannel(channel_spec, &channel));
  for (int step = 0; step < 5; ++step) {
    CHECK_OK(engine->BeginStep(channel));
    std::string a = Input(DType::kFloat32, 200001, rank, step), b = Input(DType::kFloat16, 17, rank, step);
    CHECK_OK(engine->Submit(channel, 0, a.data(), static_cast<int64_t>(a.size()), &ticket));
    CHECK_OK(engine->Submit(channel, 1, b.data(), static_cast<int64_t>(b.size()), &ticket));
    CallSpec spec;
    spec.kind = Kind::kAllgather;
    spec.name = "parts";
    spec.dtype = DType::kBytes;
    spec.shape = {rank, 5};
    spec.plan = gather;
    std::future<Result> parts = StartCall(engine.get(), spec, Input(DType::kBytes, rank * 5, rank));
    spec.name = "wrong";
    spec.shape = {1, rank};
    Status wrong = Call(engine.get(), spec, Input(DType::kBytes, rank, rank)).status;
    CHECK(wrong.code == (size == 1 ? Code::kOk : Code::kMismatch));
    auto [status, payloads] = Exchange(engine.get(), "hosts", std::string(static_cast<size_t>(rank) * 100000, 'h'));
    CHECK_OK(status);
    CHECK_EQ(payloads.back().size(), static_cast<size_t>(size - 1) * 100000);
    std::string all;
    for (int r = 0; r < size; ++r) all += Input(DType::kBytes, r * 5, r);
    CHECK(Await(std::move(parts), "parts").data == all);
    Result first = Await(StartCollect(engine.get(), channel, 0, ticket, 800004), "a");
    CHECK(first.data == Reduced(DType::kFloat32, ReduceOp::kSum, 200001, size, step));
    Result second = Await(StartCollect(engine.get(), channel, 1, ticket, 34), "b");
    CHECK(second.data == Reduced(DType::kFloat16, ReduceOp::kSum, 17, size, step));
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

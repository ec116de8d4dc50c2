// The job's engine and those of overlapping sets over MPI, on any number of ranks.
#include "engine/engines.h"
#include "engines.h"

namespace hvd_ext::test {
namespace {

struct Set {
  std::vector<int> ranks;
  std::shared_ptr<Engine> engine;  // null if this rank is not in the set
};

// All neighbouring pairs around the ring, the even ranks, all ranks, and the last rank alone.
std::vector<Set> Overlapping(int size) {
  std::vector<Set> sets;
  for (int rank = 0; rank < size && size > 1; ++rank) {
    sets.push_back({{std::min(rank, (rank + 1) % size), std::max(rank, (rank + 1) % size)}, nullptr});
  }
  Set even, all;
  for (int rank = 0; rank < size; rank += 2) even.ranks.push_back(rank);
  for (int rank = 0; rank < size; ++rank) all.ranks.push_back(rank);
  sets.push_back(even);
  sets.push_back(all);
  sets.push_back({{size - 1}, nullptr});
  return sets;
}

int Start(std::shared_ptr<Engine>* job, std::vector<Set>* sets, bool shared_memory) {
  Config config = QuickConfig();
  config.shared_memory = shared_memory;
  config.tcp_inside_too = !shared_memory;
  CHECK_OK(StartJob(config, MakeMpiTransport, job));
  *sets = Overlapping((*job)->size());
  int number = 0;
  for (Set& set : *sets) {
    ++number;
    if (!std::binary_search(set.ranks.begin(), set.ranks.end(), (*job)->rank())) continue;
    CHECK_OK(StartSet((*job)->generation(), set.ranks, number, config, &set.engine));
    CHECK_EQ(set.engine->size(), static_cast<int>(set.ranks.size()));
    CHECK_EQ(set.ranks[static_cast<size_t>(set.engine->rank())], (*job)->rank());
  }
  return (*job)->rank();
}

// A sum over each set, checked by hand; the ranks begin the sums in different orders.
void Reduce(const std::vector<Set>& sets, int rank, int64_t elements, int seed) {
  std::vector<std::future<Result>> results(sets.size());
  for (size_t i = 0; i < sets.size(); ++i) {
    size_t s = (i * (rank % 2 == 0 ? 1 : sets.size() - 1) + static_cast<size_t>(rank)) % sets.size();
    Engine* engine = sets[s].engine.get();
    if (engine == nullptr) continue;
    int64_t ring = AddPlan(engine, RingAllreduce(engine->rank(), engine->size()));
    CallSpec spec = AllreduceSpec("x", ring, elements);
    spec.segment_nbytes = 65536;
    results[s] = StartCall(engine, spec, Input(DType::kFloat32, elements, rank, seed + static_cast<int>(s)));
  }
  for (size_t s = 0; s < sets.size(); ++s) {
    if (sets[s].engine == nullptr) continue;
    Result result = Await(std::move(results[s]), "set " + std::to_string(s));
    CHECK_OK(result.status);
    CHECK(result.data == Tensor(DType::kFloat32, elements, [&](int64_t i) {
            int sum = 0;
            for (int member : sets[s].ranks) sum += Value(member, i, seed + static_cast<int>(s));
            return sum;
          }));
  }
}

TEST("mpi sets: overlapping sets and the job work at the same time") {
  for (bool shared_memory : {true, false}) {
    std::shared_ptr<Engine> job;
    std::vector<Set> sets;
    int rank = Start(&job, &sets, shared_memory);
    sets.push_back({{}, job});
    for (int other = 0; other < job->size(); ++other) sets.back().ranks.push_back(other);
    for (int64_t elements : {1, 5, 100003}) Reduce(sets, rank, elements, static_cast<int>(elements % 100));
    bool alone = true;
    CHECK_OK(StopEngine(job->generation(), /*together=*/false, &alone));
    CHECK(!alone);
  }
}

TEST("mpi sets: a set stops for good while the others work, many times") {
  std::shared_ptr<Engine> job;
  std::vector<Set> sets;
  int rank = Start(&job, &sets, /*shared_memory=*/true);
  std::vector<int> ranks(static_cast<size_t>(job->size()));
  for (int other = 0; other < job->size(); ++other) ranks[static_cast<size_t>(other)] = other;
  std::thread beside([&] {
    for (int step = 0; step < 10; ++step) Reduce(sets, rank, 1003, step);
  });
  for (int round = 0; round < 10; ++round) {
    std::shared_ptr<Engine> fresh;
    Config config = QuickConfig();
    config.shared_memory = round % 2 == 0;
    config.tcp_inside_too = round % 3 == 0;
    CHECK_OK(StartSet(job->generation(), ranks, 100, config, &fresh));
    std::vector<Set> all = {{ranks, fresh}};
    Reduce(all, rank, 17, round);
    bool alone = true;
    CHECK_OK(StopEngine(fresh->generation(), /*together=*/true, &alone));
    CHECK(!alone);
    CHECK(fresh->quiet());
  }
  beside.join();
  bool alone = true;
  CHECK_OK(StopEngine(job->generation(), /*together=*/false, &alone));
  CHECK(!alone);
}

}  // namespace
}  // namespace hvd_ext::test

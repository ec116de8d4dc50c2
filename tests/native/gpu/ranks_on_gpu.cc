// Ranks of one host, each a process, that share GPU 0: `ranks_on_gpu RANKS ELEMENTS STEPS [DENSITY]`. They add up
// float32 tensors that lie on the GPU: with buckets on the GPU, and through buckets in the host's memory, as a job does
// without `gpu_buckets`. All results must have equal bits. With a density each rank selects from its tensor, with error
// feedback, and all add up what was selected, as hosts do. Rank 0 prints one line of JSON: the seconds of each step, of
// copies of a tensor on the GPU, and whether messages stayed on the GPU. The exit status is 0 if all was right, 1 if
// not, and 2 if there is no GPU.
//
// Over the stand-in for CUDA it is a test, over CUDA a measurement.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/device_gpu.h"
#include "engine/engine.h"
#include "engine/transport.h"
#include "plan/plan.h"
#include "shm/arena.h"

namespace {

using namespace hvd_ext;

constexpr int kNoGpu = 2;
constexpr int64_t kSegmentNbytes = 4 << 20;

void Must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// For each job of the ranks, the connections of each rank with the others.
using Sockets = std::vector<std::vector<int>>;

Sockets Connected(int ranks) {
  Sockets sockets(static_cast<size_t>(ranks), std::vector<int>(static_cast<size_t>(ranks), -1));
  for (size_t a = 0; a < sockets.size(); ++a) {
    for (size_t b = a + 1; b < sockets.size(); ++b) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("socketpair failed");
      sockets[a][b] = ends[0];
      sockets[b][a] = ends[1];
    }
  }
  return sockets;
}

// Rows of a plan.
struct Rows {
  std::vector<int64_t> values{};

  void Add(int64_t round, Opcode what, int peer, int64_t unit, int64_t count = 1) {
    for (const int64_t value : {round, static_cast<int64_t>(what), int64_t{peer}, unit, count}) {
      values.push_back(value);
    }
  }
};

// Each rank adds up one part, straight from the memory of the others, and gives it to all; with `folds` after error
// feedback.
Rows DirectAllreduce(int rank, int ranks, bool folds) {
  Rows rows;
  if (folds) rows.Add(0, Opcode::FOLD, rank, 0, ranks);
  for (const bool sums : {true, false}) {
    const int64_t round = int64_t{folds} + int64_t{!sums};
    for (int step = 1; step < ranks; ++step) {
      const int peer = (rank + step) % ranks;
      rows.Add(round, Opcode::SEND, peer, sums ? peer : rank);
    }
    for (int step = 1; step < ranks; ++step) {
      const int peer = (rank + step) % ranks;
      rows.Add(round, sums ? Opcode::RECV_REDUCE : Opcode::RECV, peer, sums ? rank : peer);
    }
  }
  return rows;
}

// All get the selections of all.
Rows SparseAllreduce(int rank, int ranks) {
  Rows rows;
  rows.Add(0, Opcode::SELECT, rank, 0);
  for (const Opcode what : {Opcode::SEND_SPARSE, Opcode::RECV_SPARSE}) {
    for (int step = 1; step < ranks; ++step) rows.Add(1, what, (rank + step) % ranks, 0);
  }
  rows.Add(2, Opcode::CLEAR, rank, 0);
  for (int each = 0; each < ranks; ++each) rows.Add(2, Opcode::SCATTER_ADD, each, 0);
  return rows;
}

int64_t Added(Engine* engine, const Rows& rows, int64_t units) {
  int64_t plan = 0;
  Must(engine->AddPlan(rows.values.data(), static_cast<int64_t>(rows.values.size()) / 5, units, &plan));
  return plan;
}

class Rank {
 public:
  Rank(int rank, int ranks, int64_t elements, double density)
      : rank_(rank),
        ranks_(ranks),
        density_(density),
        nbytes_(elements * static_cast<int64_t>(sizeof(float))),
        gpu_(MakeGpuDevice(0)),
        messages_(nullptr, gpu_),
        pool_(BufferPool::Of(gpu_)),
        host_(messages_.Take(nbytes_)),
        tensor_(pool_.Take(nbytes_)),
        result_(pool_.Take(nbytes_)) {
    std::mt19937 random(static_cast<unsigned>(rank));
    auto* values = reinterpret_cast<float*>(host_.data());
    for (int64_t i = 0; i < elements; ++i) values[i] = static_cast<float>(random()) * 1e-9f - 2.f;
    Copy(tensor_.data(), host_.data());
  }

  // The seconds of each step of a job; `result` becomes the sums.
  std::vector<double> Sum(bool on_gpu, const std::vector<int>& sockets, int steps, std::string* result, bool* stays) {
    std::shared_ptr<Transport> mesh, transport;
    Must(MakeMeshTransport(rank_, sockets, &mesh));
    std::shared_ptr<Arena> arena;
    Must(Arena::Make(Arena::DefaultCapacity(), &arena));
    Config config;
    config.device = on_gpu ? gpu_ : nullptr;
    config.drain_s = config.handshake_s = 60;
    Must(MakeHostTransport(std::move(mesh), std::move(arena), config.device, &transport));
    *stays = transport->ReachesDevice((rank_ + 1) % ranks_);
    std::shared_ptr<Engine> engine;
    Must(Engine::Start(transport, config, 1, &engine));
    const bool selects = density_ > 0;
    const int64_t dense = Added(engine.get(), DirectAllreduce(rank_, ranks_, selects), ranks_);
    const int64_t plan = selects ? Added(engine.get(), SparseAllreduce(rank_, ranks_), 1) : dense;
    ChannelSpec spec;
    spec.name = "gradients";
    spec.tensor_names = {"gradient"};
    spec.elements = {nbytes_ / static_cast<int64_t>(sizeof(float))};
    spec.buckets.push_back({DType::kFloat32, {}, ReduceOp::kSum, plan, kSegmentNbytes, {0}});
    if (selects) {
      spec.buckets[0].sparse.emplace();
      spec.buckets[0].sparse->dense_plan = dense;
    }
    spec.on_device = on_gpu;
    int64_t channel = 0;
    Must(engine->OpenChannel(spec, &channel));
    std::vector<double> seconds;
    for (int step = 0; step < steps; ++step) {
      const double begin = Now();
      Step(engine.get(), channel, on_gpu);
      seconds.push_back(Now() - begin);
    }
    Copy(host_.data(), result_.data());
    result->assign(host_.data(), static_cast<size_t>(nbytes_));
    if (engine->Stop() || !engine->quiet()) throw std::runtime_error("the ranks did not stop together");
    transport->Release();
    return seconds;
  }

  double CopySeconds() {
    const double begin = Now();
    Copy(result_.data(), tensor_.data());
    return Now() - begin;
  }

 private:
  void Copy(void* to, const void* from) {
    Queue* queue = gpu_->inputs();
    queue->Copy(to, from, nbytes_);
    while (!queue->Done(queue->Last())) std::this_thread::yield();
  }

  void Step(Engine* engine, int64_t channel, bool on_gpu) {
    Must(density_ > 0 ? engine->BeginTopKStep(channel, density_) : engine->BeginStep(channel));
    int64_t ticket = 0;
    if (on_gpu) {
      Must(engine->SubmitOnDevice(channel, 0, tensor_.data(), nbytes_, nullptr, &ticket));
    } else {
      Copy(host_.data(), tensor_.data());
      Must(engine->Submit(channel, 0, host_.data(), nbytes_, &ticket));
    }
    std::promise<Status> promise;
    engine->Collect(channel, 0, ticket, [&](const Status& status, const void* data, const Memory& memory) {
      memory_ = memory;
      data_ = data;
      promise.set_value(status);
    });
    Must(promise.get_future().get());
    if (!on_gpu) std::memcpy(host_.data(), data_, static_cast<size_t>(nbytes_));
    Copy(result_.data(), on_gpu ? data_ : host_.data());
    memory_.reset();
    if (density_ > 0) Must(engine->EndStep(channel, /*commit=*/true));
  }

  const int rank_, ranks_;
  const double density_;  // 0: nothing is selected
  const int64_t nbytes_;
  const std::shared_ptr<Device> gpu_;
  BufferPool messages_, pool_;
  Buffer host_, tensor_, result_;
  Memory memory_;
  const void* data_ = nullptr;
};

std::string Listed(const std::vector<double>& seconds) {
  std::string text;
  for (const double each : seconds) text += (text.empty() ? "[" : ", ") + std::to_string(each);
  return text + "]";
}

int Main(int number, int ranks, int64_t elements, int steps, double density, const Sockets& first,
         const Sockets& second) {
  std::unique_ptr<Rank> rank;
  try {
    rank = std::make_unique<Rank>(number, ranks, elements, density);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", number, error.what());
    return kNoGpu;
  }
  try {
    std::vector<double> copies;
    for (int step = 0; number == 0 && step < steps; ++step) copies.push_back(rank->CopySeconds());
    std::string host, gpu;
    bool stays = false, host_stays = false;
    const auto on_gpu = rank->Sum(true, first[static_cast<size_t>(number)], steps, &gpu, &stays);
    const auto on_host = rank->Sum(false, second[static_cast<size_t>(number)], steps, &host, &host_stays);
    if (host != gpu) throw std::runtime_error("the bits of both sums differ");
    if (number > 0) return 0;
    std::printf(
        "{\"ranks\": %d, \"elements\": %lld, \"density\": %g, \"on_gpu_seconds\": %s, \"on_host_seconds\": %s, "
        "\"copy_seconds\": %s, "
        "\"stays_on_gpu\": %s}\n",
        ranks, static_cast<long long>(elements), density, Listed(on_gpu).c_str(), Listed(on_host).c_str(),
        Listed(copies).c_str(), stays ? "true" : "false");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", number, error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 3 ? std::atoi(argv[1]) : 0, steps = argc > 3 ? std::atoi(argv[3]) : 0;
  const int64_t elements = argc > 3 ? std::atoll(argv[2]) : 0;
  const double density = argc > 4 ? std::atof(argv[4]) : 0;
  if (ranks < 2 || elements < 1 || steps < 1 || density < 0 || density > 1) {
    std::fprintf(stderr, "usage: ranks_on_gpu RANKS ELEMENTS STEPS [DENSITY], with two ranks or more\n");
    return 1;
  }
  const Sockets first = Connected(ranks), second = Connected(ranks);
  for (int number = 0; number < ranks; ++number) {
    if (fork() > 0) continue;
    for (int other = 0; other < ranks; ++other) {  // so that a rank that ends is seen by the others
      if (other == number) continue;
      for (const int fd : first[static_cast<size_t>(other)]) close(fd);
      for (const int fd : second[static_cast<size_t>(other)]) close(fd);
    }
    std::exit(Main(number, ranks, elements, steps, density, first, second));
  }
  for (int number = 0; number < ranks; ++number) {  // the children have them
    for (const int fd : first[static_cast<size_t>(number)]) close(fd);
    for (const int fd : second[static_cast<size_t>(number)]) close(fd);
  }
  int worst = 0;
  for (int number = 0; number < ranks; ++number) {
    int status = 0;
    wait(&status);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    worst = worst == 0 ? code : worst;
  }
  return worst;
}

// On a real GPU: `on_gpu [check | few | times] [SECONDS]`.
//   check   the cases of the emulated tests and larger ones (the time limit leaves out the last ones, and says so); the
//           norms and the updates of LARS and LAMB come first
//   few     a few short cases, for compute-sanitizer
//   times   the times of 20 calls, each between two events, and for comparison those of an empty kernel and of a copy
//           of x in device memory
// Without an argument it runs check and times. Each result is one line of JSON. The exit status is 0 if every answer
// was right, 1 if one was wrong, and 2 if there is no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <future>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gpu/cases.h"
#include "gpu/norms_cases.h"
#include "kernels/layerwise_gpu.h"
#include "kernels/reduce.h"
#include "layerwise_cases.h"

namespace {

using namespace hvd_ext;
using namespace hvd_ext::gpu_test;

void Must(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}
#define MUST(call) Must(call, #call)

// Device memory of exactly this many bytes (apart from cudaMalloc's granularity), filled with garbage.
struct Buffer {
  char* data = nullptr;
  explicit Buffer(int64_t nbytes) {
    MUST(cudaMalloc(&data, std::max<int64_t>(nbytes, 1)));
    MUST(cudaMemset(data, 0xa5, std::max<int64_t>(nbytes, 1)));
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
};

__global__ void FillGauss(float* x, int64_t elements) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (static_cast<float>(z >> 40) + 0.5f) * 0x1p-24f,
                angle = static_cast<float>(z & 0xffffff) * 0x1p-24f;
    x[i] = sqrtf(-2 * logf(u)) * cospif(2 * angle);
  }
}

__global__ void Nothing() {}

template <typename Body>
std::vector<float> Milliseconds(const Body& body) {
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  std::vector<float> times;
  for (int repeat = 0; repeat < 23; ++repeat) {
    MUST(cudaEventRecord(begin));
    body();
    MUST(cudaEventRecord(end));
    MUST(cudaEventSynchronize(end));
    float ms = 0;
    MUST(cudaEventElapsedTime(&ms, begin, end));
    if (repeat >= 3) times.push_back(ms);  // the first ones load the kernels
  }
  MUST(cudaEventDestroy(begin));
  MUST(cudaEventDestroy(end));
  return times;
}

// `"NAME_ms": median, "NAME_samples_ms": [all of them]`, as part of a JSON object.
std::string Told(const std::string& name, std::vector<float> times) {
  std::ostringstream text;
  for (size_t i = 0; i < times.size(); ++i) text << (i == 0 ? "[" : ", ") << times[i];
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  std::ostringstream all;
  all << '"' << name << "_ms\": " << times[times.size() / 2] << ", \"" << name << "_samples_ms\": " << text.str()
      << ']';
  return all.str();
}

Answer RunOnGpu(const Problem& problem) {
  const int32_t dtype = static_cast<int32_t>(problem.dtype);
  const int64_t n = static_cast<int64_t>(problem.segments.size()), picks = problem.picks();
  const int64_t width = Width(problem.dtype), index_width = problem.wide ? 8 : 4;
  const int64_t workspace_nbytes = hvd_ext_topk_gpu_workspace(dtype, problem.segments.data(), n);
  const std::vector<char> packed = Packed(problem);
  const int64_t offset = problem.shift * width;
  Buffer x(packed.size() + offset), workspace(workspace_nbytes), indices(picks * index_width), values(picks * width);
  Buffer non_finite(sizeof(int32_t));
  MUST(cudaMemcpy(x.data + offset, packed.data(), packed.size(), cudaMemcpyHostToDevice));
  const int code =
      hvd_ext_topk_gpu(dtype, x.data + offset, problem.segments.data(), n, indices.data, problem.wide, values.data,
                       reinterpret_cast<int32_t*>(non_finite.data), workspace.data, workspace_nbytes, nullptr);
  if (code != 0) throw std::runtime_error(hvd_ext_topk_gpu_error());
  std::vector<char> seen_indices(picks * index_width), seen_values(picks * width), flag(sizeof(int32_t));
  MUST(cudaMemcpy(seen_indices.data(), indices.data, seen_indices.size(), cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(seen_values.data(), values.data, seen_values.size(), cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(flag.data(), non_finite.data, flag.size(), cudaMemcpyDeviceToHost));
  return AnswerIn(problem, seen_indices.data(), seen_values.data(), flag.data());
}

using Making = std::function<Problem()>;

// All inputs of the emulated tests, and longer ones.
std::vector<Making> AllProblems() {
  std::vector<Making> problems;
  const auto add = [&](auto make) {
    const uint64_t seed = problems.size() + 1;
    problems.push_back([make, seed] { return make(seed); });
  };
  for (const test::SelectionInput& input : test::SelectionInputs()) {
    const std::string kind = input.name;
    for (DType dtype : kFloats) {
      for (int64_t d : {1, 2, 31, 1000, 8192, 8193, 32768, 32769, 100003, 1000003}) {
        add([=](uint64_t seed) {
          const int64_t ks[] = {0, 1, d / 1000, d / 100, d / 10, d / 4, d / 2, d - 1, d};
          return MakeProblem(kind, dtype, d, ks[seed % 9], seed);
        });
        add([=](uint64_t seed) { return MakeProblem(kind, dtype, d, d / 100, seed); });
      }
    }
    add([=](uint64_t seed) { return MakeProblem(kind, DType::kFloat32, 6000007, 60000, seed); });
    add([=](uint64_t seed) {
      std::vector<int64_t> lengths;
      for (int s = 0; s < 161; ++s) lengths.push_back(int64_t{s} * s * s % 70001);
      return ManySegments(kind, kFloats[seed % 4], lengths, seed);
    });
  }
  return problems;
}

// Short problems for compute-sanitizer, under which a kernel takes up to a few hundred times as long. The problems that
// reach the most code come first.
std::vector<Making> FewProblems() {
  std::vector<Making> problems;
  const uint64_t seed = 5;  // odd: int32 indices
  for (const char* kind : {"gauss", "a hot run"}) {
    problems.push_back([=] { return ManySegments(kind, DType::kFloat32, {40000, 1, 0, 8193, 33000}, seed); });
  }
  for (int64_t d : {100003, 32769, 8193, 31}) {
    for (const char* kind : {"gauss", "ties", "NaN and infinity", "the tail", "a hot run"}) {
      for (DType dtype : kFloats) problems.push_back([=] { return MakeProblem(kind, dtype, d, d / 100, seed); });
    }
  }
  return problems;
}

struct Prepared {
  Problem problem;
  Answer expected;
};

// Runs as many of the problems as the time limit allows, each twice, and throws at the first wrong answer. Meanwhile
// other threads make and sort the inputs, which takes far longer than the kernels.
size_t Check(const std::vector<Making>& problems, double limit_s) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
  const size_t ahead = std::max(1u, std::thread::hardware_concurrency());
  std::deque<std::future<Prepared>> coming;
  size_t checked = 0;
  for (size_t next = 0; checked < problems.size() && std::chrono::steady_clock::now() < end; ++checked) {
    for (; next < std::min(checked + ahead, problems.size()); ++next) {
      coming.push_back(std::async(std::launch::async, [make = problems[next], next] {
        Prepared one{make(), {}};
        one.problem.shift = static_cast<int64_t>((next + 1) % 130);
        one.problem.wide = next % 2 == 1;
        one.expected = Expected(one.problem);
        return one;
      }));
    }
    const Prepared one = coming.front().get();
    coming.pop_front();
    for (int repeat = 0; repeat < 2; ++repeat) MustBe(one.problem, RunOnGpu(one.problem), one.expected);
  }
  return checked;
}

// Prints one line: what `body` takes beside an empty kernel and a copy of x, which has d float32, in device memory.
// `about` are further members of the JSON object.
template <typename Body>
void PrintTimes(const std::string& about, const Buffer& x, int64_t d, const std::string& name, const Body& body) {
  Buffer copy(4 * d);
  FillGauss<<<1024, 256>>>(reinterpret_cast<float*>(x.data), d);
  MUST(cudaGetLastError());
  const std::vector<float> nothing = Milliseconds([] { Nothing<<<1, 32>>>(); });
  const std::vector<float> copied =
      Milliseconds([&] { MUST(cudaMemcpyAsync(copy.data, x.data, 4 * d, cudaMemcpyDeviceToDevice)); });
  std::printf("{\"elements\": %lld, %s, %s, %s, %s}\n", static_cast<long long>(d), about.c_str(),
              Told("noop", nothing).c_str(), Told("copy", copied).c_str(), Told(name, Milliseconds(body)).c_str());
  std::fflush(stdout);
}

void Time(int64_t d, double density) {
  const int64_t k = static_cast<int64_t>(density * d);
  const HvdExtTopKSegment segment = {0, d, k};
  const int64_t workspace_nbytes = hvd_ext_topk_gpu_workspace(0, &segment, 1);
  Buffer x(4 * d), workspace(workspace_nbytes), indices(4 * k), values(4 * k);
  const std::string about =
      "\"k\": " + std::to_string(k) + ", \"workspace_bytes\": " + std::to_string(workspace_nbytes);
  PrintTimes(about, x, d, "topk", [&] {
    const int code = hvd_ext_topk_gpu(0, x.data, &segment, 1, indices.data, 0, values.data, nullptr, workspace.data,
                                      workspace_nbytes, nullptr);
    if (code != 0) throw std::runtime_error(hvd_ext_topk_gpu_error());
  });
}

std::vector<double> NormsOnGpu(const Problem& problem) {
  const int64_t n = static_cast<int64_t>(problem.segments.size());
  const std::vector<char> packed = Packed(problem);
  const int64_t offset = problem.shift * static_cast<int64_t>(Width(problem.dtype));
  Buffer x(packed.size() + offset), squares(8 * n);
  MUST(cudaMemcpy(x.data + offset, packed.data(), packed.size(), cudaMemcpyHostToDevice));
  const std::vector<HvdExtNormsTensor> tensors = TensorsOf(problem, x.data + offset);
  const int64_t workspace_nbytes = hvd_ext_norms_gpu_workspace(tensors.data(), n);
  Buffer workspace(workspace_nbytes);
  if (hvd_ext_norms_gpu(static_cast<int32_t>(problem.dtype), tensors.data(), n, reinterpret_cast<double*>(squares.data),
                        workspace.data, workspace_nbytes, nullptr) != 0) {
    throw std::runtime_error(hvd_ext_norms_gpu_error());
  }
  std::vector<double> found(n);
  MUST(cudaMemcpy(found.data(), squares.data, 8 * n, cudaMemcpyDeviceToHost));
  return found;
}

// Runs the inputs of the emulated tests, or a few of them, each twice, and throws at the first wrong sum. Returns their
// number.
size_t CheckNorms(bool few) {
  size_t checked = 0;
  for (const test::SelectionInput& input : test::SelectionInputs()) {
    const std::string name = input.name;
    for (DType dtype : kFloats) {
      if (few && name != "gauss" && name != "NaN and infinity") continue;
      const Problem problem = NormsProblem(name, dtype, 7 + checked++);
      const std::vector<double> expected = ExpectedSquares(problem);
      for (int repeat = 0; repeat < 2; ++repeat) MustBe(problem, NormsOnGpu(problem), expected);
    }
  }
  return checked;
}

struct GpuMemory {
  std::deque<Buffer> kept;
  float* Put(const std::vector<float>& floats) {
    const int64_t nbytes = 4 * static_cast<int64_t>(floats.size());
    kept.emplace_back(nbytes);
    MUST(cudaMemcpy(kept.back().data, floats.data(), nbytes, cudaMemcpyHostToDevice));
    return reinterpret_cast<float*>(kept.back().data);
  }
  static std::vector<float> Get(const float* from, size_t count) {
    std::vector<float> floats(count);
    MUST(cudaMemcpy(floats.data(), from, 4 * count, cudaMemcpyDeviceToHost));
    return floats;
  }
};

void MustSucceed(int code) {
  if (code != 0) throw std::runtime_error(hvd_ext_layerwise_gpu_error());
}

// Runs a step of LARS and one of LAMB on inputs of each kind, and throws at the first wrong number. Returns the number
// of inputs.
size_t CheckLayerwise(bool few) {
  size_t checked = 0;
  for (bool wild : {false, true}) {
    for (uint64_t seed = 1; seed <= (few ? 2 : 8); ++seed, ++checked) {
      std::vector<int64_t> lengths = {0, 1, 255, 256, 257, 4095, 4096, 4097, 9000, 0};
      for (int64_t t = 0; t < 160; ++t) lengths.push_back(t * t * t % (few ? 300 : 30001));
      const test::LayerwiseProblem problem = test::MakeLayerwise(lengths, seed, wild);
      GpuMemory memory;
      Buffer space(hvd_ext_layerwise_gpu_workspace(static_cast<int64_t>(lengths.size())));
      const int64_t nbytes = hvd_ext_layerwise_gpu_workspace(static_cast<int64_t>(lengths.size()));
      const test::LayerwiseAnswer seen = test::RunLayerwise(
          problem, seed % 3 == 0, &memory,
          [&](const LarsVariable* all, int64_t n, const LarsStep& step) {
            MustSucceed(hvd_ext_lars_gpu(all, n, &step, space.data, nbytes, nullptr));
          },
          [&](const LambVariable* all, int64_t n, const LambStep& step) {
            MustSucceed(hvd_ext_lamb_gpu(all, n, &step, space.data, nbytes, nullptr));
          },
          [&](const MovedVariable* all, int64_t n, const float* rates) {
            MustSucceed(hvd_ext_move_gpu(all, n, rates, space.data, nbytes, nullptr));
          });
      test::MustBe(seen, test::ExpectedLayerwise(problem));
    }
  }
  return checked;
}

// A step of LARS, and one of LAMB with its two calls, without the norms; `n` variables of the same length. LARS reads
// three and writes two arrays, LAMB reads six and writes four.
void TimeLayerwise(int64_t n, int64_t elements) {
  const int64_t d = n * elements;
  Buffer weights(4 * d), momentum(4 * d), velocity(4 * d), gradient(4 * d), update(4 * d), numbers(4 * n);
  for (const Buffer* buffer : {&momentum, &velocity, &gradient, &update, &numbers}) {
    MUST(cudaMemset(buffer->data, 0, buffer == &numbers ? 4 * n : 4 * d));
  }
  const int64_t nbytes = hvd_ext_layerwise_gpu_workspace(n);
  Buffer space(nbytes);
  const auto at = [elements](const Buffer& buffer, int64_t t) {
    return reinterpret_cast<float*>(buffer.data) + t * elements;
  };
  std::vector<LarsVariable> lars;
  std::vector<LambVariable> lamb;
  std::vector<MovedVariable> moved;
  for (int64_t t = 0; t < n; ++t) {
    float *w = at(weights, t), *m = at(momentum, t), *v = at(velocity, t), *g = at(gradient, t), *u = at(update, t);
    lars.push_back({w, m, g, w, m, elements, 1e-4f});
    lamb.push_back({w, g, m, v, m, v, u, elements, 1e-4f});
    moved.push_back({w, u, w, elements});
  }
  const float* zeros = reinterpret_cast<const float*>(numbers.data);
  const LarsStep lars_step{zeros, zeros, zeros, false};
  const LambStep lamb_step{0.1f, 0.001f, 1e-7f, zeros};
  const std::string about = "\"variables\": " + std::to_string(n);
  PrintTimes(about, weights, d, "lars",
             [&] { MustSucceed(hvd_ext_lars_gpu(lars.data(), n, &lars_step, space.data, nbytes, nullptr)); });
  PrintTimes(about, weights, d, "lamb", [&] {
    MustSucceed(hvd_ext_lamb_gpu(lamb.data(), n, &lamb_step, space.data, nbytes, nullptr));
    MustSucceed(hvd_ext_move_gpu(moved.data(), n, zeros, space.data, nbytes, nullptr));
  });
}

// `n` tensors of the same length in one call; the copy beside it moves twice the bytes that the norms read.
void TimeNorms(int64_t n, int64_t elements) {
  const int64_t d = n * elements;
  Buffer x(4 * d), squares(8 * n);
  std::vector<HvdExtNormsTensor> tensors;
  for (int64_t t = 0; t < n; ++t) tensors.push_back({x.data + 4 * t * elements, elements});
  const int64_t workspace_nbytes = hvd_ext_norms_gpu_workspace(tensors.data(), n);
  Buffer workspace(workspace_nbytes);
  PrintTimes("\"tensors\": " + std::to_string(n), x, d, "norms", [&] {
    const int code = hvd_ext_norms_gpu(0, tensors.data(), n, reinterpret_cast<double*>(squares.data), workspace.data,
                                       workspace_nbytes, nullptr);
    if (code != 0) throw std::runtime_error(hvd_ext_norms_gpu_error());
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  const double limit_s = argc > 2 ? std::atof(argv[2]) : 1e9;
  if (what != "all" && what != "check" && what != "few" && what != "times") {
    std::fprintf(stderr, "argument (%s): must be check, few or times, or be left out\n", what.c_str());
    return 1;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU was found: nothing was checked\n");
    return 2;
  }
  try {
    cudaDeviceProp device;
    MUST(cudaGetDeviceProperties(&device, 0));
    std::printf("{\"device\": \"%s\"}\n", device.name);
    if (what != "times") {
      const std::vector<Making> problems = what == "few" ? FewProblems() : AllProblems();
      const size_t others = CheckNorms(what == "few") + CheckLayerwise(what == "few");
      const size_t checked = Check(problems, limit_s);
      std::printf("{\"checked\": %zu, \"of\": %zu}\n", others + checked, others + problems.size());
      std::fflush(stdout);
    }
    if (what == "all" || what == "times") {
      for (int64_t d : {1 << 18, 1 << 20, 25 << 20, 110 << 20}) {
        for (double density : {0.001, 0.01, 0.1}) Time(d, density);
      }
      // Weights and gradients of ResNet-50 have 322 tensors with 51 million elements; a Transformer's have 220 million.
      for (int64_t elements : {1000, 158000, 700000}) TimeNorms(322, elements);
      TimeNorms(1, 1 << 20);
      for (int64_t elements : {1000, 158000, 700000}) TimeLayerwise(161, elements);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "wrong: %s\n", error.what());
    return 1;
  }
  return 0;
}

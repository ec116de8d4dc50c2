// The engine's device for GPUs over a stand-in for the CUDA runtime: the engines' tests with buckets in its memory, and
// what the device makes of streams, events and memory.
#include <cmath>
#include <future>
#include <random>
#include <thread>

#include "engine/buffer_pool.h"
#include "engine/device_gpu.h"
#include "engines.h"
#include "gpu/cuda_stand_in.h"
#include "hosts.h"
#include "kernels/reduce.h"

namespace hvd_ext::test {
namespace {

namespace stand_in = gpu::stand_in;

std::shared_ptr<Device> MakeDeviceOnGpu() {
  static std::atomic<int> made{0};
  return MakeGpuDevice(++made % 2);
}

void AgainOnGpu(MakeTransports transports, const std::vector<std::string>& beginnings) {
  Again(transports, beginnings, MakeDeviceOnGpu);
}

TEST("gpu: dense calls pass, and leave nothing behind") {
  const std::string before = stand_in::Left();
  AgainOnGpu(MakeThreadTransports, {"engine: ", "parts: "});
  CHECK_EQ(stand_in::Left(), before);
}

// Some of these cut messages off, whose memory is kept for ever.
TEST("gpu: dense channels pass") { AgainOnGpu(MakeThreadTransports, {"channel: "}); }

TEST("gpu: halves pass") { AgainOnGpu(MakeThreadTransports, {"wire: "}); }

TEST("gpu: top-k steps pass") { AgainOnGpu(MakeThreadTransports, {"top-k step: "}); }

TEST("gpu: partial rounds pass") { AgainOnGpu(MakeThreadTransports, {"partial rounds: a "}); }

TEST("gpu: work that is cut off passes") { AgainOnGpu(MakeThreadTransports, {"leave: ", "stop: ", "mismatch: "}); }

TEST("gpu: messages lie in shared memory while there is room, and elsewhere after that") {
  AgainOnGpu(MakeHostTransports<kRoomyArena>, {"channel: "});
  AgainOnGpu(MakeHostTransports<kSmallArena>, {"channel: steps of several buckets"});
}

TEST("gpu: where CUDA shares no memory, messages lie in the host's") {
  stand_in::refuses_handles = true;
  {
    const Over over(MakeHostTransports<kRoomyArena>, MakeDeviceOnGpu);
    const auto transports = MakeHostTransports<kRoomyArena>(2);
    CHECK(!transports[0]->ReachesDevice(1));
    CHECK(transports[0]->MediumTo(1) == Medium::kHostMemory);
    for (const auto& transport : transports) KnownDevices::Take(transport.get());
  }
  AgainOnGpu(MakeHostTransports<kRoomyArena>, {"channel: steps of several buckets"});
  stand_in::refuses_handles = false;
}

TEST("gpu: messages between ranks of a host stay in memory of the GPU") {
  const std::string before = stand_in::Left();
  {
    const Over over(MakeHostTransports<kRoomyArena>, MakeDeviceOnGpu);
    auto transports = MakeHostTransports<kRoomyArena>(2);
    const std::shared_ptr<Device> devices[] = {KnownDevices::Take(transports[0].get()),
                                               KnownDevices::Take(transports[1].get())};
    CHECK(transports[0]->ReachesDevice(1) && transports[1]->ReachesDevice(0));
    CHECK(!transports[0]->ReachesDevice(0));
    CHECK(transports[0]->MediumTo(1) == Medium::kNvlink && transports[0]->MediumTo(0) == Medium::kNone);
    BufferPool pool = BufferPool::Of(devices[0]);
    const Buffer data = pool.Take(5000);
    std::unique_ptr<Request> sent, received;
    CHECK_OK(transports[0]->Send(1, 7, data.data() + 40, 4000, &sent));
    CHECK_OK(transports[1]->Recv(0, 7, nullptr, 4000, &received));
    bool done = false;
    CHECK_OK(transports[1]->Test(received.get(), &done));
    CHECK(done);
    CHECK_EQ(transports[1]->Received(received.get()), data.data() + 40);
    CHECK_OK(transports[0]->Test(sent.get(), &done));
    CHECK(!done);  // the receiver has not read it
    received.reset();
    CHECK_OK(transports[0]->Test(sent.get(), &done));
    CHECK(done);
    sent.reset();
    for (const auto& transport : transports) transport->LeaveDevices();
    for (const auto& transport : transports) transport->Release();
  }
  CHECK_EQ(stand_in::Left(), before);
}

TEST("gpu: a shared block stays allocated after Free until Unshare") {
  const std::string before = stand_in::Left();
  {
    const std::shared_ptr<Device> device = MakeGpuDevice(0);
    const std::string one = stand_in::Left();
    char* data = device->Allocate(100);
    Device::BlockName name;
    int64_t offset = 0;
    CHECK(device->Share(data + 30, &name, &offset));
    CHECK_EQ(offset, 30);
    char plain = 0;
    CHECK(!device->Share(&plain, &name, &offset));
    device->Free(data);
    CHECK(stand_in::Left() != one);
    device->Unshare(name);
    CHECK_EQ(stand_in::Left(), one);
  }
  CHECK_EQ(stand_in::Left(), before);
}

// A device with a buffer of its own memory and one of messages.
struct OnGpu {
  static constexpr int64_t kNbytes = 1 << 14;

  std::shared_ptr<Device> device = MakeGpuDevice(0);
  BufferPool messages{nullptr, device}, pool = BufferPool::Of(device);
  Buffer message = messages.Take(kNbytes), data = pool.Take(kNbytes);
  Queue* const queue = device->queue(1);

  ~OnGpu() {
    stand_in::Break(cudaSuccess);
    stand_in::Hold(false);
  }

  void Await() {
    Until("the end of an operation", [&] { return queue->Done(queue->Last()); });
  }
  void Put(const void* from, int64_t nbytes) {
    std::memcpy(message.data(), from, static_cast<size_t>(nbytes));
    queue->Copy(data.data(), message.data(), nbytes);
    Await();
  }
  std::vector<char> Get(int64_t nbytes) {
    const Buffer out = messages.Take(nbytes);
    queue->Copy(out.data(), data.data(), nbytes);
    Await();
    return {out.data(), out.data() + nbytes};
  }
};

// Some of every kind: small and large numbers, denormal ones, both zeros, infinities and NaN.
std::vector<float> Numbers(int64_t elements, unsigned seed) {
  const float special[] = {0.f, -0.f, 1.f, -1.f, 65504.f, 1e-40f, -3e-8f, 3e38f, INFINITY, -INFINITY, NAN};
  std::mt19937 random(seed);
  std::vector<float> numbers(static_cast<size_t>(elements));
  for (float& number : numbers) {
    number = random() % 5 == 0 ? special[random() % 11]
                               : std::ldexp(static_cast<float>(random()) - 2e9f, static_cast<int>(random() % 40) - 50);
  }
  return numbers;
}

std::vector<char> Elements(DType dtype, int64_t elements, unsigned seed) {
  std::vector<char> bytes(static_cast<size_t>(elements) * SizeOf(dtype));
  const std::vector<float> numbers = Numbers(elements, seed);
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < elements; ++i) {
    char* at = bytes.data() + i * static_cast<int64_t>(SizeOf(dtype));
    const float number = numbers[static_cast<size_t>(i)];
    const double wide = number;
    const Float16 half = ToFloat16(number);
    const BFloat16 bhalf = ToBFloat16(number);
    const uint64_t whole = random() >> random() % 64;
    const void* from = dtype == DType::kFloat32    ? static_cast<const void*>(&number)
                       : dtype == DType::kFloat64  ? static_cast<const void*>(&wide)
                       : dtype == DType::kFloat16  ? static_cast<const void*>(&half)
                       : dtype == DType::kBFloat16 ? static_cast<const void*>(&bhalf)
                                                   : static_cast<const void*>(&whole);
    std::memcpy(at, from, SizeOf(dtype));
  }
  return bytes;
}

// Compares bit for bit; a NaN may have other bits.
void MustBeSame(DType dtype, const std::vector<char>& seen, const std::vector<char>& expected) {
  const size_t width = SizeOf(dtype);
  CHECK_EQ(seen.size(), expected.size());
  for (size_t at = 0; at < seen.size(); at += width) {
    if (std::memcmp(&seen[at], &expected[at], width) == 0) continue;
    const auto is_nan = [&](const std::vector<char>& of) {
      double wide = 0;
      uint16_t bits = 0;
      float number = 0;
      std::memcpy(&bits, &of[at], 2);
      if (dtype == DType::kFloat64) std::memcpy(&wide, &of[at], 8);
      if (dtype == DType::kFloat32) std::memcpy(&number, &of[at], 4);
      if (dtype == DType::kFloat16) number = ToFloat(Float16{bits});
      if (dtype == DType::kBFloat16) number = ToFloat(BFloat16{bits});
      return std::isnan(wide) || std::isnan(number);
    };
    if (is_nan(seen) && is_nan(expected)) continue;
    throw Failure("element " + std::to_string(at / width) + " of " + NameOf(dtype) + " has other bits");
  }
}

constexpr DType kNumbers[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                              DType::kBFloat16, DType::kInt32,   DType::kInt64};
constexpr int64_t kCounts[] = {0, 1, 255, 256, 257, 1000};

TEST("gpu: sums and quotients have the bits of the processor's") {
  OnGpu gpu;
  for (DType dtype : kNumbers) {
    for (int64_t elements : kCounts) {
      const int64_t nbytes = elements * static_cast<int64_t>(SizeOf(dtype));
      const std::vector<char> a = Elements(dtype, elements, 1), b = Elements(dtype, elements, 2);
      for (ReduceOp op : kReduceOps) {
        gpu.Put(a.data(), nbytes);
        std::memcpy(gpu.message.data(), b.data(), b.size());
        gpu.queue->Combine(op, dtype, gpu.data.data(), gpu.message.data(), elements);
        std::vector<char> expected = a;
        Combine(op, dtype, expected.data(), b.data(), elements);
        MustBeSame(dtype, gpu.Get(nbytes), expected);
      }
      for (int64_t divisor : {1, 3, 64}) {
        gpu.Put(a.data(), nbytes);
        gpu.queue->Divide(dtype, gpu.data.data(), divisor, elements);
        std::vector<char> expected = a;
        Divide(dtype, expected.data(), divisor, elements);
        MustBeSame(dtype, gpu.Get(nbytes), expected);
      }
    }
  }
}

TEST("gpu: conversions have the bits of the processor's") {
  OnGpu gpu;
  for (DType wire : {DType::kFloat16, DType::kBFloat16}) {
    for (int64_t elements : kCounts) {
      for (float scale : {1.f, 64.f}) {
        const int64_t nbytes = 4 * elements;
        const std::vector<char> x = Elements(DType::kFloat32, elements, 3), halves = Elements(wire, elements, 4);
        const auto floats = [](std::vector<char>* bytes) { return reinterpret_cast<float*>(bytes->data()); };
        auto* data = reinterpret_cast<float*>(gpu.data.data());
        const auto compare = [&](const auto& on_gpu, const auto& on_host) {
          gpu.Put(x.data(), nbytes);
          std::memcpy(gpu.message.data(), halves.data(), halves.size());
          on_gpu();
          std::vector<char> expected = x;
          on_host(floats(&expected));
          MustBeSame(DType::kFloat32, gpu.Get(nbytes), expected);
        };
        std::vector<char> sent(static_cast<size_t>(2 * elements));
        compare([&] { gpu.queue->Narrow(wire, gpu.message.data(), data, elements, scale); },
                [&](float* to) { Narrow(wire, sent.data(), to, elements, scale); });
        MustBeSame(wire, {gpu.message.data(), gpu.message.data() + 2 * elements}, sent);
        compare([&] { gpu.queue->Widen(wire, data, gpu.message.data(), elements, scale); },
                [&](float* to) { Widen(wire, to, halves.data(), elements, scale); });
        compare([&] { gpu.queue->AddWidened(wire, data, gpu.message.data(), elements, scale); },
                [&](float* to) { AddWidened(wire, to, halves.data(), elements, scale); });
        compare([&] { gpu.queue->Round(wire, data, elements, scale); },
                [&](float* to) { Round(wire, to, elements, scale); });
        for (ReduceOp op : kReduceOps) {
          compare([&] { gpu.queue->CombineWidened(op, wire, data, gpu.message.data(), elements); },
                  [&](float* to) { CombineWidened(op, wire, to, halves.data(), elements); });
        }
      }
    }
  }
}

TEST("gpu: Done says that an operation has ended only when it has, and never waits") {
  OnGpu gpu;
  std::memset(gpu.message.data(), 7, 100);
  stand_in::Hold(true);
  gpu.queue->Copy(gpu.data.data(), gpu.message.data(), 100);
  const int64_t first = gpu.queue->Last();
  gpu.queue->Copy(gpu.message.data() + 200, gpu.data.data(), 100);
  CHECK_EQ(gpu.queue->Last(), first + 1);
  CHECK(!gpu.queue->Done(first));
  stand_in::Hold(false);
  gpu.Await();
  CHECK(gpu.queue->Done(first));
  CHECK_EQ(gpu.message.data()[299], 7);
}

TEST("gpu: memory is freed, and host memory given back, when the operations on it have ended") {
  const std::string before = stand_in::Left();
  for (bool host : {false, true}) {
    OnGpu gpu;
    char* page = static_cast<char*>(::operator new(4096, std::align_val_t{4096}));
    gpu.device->Pin(page, 4096);
    char* memory = gpu.device->Allocate(100);
    stand_in::Hold(true);
    gpu.queue->Copy(memory, page, 100);
    std::future<void> freed = std::async(std::launch::async, [&] {
      if (host) {
        gpu.device->Unpin(page);
      } else {
        gpu.device->Free(memory);
      }
    });
    CHECK(freed.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
    stand_in::Hold(false);
    freed.get();
    CHECK(gpu.queue->Done(gpu.queue->Last()));
    if (host) {
      gpu.device->Free(memory);
    } else {
      gpu.device->Unpin(page);
    }
    ::operator delete(page, std::align_val_t{4096});
  }
  CHECK_EQ(stand_in::Left(), before);
}

TEST("gpu: memory that was freed is not used") {
  OnGpu gpu;
  char* memory = gpu.device->Allocate(100);
  gpu.device->Free(memory);
  for (bool kernel : {false, true}) {
    std::string seen;
    try {
      if (kernel) {
        gpu.queue->Divide(DType::kFloat32, memory, 3, 4);
      } else {
        gpu.queue->Copy(gpu.message.data(), memory, 4);
      }
    } catch (const std::runtime_error& error) {
      seen = error.what();
    }
    CHECK(seen.find("GPU: cuda") == 0);
  }
}

TEST("gpu: host memory that two engines of a process pin stays pinned for the second one") {
  OnGpu gpu, other;
  char* page = static_cast<char*>(::operator new(4096, std::align_val_t{4096}));
  std::memset(page, 3, 4096);
  gpu.device->Pin(page, 4096);
  other.device->Pin(page, 4096);
  gpu.device->Unpin(page);
  other.queue->Copy(other.data.data(), page, 4096);
  other.Await();
  const std::vector<char> seen = other.Get(4096);
  CHECK_EQ(int{seen[4095]}, 3);
  other.device->Unpin(page);
  ::operator delete(page, std::align_val_t{4096});
}

TEST("gpu: where its memory is full, an allocation is refused as on the host, and later operations work") {
  OnGpu gpu;
  stand_in::Limit(1 << 20);
  bool refused = false;
  try {
    gpu.device->Allocate(1 << 21);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  stand_in::Limit(int64_t{1} << 36);
  CHECK(refused);
  gpu.Put("good", 4);
  CHECK_EQ(std::string(gpu.Get(4).data(), 4), "good");
}

TEST("gpu: a GPU that fails, or is not there, is an error with CUDA's words") {
  const auto words_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  CHECK_EQ(words_of([] { MakeGpuDevice(7); }),
           "GPU: cudaSetDevice(gpu): cudaErrorInvalidDevice (the stand-in has no words for it)");
  OnGpu gpu;
  gpu.queue->Copy(gpu.data.data(), gpu.message.data(), 100);
  stand_in::Break(cudaErrorLaunchFailure);
  CHECK(words_of([&] {
          gpu.queue->Combine(ReduceOp::kSum, DType::kFloat32, gpu.data.data(), gpu.message.data(), 4);
        }).find("cudaErrorLaunchFailure") != std::string::npos);
  CHECK(words_of([&] { gpu.queue->Done(gpu.queue->Last()); }).find("an operation: cudaErrorLaunchFailure") !=
        std::string::npos);
}

}  // namespace
}  // namespace hvd_ext::test

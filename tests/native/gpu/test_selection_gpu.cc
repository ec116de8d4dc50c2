// Selections with error feedback on the engine's device for GPUs, by the kernels themselves, which are emulated.
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/device_gpu.h"
#include "harness.h"
#include "kernels/topk.h"

namespace hvd_ext::test {
namespace {

using Floats = std::vector<float>;

struct OnGpu {
  std::shared_ptr<Device> device = MakeGpuDevice(0);
  BufferPool messages{nullptr, device}, pool = BufferPool::Of(device);
  Queue* const queue = device->queue(1);

  void Await() {
    while (!queue->Done(queue->Last())) std::this_thread::yield();
  }
  Buffer Put(const Floats& values) {
    const int64_t nbytes = static_cast<int64_t>(4 * values.size());
    Buffer message = messages.Take(nbytes), data = pool.Take(nbytes);
    std::memcpy(message.data(), values.data(), 4 * values.size());
    queue->Copy(data.data(), message.data(), nbytes);
    Await();
    return data;
  }
  Floats Get(const Buffer& data) {
    const Buffer message = messages.Take(data.nbytes());
    queue->Copy(message.data(), data.data(), data.nbytes());
    Await();
    Floats values(static_cast<size_t>(data.nbytes() / 4));
    std::memcpy(values.data(), message.data(), 4 * values.size());
    return values;
  }
};

Floats Numbers(int64_t elements, unsigned seed) {
  std::mt19937 random(seed);
  Floats numbers(static_cast<size_t>(elements));
  for (float& number : numbers)
    number = std::ldexp(static_cast<float>(random()) - 2e9f, static_cast<int>(random() % 20) - 40);
  return numbers;
}

float* Of(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

TEST("selection on the device: error feedback has the bits of the processor's") {
  OnGpu gpu;
  const int64_t n = 41000;
  const std::vector<TopKSegment> segments = {{0, 36000, 360}, {36000, 0, 0}, {36000, 4000, 3000}, {40000, 1000, 0}};
  for (int kind = 0; kind < 5; ++kind) {
    Floats gradient = Numbers(n, 1);
    if (kind == 4) gradient[40500] = INFINITY;  // of a segment from which nothing is picked
    const Floats residual = Numbers(n, 2), velocity = Numbers(n, 3);
    const bool has_velocity = kind > 0;
    const MomentumCorrection correction{0.9f, /*nesterov=*/kind % 2 == 0, /*masks=*/kind > 1};

    Floats next_residual(residual.size()), next_velocity(residual.size()), values(3360);
    std::vector<int32_t> positions(3360);
    std::vector<int64_t> counts(4);
    ErrorFeedback feedback{gradient.data(), residual.data(), next_residual.data()};
    if (has_velocity) {
      feedback.velocity = velocity.data();
      feedback.next_velocity = next_velocity.data();
      feedback.correction = correction;
    }
    TopKScratch scratch;
    bool not_finite = false;
    TopKErrorFeedback({}, feedback, segments.data(), 4, &scratch, nullptr, counts.data(), positions.data(), false,
                      values.data(), &not_finite);

    const Buffer on_gpu[] = {gpu.Put(gradient), gpu.Put(residual), gpu.Put(next_residual), gpu.Put(velocity),
                             gpu.Put(next_velocity)};
    Selection selection{{}, {Of(on_gpu[0]), Of(on_gpu[1]), Of(on_gpu[2])}, segments};
    if (has_velocity) {
      selection.feedback.velocity = Of(on_gpu[3]);
      selection.feedback.next_velocity = Of(on_gpu[4]);
      selection.feedback.correction = correction;
    }
    const Buffer workspace = gpu.pool.Take(gpu.device->WorkspaceNbytes(selection));
    const Buffer picked = gpu.messages.Take(4 * 3360), picks = gpu.messages.Take(4 * 3360), flag = gpu.messages.Take(4);
    std::vector<int64_t> seen(4, -1);
    gpu.queue->TopKErrorFeedback(selection, nullptr, workspace.data(), seen.data(),
                                 reinterpret_cast<int32_t*>(picked.data()), Of(picks),
                                 reinterpret_cast<int32_t*>(flag.data()));
    CHECK(seen == counts);
    gpu.Await();
    CHECK_EQ(std::memcmp(picked.data(), positions.data(), 4 * 3360), 0);
    CHECK_EQ(std::memcmp(picks.data(), values.data(), 4 * 3360), 0);
    CHECK_EQ(*reinterpret_cast<const int32_t*>(flag.data()) != 0, not_finite);
    CHECK_EQ(not_finite, kind == 4);
    CHECK(gpu.Get(on_gpu[2]) == next_residual);
    if (has_velocity) CHECK(gpu.Get(on_gpu[4]) == next_velocity);
  }
}

TEST("selection on the device: a dense step, and entries that are added, have the bits of the processor's") {
  OnGpu gpu;
  const int64_t n = 1000;
  const Floats gradient = Numbers(n, 4), residual = Numbers(n, 5);
  Floats accumulated(gradient), next_residual(gradient.size(), 1.0f);
  Accumulate({gradient.data(), residual.data(), next_residual.data()}, n, accumulated.data(), nullptr);
  const Buffer data = gpu.Put(gradient), kept = gpu.Put(residual), next = gpu.Put(Floats(gradient.size(), 1.0f));
  gpu.queue->Accumulate({Of(data), Of(kept), Of(next)}, n, Of(data));
  CHECK(gpu.Get(data) == accumulated);
  CHECK(gpu.Get(next) == next_residual);

  const Buffer positions = gpu.messages.Take(4 * 3), values = gpu.messages.Take(4 * 3);
  for (int i = 0; i < 3; ++i) reinterpret_cast<int32_t*>(positions.data())[i] = 70 + 400 * i;
  for (int i = 0; i < 3; ++i) Of(values)[i] = static_cast<float>(i) + 0.5f;
  gpu.queue->AddEntries(Of(data), n, 70, reinterpret_cast<const int32_t*>(positions.data()), Of(values), 3);
  for (size_t i = 0; i < 3; ++i) accumulated[400 * i] += static_cast<float>(i) + 0.5f;
  CHECK(gpu.Get(data) == accumulated);
  gpu.queue->Clear(Of(data) + 10, 4 * 5);
  for (size_t i = 10; i < 15; ++i) accumulated[i] = 0;
  CHECK(gpu.Get(data) == accumulated);
}

}  // namespace
}  // namespace hvd_ext::test

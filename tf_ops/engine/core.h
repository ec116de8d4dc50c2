// What the parts of an engine share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "engine/buffer_pool.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/progress_role.h"
#include "engine/stall.h"
#include "engine/trace.h"
#include "engine/transport.h"

namespace hvd_ext {

constexpr int64_t kCallsLane = 0;  // channel i has lane 1 + i

struct Core {
  Core(std::shared_ptr<Transport> t, const Config& c, int64_t g)
      : transport(std::move(t)),
        config(c),
        generation(g),
        rank(transport->rank()),
        size(transport->size()),
        device(config.device != nullptr ? config.device : HostDevice()),
        messages(transport->arena(), device),
        pool(device->IsHost() ? messages : BufferPool::Of(device)) {}

  // Where the result of a run in `buffer` lies in the host's memory.
  std::shared_ptr<Buffer> ResultOf(const std::shared_ptr<Buffer>& buffer) {
    return device->IsHost() ? buffer : std::make_shared<Buffer>(messages.Take(buffer->nbytes()));
  }
  // Has `write(char* at)` write `nbytes` bytes that belong to `to`, which lies in a buffer of `pool`. They are there
  // when the input that is returned has ended.
  template <typename Write>
  int64_t Fill(char* to, int64_t nbytes, const Write& write) {
    if (device->IsHost()) {
      write(to);
      return 0;
    }
    const Buffer staged = messages.Take(nbytes);
    write(staged.data());
    device->inputs()->Copy(to, staged.data(), nbytes);
    return device->inputs()->Last();
  }

  // For messages: a rank's number, and "rank 2 has shut down: ...".
  int Number(int peer) const { return NumberOf(config.numbers, peer); }
  std::string RankName(int peer) const { return "rank " + std::to_string(Number(peer)); }
  std::string HasLeft(int peer) const { return hvd_ext::HasLeft(Number(peer)); }

  // Everything fails with the first of these after the pass under way.
  void Break(Status status) HVD_EXT_REQUIRES(progress_role) {
    if (broken.ok()) broken = std::move(status);
  }

  const std::shared_ptr<Transport> transport;
  const Config config;
  const int64_t generation;
  const int rank, size;
  const std::shared_ptr<Device> device;
  BufferPool messages, pool;  // host memory that is sent, received and handed out; the device's, for buckets
  Trace trace;
  std::atomic<int64_t> buckets{0}, calls{0};  // that have ended well; that were started

  double now_s HVD_EXT_GUARDED_BY(progress_role) = 0;  // when the pass under way began
  Status broken HVD_EXT_GUARDED_BY(progress_role);
  Status failure HVD_EXT_GUARDED_BY(progress_role);  // everything has failed with it
};

}  // namespace hvd_ext

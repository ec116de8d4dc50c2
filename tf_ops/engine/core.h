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

  // Has `write(char* at)` write the `nbytes` bytes from `offset` on of a bucket's buffer. A run in the buffer starts
  // when they are there.
  template <typename Write>
  void Fill(Buffer* buffer, int64_t offset, int64_t nbytes, const Write& write) {
    if (buffer->OnHost()) return write(buffer->data() + offset);
    const Buffer staged = messages.Take(nbytes);
    write(staged.data());
    CopyIn(buffer, offset, staged.data(), nbytes);
  }

  // Where a run works, and where its result lies: in the host's memory, or where it was made.
  struct Places {
    std::shared_ptr<Buffer> buffer, result;  // the same one where the result stays
  };
  // Of a run in `buffer`, which lies on the device, or in the host's memory. `stays`: so does the result.
  Places PlacesOf(std::shared_ptr<Buffer> buffer, bool stays = false) {
    if (device->IsHost() || (stays && !buffer->OnHost())) return {buffer, buffer};
    const int64_t nbytes = buffer->nbytes();
    if (!buffer->OnHost()) return {std::move(buffer), std::make_shared<Buffer>(messages.Take(nbytes))};
    auto copy = std::make_shared<Buffer>(pool.Take(nbytes));
    CopyIn(copy.get(), 0, buffer->data(), nbytes);
    return {std::move(copy), std::move(buffer)};
  }

  // For messages: a rank's number, and "rank 2 has shut down: ...".
  int Number(int peer) const { return NumberOf(config.numbers, peer); }
  std::string RankName(int peer) const { return "rank " + std::to_string(Number(peer)); }
  std::string HasLeft(int peer) const { return hvd_ext::HasLeft(Number(peer)); }

  // Everything fails with the first of these after the pass under way.
  void Break(Status status) HVD_EXT_REQUIRES(progress_role) {
    if (broken.ok()) broken = std::move(status);
  }

  // Copies to the device; `from` is as for Queue::Copy.
  void CopyIn(Buffer* buffer, int64_t offset, const void* from, int64_t nbytes) {
    device->inputs()->Copy(buffer->data() + offset, from, nbytes);
    buffer->NoteInput(device->inputs()->Last());
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

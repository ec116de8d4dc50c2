// Transports over shared memory between ranks that are threads of one process.
#pragma once

#include "devices.h"
#include "engine/transport.h"
#include "harness.h"
#include "ranks.h"
#include "shm/arena.h"

namespace hvd_ext::test {

// Wraps each transport in one over shared memory; a rank whose arena is null has none. Devices are those of Engines.
inline std::vector<std::shared_ptr<Transport>> ShareMemory(const std::vector<std::shared_ptr<Transport>>& between,
                                                           const std::vector<std::shared_ptr<Arena>>& arenas) {
  std::vector<std::shared_ptr<Transport>> transports(between.size());
  RunThreads(
      static_cast<int>(between.size()),
      [&](int rank) {
        const std::shared_ptr<Device> device = NewDevice();
        CHECK_OK(MakeHostTransport(between[rank], arenas[rank], device, &transports[rank]));
        KnownDevices::Note(transports[rank].get(), device);
      },
      [&] { between[0]->Abort(1); });
  return transports;
}

inline std::vector<std::shared_ptr<Arena>> Arenas(int size, int64_t capacity) {
  std::vector<std::shared_ptr<Arena>> arenas(static_cast<size_t>(size));
  for (std::shared_ptr<Arena>& arena : arenas) CHECK_OK(Arena::Make(capacity, &arena));
  return arenas;
}

// The rings of 8 ranks take 116 kB: with a small arena nearly all messages are in other memory.
constexpr int64_t kRoomyArena = 64 << 20, kSmallArena = 130 << 10;

template <int64_t kCapacity>
std::vector<std::shared_ptr<Transport>> MakeHostTransports(int size) {
  return ShareMemory(MakeThreadTransports(size), Arenas(size, kCapacity));
}

// Damages bytes [begin, end) of the first message to rank 0, which is a card: how a transport starts.
class Liar : public TransportInFront {
 public:
  Liar(std::shared_ptr<Transport> inner, size_t begin, size_t end)
      : TransportInFront(std::move(inner)), begin_(begin), end_(end) {}
  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    if (peer == 0 && !std::exchange(lied_, true)) {
      lie_.assign(static_cast<const char*>(data), static_cast<size_t>(nbytes));
      for (size_t i = begin_; i < end_; ++i) lie_[i] = static_cast<char>(lie_[i] ^ 0x15);
      data = lie_.data();
    }
    return behind()->Send(peer, label, data, nbytes, request);
  }

 private:
  const size_t begin_, end_;
  bool lied_ = false;
  std::string lie_;
};

}  // namespace hvd_ext::test

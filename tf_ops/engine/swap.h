// Blocking exchanges of small values between ranks while a transport is made. They use tag 0, before any other message.
#pragma once

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "engine/transport.h"

namespace hvd_ext {

constexpr int kSwapTag = 0;

inline std::vector<int> OtherRanks(const Transport& transport) {
  std::vector<int> others;
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (rank != transport.rank()) others.push_back(rank);
  }
  return others;
}

// Waits for the end of all requests, and destroys them.
inline Status Await(Transport* transport, std::vector<std::unique_ptr<Request>>* requests) {
  constexpr int kEagerLooks = 1000;
  int looks = 0;
  for (const std::unique_ptr<Request>& request : *requests) {
    for (bool done = false; !done; ++looks) {
      HVD_EXT_RETURN_IF_ERROR(transport->Test(request.get(), &done));
      if (!done && looks > kEagerLooks) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  requests->clear();
  return Status::Ok();
}

// Gives mine[r] to each rank r of `ranks` and gets (*theirs)[r].
template <typename T>
Status Swap(Transport* transport, const std::vector<int>& ranks, const std::vector<T>& mine, std::vector<T>* theirs) {
  std::vector<std::unique_ptr<Request>> requests;
  for (int rank : ranks) {
    T* to = &(*theirs)[static_cast<size_t>(rank)];
    HVD_EXT_RETURN_IF_ERROR(transport->Recv(rank, kSwapTag, to, sizeof(T), &requests.emplace_back()));
  }
  for (int rank : ranks) {
    const T* from = &mine[static_cast<size_t>(rank)];
    HVD_EXT_RETURN_IF_ERROR(transport->Send(rank, kSwapTag, from, sizeof(T), &requests.emplace_back()));
  }
  return Await(transport, &requests);
}

}  // namespace hvd_ext

// Wraps a transport and holds its results back, in an order that depends on a seed, or fails on demand.
#pragma once

#include "engines.h"

namespace hvd_ext::test {

class SlowTransport : public TransportInFront {
 public:
  // Each message is reported as done after up to `most` calls of Test.
  SlowTransport(std::shared_ptr<Transport> inner, uint32_t seed, uint32_t most)
      : TransportInFront(std::move(inner)), state_(seed * 2654435761u + 1), most_(most) {}

  std::atomic<bool> broken{false};  // calls of Test fail from now on

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    auto late = NewLate();
    HVD_EXT_RETURN_IF_ERROR(behind()->Send(peer, label, data, nbytes, &late->inner));
    *request = std::move(late);
    return Status::Ok();
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    auto late = NewLate();
    HVD_EXT_RETURN_IF_ERROR(behind()->Recv(peer, label, data, nbytes, &late->inner));
    *request = std::move(late);
    return Status::Ok();
  }
  Status Test(Request* request, bool* done) override {
    if (broken) return Communication("the cable is cut");
    auto* late = static_cast<Late*>(request);
    HVD_EXT_RETURN_IF_ERROR(behind()->Test(late->inner.get(), done));
    if (*done && late->tests > 0) {
      --late->tests;
      *done = false;
    }
    return Status::Ok();
  }

 private:
  struct Late : Request {
    std::unique_ptr<Request> inner;
    uint32_t tests = 0;
  };

  std::unique_ptr<Late> NewLate() {
    auto late = std::make_unique<Late>();
    state_ = state_ * 1664525u + 1013904223u;
    late->tests = most_ == 0 ? 0 : (state_ >> 16) % (most_ + 1);
    return late;
  }

  uint32_t state_;
  uint32_t most_;
};

// Engines over transports that a test can slow down or break.
struct SlowJob {
  std::vector<std::shared_ptr<Transport>> inner;
  std::vector<std::shared_ptr<SlowTransport>> transports;
  std::vector<std::shared_ptr<Engine>> engines;

  SlowJob(const Config& config, uint32_t seed, const std::vector<uint32_t>& most)
      : inner(MakeThreadTransports(static_cast<int>(most.size()))) {
    for (size_t rank = 0; rank < most.size(); ++rank) {
      transports.push_back(
          std::make_shared<SlowTransport>(inner[rank], seed * 100 + static_cast<uint32_t>(rank), most[rank]));
      engines.push_back(StartEngine(transports[rank], config));
    }
  }
  void Each(const std::function<void(int, Engine*)>& rank_main) {
    RunThreads(
        static_cast<int>(engines.size()), [&](int rank) { rank_main(rank, engines[rank].get()); },
        [&] { inner[0]->Abort(1); });
  }
};

}  // namespace hvd_ext::test

// Wraps a transport and holds its results back, in an order that depends on a seed, or fails on demand.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "engine/transport.h"

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

}  // namespace hvd_ext::test

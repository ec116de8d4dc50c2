// A transport over another that holds results back, in an order that changes with a seed, or fails on demand.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "engine/transport.h"

namespace hvd_ext::test {

class SlowTransport : public Transport {
 public:
  // Each message is reported done up to `most` tests late.
  SlowTransport(std::shared_ptr<Transport> inner, uint32_t seed, uint32_t most)
      : inner_(std::move(inner)), state_(seed * 2654435761u + 1), most_(most) {}

  std::atomic<bool> broken{false};  // tests of messages fail from now on

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    auto late = NewLate();
    HVD_EXT_RETURN_IF_ERROR(inner_->Send(peer, label, data, nbytes, &late->inner));
    *request = std::move(late);
    return Status::Ok();
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    auto late = NewLate();
    HVD_EXT_RETURN_IF_ERROR(inner_->Recv(peer, label, data, nbytes, &late->inner));
    *request = std::move(late);
    return Status::Ok();
  }
  Status Test(Request* request, bool* done) override {
    if (broken) return Communication("the cable is cut");
    auto* late = static_cast<Late*>(request);
    HVD_EXT_RETURN_IF_ERROR(inner_->Test(late->inner.get(), done));
    if (*done && late->tests > 0) {
      --late->tests;
      *done = false;
    }
    return Status::Ok();
  }
  void NameBy(Names names) override { inner_->NameBy(std::move(names)); }
  Status SendControl(int peer, std::string message) override { return inner_->SendControl(peer, std::move(message)); }
  Status ReceiveControl(int* peer, std::string* message) override { return inner_->ReceiveControl(peer, message); }
  bool ControlPending() override { return inner_->ControlPending(); }
  void Abort(int code) override { inner_->Abort(code); }
  void Close() override { inner_->Close(); }

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

  std::shared_ptr<Transport> inner_;
  uint32_t state_;
  uint32_t most_;
};

}  // namespace hvd_ext::test

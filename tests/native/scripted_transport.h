// A transport that records what is posted on rank 0 of 4: the test says what arrives, and when a message ends.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/transport.h"
#include "harness.h"

namespace hvd_ext::test {

class ScriptedTransport : public Transport {
 public:
  struct Posted {
    bool sends;
    int peer, tag;
    int64_t nbytes;
    void* data;
    bool done = false;
  };
  std::vector<std::shared_ptr<Posted>> posted;
  Status error;

  // Ends a message; a receive gets these bytes, of which there must be as many as it has room for.
  void End(size_t i, const void* bytes = nullptr, size_t nbytes = 0) {
    CHECK(bytes == nullptr || static_cast<int64_t>(nbytes) == posted.at(i)->nbytes);
    if (bytes != nullptr) std::memcpy(posted.at(i)->data, bytes, nbytes);
    posted.at(i)->done = true;
  }

  int rank() const override { return 0; }
  int size() const override { return 4; }
  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return Post({true, peer, label.tag, nbytes, const_cast<void*>(data)}, request);
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return Post({false, peer, label.tag, nbytes, data}, request);
  }
  Status Test(Request* request, bool* done) override {
    *done = static_cast<ScriptedRequest*>(request)->posted->done;
    return error;
  }
  Status SendControl(int, std::string) override { return Status::Ok(); }
  Status ReceiveControl(int*, std::string*) override { return Status::Ok(); }
  bool ControlPending() override { return false; }
  void Abort(int) override {}
  void Close() override {}

 private:
  struct ScriptedRequest : Request {
    std::shared_ptr<Posted> posted;
  };
  Status Post(const Posted& what, std::unique_ptr<Request>* request) {
    auto made = std::make_unique<ScriptedRequest>();
    made->posted = std::make_shared<Posted>(what);
    posted.push_back(made->posted);
    *request = std::move(made);
    return error;
  }
};

}  // namespace hvd_ext::test

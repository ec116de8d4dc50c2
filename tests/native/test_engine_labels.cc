// A rank that counts runs or segments differently from the others: no call gets another call's data, and all ranks fail
// with the names of the two calls that met.
#include <set>

#include "engines.h"
#include "hosts.h"

namespace hvd_ext::test {
namespace {

using Change = Label (*)(const Label&);

// Changes the labels of all messages of this rank after the first `right` ones.
class Miscounting : public TransportInFront {
 public:
  Miscounting(std::shared_ptr<Transport> inner, int right, Change change)
      : TransportInFront(std::move(inner)), right_(right), change_(change) {}

  Status Send(int peer, Label label, const void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return behind()->Send(peer, Counted(label), data, nbytes, request);
  }
  Status Recv(int peer, Label label, void* data, int64_t nbytes, std::unique_ptr<Request>* request) override {
    return behind()->Recv(peer, Counted(label), data, nbytes, request);
  }
  bool IsZeroCopy(int peer) const override { return behind()->IsZeroCopy(peer); }
  const char* Received(const Request* request) const override { return behind()->Received(request); }
  std::shared_ptr<Arena> arena() const override { return behind()->arena(); }
  Doorbell* doorbell() override { return behind()->doorbell(); }
  bool Rings() const override { return behind()->Rings(); }

 private:
  Label Counted(const Label& label) const { return label.run < right_ ? label : change_(label); }

  const uint32_t right_;
  const Change change_;
};

constexpr int kSize = 3, kRight = 3, kCalls = 8;
constexpr int64_t kWindow = 4;

// Rank 1 miscounts from the fourth call on, while many calls are under way. `shared`: the ranks share memory.
template <Change change, bool shared>
Transports OneMiscounts(int size) {
  auto transports = shared ? MakeHostTransports<kRoomyArena>(size) : MakeThreadTransports(size);
  transports[1] = std::make_shared<Miscounting>(transports[1], kRight, change);
  return transports;
}

void AllFailWithBothNames(MakeTransports make) {
  const Over over(make);
  Config config = QuickConfig();
  config.window = kWindow;
  config.stall_fatal_s = 30;
  std::vector<std::string> words(kSize);
  OnEngines(kSize, config, [&](int rank, Engine* engine) {
    const int64_t plan = AddPlan(engine, RingAllreduce(rank, kSize));
    std::vector<std::future<Result>> calls;
    for (int i = 0; i < kCalls; ++i) {
      // All calls have one length, so that a wrong length cannot reveal the fault.
      const CallSpec spec = AllreduceSpec("call" + std::to_string(i), plan, 3000);
      if (i < kRight) CheckAllreduce(engine, spec, i);
      if (i >= kRight) calls.push_back(StartAllreduce(engine, spec, i));
    }
    for (std::future<Result>& call : calls) {
      Result result = Await(std::move(call), "a call");
      if (!result.status.ok()) words[rank] = result.status.message;
    }
  });
  for (const std::string& word : words) {
    CHECK(word.find("the ranks have counted their messages differently") != std::string::npos);
    // A call that has not begun on the rank that says so is known to it by its number only.
    std::set<std::string> runs;
    for (size_t at = 0; (at = word.find(" of lane 0", at)) != std::string::npos; ++at) {
      const size_t begin = word.rfind("run ", at);
      runs.insert(word.substr(begin, at - begin));
    }
    CHECK_EQ(runs.size(), size_t{2});
    CHECK(word.find("allreduce 'call") != std::string::npos);
  }
}

// Messages have the tags of the call before, as if the rank counted no segment where the others count one.
Label OneSegmentLess(const Label& label) {
  const int64_t lane = label.tag / kWindow, slot = label.tag % kWindow;
  Label shifted = label;
  shifted.tag = static_cast<int>(lane * kWindow + (slot + kWindow - 1) % kWindow);
  return shifted;
}

Label OneRunLess(const Label& label) { return Label(label.tag, int64_t{label.run} - 1, label.segment); }

TEST("labels: a rank that has counted a segment, or a run, less gets no other data, and all ranks say whose it was") {
  AllFailWithBothNames(OneMiscounts<OneSegmentLess, false>);
  AllFailWithBothNames(OneMiscounts<OneSegmentLess, true>);
  AllFailWithBothNames(OneMiscounts<OneRunLess, true>);
}

}  // namespace
}  // namespace hvd_ext::test

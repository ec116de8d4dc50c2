// Engines whose buckets lie in memory that plain loads and stores do not reach, and what the device that finds missing
// copies and waits finds.
#include "engine/buffer_pool.h"
#include "engine/error_feedback.h"
#include "engines.h"
#include "far_device.h"
#include "hosts.h"

namespace hvd_ext::test {
namespace {

void AgainFar(MakeTransports transports, const std::vector<std::string>& beginnings) {
  if (IsSanitized()) return;  // the same tests run on the stand-in for a GPU, and this device finds what it finds
  FarDevice::TakeErrors();
  Again(transports, beginnings, MakeFarDevice);
  const std::string errors = FarDevice::TakeErrors();
  if (!errors.empty()) throw Failure(errors);
}

TEST("far device: dense calls pass") { AgainFar(MakeThreadTransports, {"engine: ", "parts: "}); }

TEST("far device: dense channels pass") { AgainFar(MakeThreadTransports, {"channel: "}); }

TEST("far device: halves pass") { AgainFar(MakeThreadTransports, {"wire: "}); }

TEST("far device: top-k steps pass") { AgainFar(MakeThreadTransports, {"top-k step: ", "sparse run: "}); }

TEST("far device: the residual lies on the device where all rows of the plan work there, and else on the host") {
  const FarDevice device(1);
  SparseSpec spec;
  const auto plan_of = [](const std::vector<Opcode>& opcodes) {
    Plan plan{};
    for (Opcode opcode : opcodes) plan.rows.push_back({0, opcode, 0, 0, 1});
    return plan;
  };
  const Plan plan = plan_of({Opcode::SELECT, Opcode::SEND_SPARSE, Opcode::CLEAR, Opcode::SCATTER_ADD, Opcode::PACK});
  CHECK(KeepsFeedback(device, spec, plan));
  CHECK(!KeepsFeedback(device, spec, plan_of({Opcode::SELECT, Opcode::MERGE})));
  CHECK(!KeepsFeedback(device, spec, plan_of({Opcode::SELECT, Opcode::RESELECT})));
  spec.selector = Selector::kRandom;
  CHECK(!KeepsFeedback(device, spec, plan));
  CHECK(KeepsFeedback(*HostDevice(), spec, plan));
  spec = {};
  spec.codec = "sign";
  CHECK(!KeepsFeedback(device, spec, plan));
}

TEST("far device: partial rounds pass") { AgainFar(MakeThreadTransports, {"partial rounds: ", "partial: "}); }

TEST("far device: work that is cut off leaves no memory in use") {
  AgainFar(MakeThreadTransports, {"leave: ", "stop: ", "mismatch: "});
}

TEST("far device: messages lie in shared memory while there is room, and elsewhere after that") {
  AgainFar(MakeHostTransports<kRoomyArena>, {"channel: ", "top-k step: messages"});
  AgainFar(MakeHostTransports<kSmallArena>, {"channel: steps of several buckets"});
}

// A device with a buffer of its own memory and one of messages.
struct Far {
  std::shared_ptr<FarDevice> device = std::make_shared<FarDevice>(1);
  BufferPool messages{nullptr, device}, pool = BufferPool::Of(device);
  Buffer message = messages.Take(4000), data = pool.Take(4000);

  ~Far() {
    device->Hold(false);
    FarDevice::TakeErrors();
  }

  Queue* queue(int number) { return device->queue(number); }
  void Fill(int number) {
    std::memset(message.data(), 1, 4000);
    queue(number)->Copy(data.data(), message.data(), 4000);
  }
  void Await(int number) {
    Until("the end of an operation", [&] { return queue(number)->Done(queue(number)->Last()); });
  }
  static void Refuses(const std::string& words, const std::function<void()>& call) {
    std::string seen;
    try {
      call();
    } catch (const std::runtime_error& error) {
      seen = error.what();
    }
    if (seen.find(words) == std::string::npos)
      throw Failure("must be refused with '" + words + "', got '" + seen + "'");
  }
};

TEST("far device: operations end later, in the order of their queue, and their results are those of the host") {
  Far far;
  far.device->Hold(true);
  far.Fill(1);
  std::vector<float> sum(1000), ones(1000);
  std::memcpy(ones.data(), far.message.data(), 4000);
  far.queue(1)->Combine(ReduceOp::kSum, DType::kFloat32, far.data.data(), far.message.data(), 1000);
  Buffer out = far.messages.Take(4000);
  far.queue(1)->Copy(out.data(), far.data.data(), 4000);
  CHECK_EQ(out.data()[3999], FarDevice::kPoison);
  CHECK(!far.queue(1)->Done(1));
  far.device->Hold(false);
  far.Await(1);
  std::memcpy(sum.data(), out.data(), 4000);
  for (size_t i = 0; i < 1000; ++i) CHECK_EQ(sum[i], 2 * ones[i]);
}

TEST("far device: an operation on memory that another queue uses is refused until that is known to have ended") {
  Far far;
  far.Fill(1);
  Buffer out = far.messages.Take(4000);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // it has ended, but no call of Done has said so
  Far::Refuses("queue 2 uses memory that operation 1 of queue 1 uses",
               [&] { far.queue(2)->Copy(out.data(), far.data.data(), 4000); });
  Far again;
  again.Fill(1);
  again.Await(1);
  again.queue(2)->Copy(again.message.data(), again.data.data(), 4000);
  again.Await(2);
}

TEST("far device: a read of what was not written, or is forgotten, is refused") {
  Far far;
  Far::Refuses("read before it is written", [&] { far.queue(1)->Copy(far.message.data(), far.data.data(), 4000); });
  Far again;
  again.Fill(1);
  again.Await(1);
  again.data = Buffer();
  again.data = again.pool.Take(4000);
  Far::Refuses("read before it is written", [&] { again.queue(1)->Copy(again.message.data(), again.data.data(), 4); });
}

TEST("far device: host memory that changes before it is read is found") {
  Far far;
  far.device->Hold(true);
  far.Fill(1);
  far.message.data()[7] = 2;
  far.device->Hold(false);
  Far::Refuses("host memory was changed", [&] { far.Await(1); });
}

TEST("far device: memory that is neither allocated nor pinned is refused") {
  Far far;
  char plain[8] = "";
  Far::Refuses("not pinned", [&] { far.queue(1)->Copy(far.data.data(), plain, 8); });
  Far again;
  Far::Refuses("not allocated", [&] { again.queue(1)->Copy(again.data.data() + 4096, again.message.data(), 4000); });
}

// Two devices, of which the second reaches the first one's buffer.
struct FarPair {
  Far owner, reader;
  Device::BlockName name;
  char* reached = nullptr;

  FarPair() {
    owner.Fill(1);
    owner.Await(1);
    int64_t offset = 0;
    CHECK(owner.device->Share(owner.data.data(), &name, &offset));
    reached = reader.device->Reach(name);
  }
  void Read() { reader.queue(1)->Copy(reader.data.data(), reached, 4000); }
};

TEST("far device: an operation reads memory of a device that was reached") {
  FarPair pair;
  pair.Read();
  pair.reader.queue(1)->Copy(pair.reader.message.data(), pair.reader.data.data(), 4000);
  pair.reader.Await(1);
  CHECK_EQ(pair.reader.message.data()[3999], 1);
  pair.owner.Fill(1);
  pair.reader.device->Leave(pair.reached);
  pair.owner.Await(1);
  pair.owner.device->Unshare(pair.name);
  CHECK_EQ(FarDevice::TakeErrors(), "");
}

TEST("far device: memory that another device still reads is neither written nor given back") {
  FarPair pair;
  pair.Read();
  Far::Refuses("written that another device reads", [&] { pair.owner.Fill(2); });
  pair.owner.data = Buffer();
  CHECK(FarDevice::TakeErrors().find("given back that another device reads") != std::string::npos);
}

TEST("far device: memory of another device is refused that was not reached, or is not written yet") {
  FarPair pair;
  pair.reader.device->Leave(pair.reached);
  Far::Refuses("was not reached", [&] { pair.Read(); });
  FarPair again;
  again.owner.Fill(1);
  Far::Refuses("not known to have ended", [&] { again.Read(); });
  again.owner.device->Unshare(again.name);
  CHECK(FarDevice::TakeErrors().find("that another device reaches") != std::string::npos);
}

TEST("far device: a pool hands memory out again when the operations of all queues on it have ended") {
  for (int number : {0, 4}) {
    Far far;
    const char* first = far.message.data();
    far.device->Hold(true);
    far.Fill(number);
    far.message = Buffer();
    CHECK(far.messages.Take(4000).data() != first);
    far.device->Hold(false);
    far.Await(number);
    Buffer one = far.messages.Take(4000), two = far.messages.Take(4000);
    CHECK(one.data() == first || two.data() == first);
    CHECK_EQ(far.messages.allocations(), 2);
  }
}

}  // namespace
}  // namespace hvd_ext::test

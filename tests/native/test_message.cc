// The bytes of control messages.
#include <optional>
#include <tuple>
#include <variant>

#include "engine/message.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

const std::string kText("a\0b", 3);

CallAnnouncement Announced() {
  CallAnnouncement m;
  m.id = -5;
  m.name = "x";
  m.kind = Kind::kAlltoall;
  m.dtype = DType::kBFloat16;
  m.op = ReduceOp::kMax;
  m.root = 3;
  m.plan_digest = int64_t{1} << 60;
  m.segment_nbytes = 1 << 20;
  m.wire = DType::kFloat16;
  m.counted = true;
  m.shape = {1, -2, 7};
  m.splits = std::vector<int64_t>{};
  m.signature = "sum\nfactor 2";
  m.users_dtype = "bool";
  m.payload = std::string(100000, 'x');
  return m;
}

CallAnnouncement Refusing() {
  CallAnnouncement m;
  m.name = "x";
  m.refusal = kText;
  return m;
}

LaneReport Report() {
  LaneReport report;
  report.state = LaneReport::kNotBegun;
  report.runs = 4;
  report.missing = 7;
  report.names = {"", kText};
  return report;
}

StepReached Reached() {
  StepReached reached;
  reached.lane = 3;
  reached.runs = 17;
  reached.density = 0.125;
  reached.momentum = 0.5;
  reached.ended = reached.committed = reached.committed_before = true;
  return reached;
}

ZeroCall Zeros() {
  ZeroCall zeros;
  static_cast<CallTerms&>(zeros) = Announced();
  return zeros;
}

// At least one message of every type, with something in every field.
const std::vector<ControlMessage>& Messages() {
  static const std::vector<ControlMessage> messages = {Announced(),
                                                       Refusing(),
                                                       CallStart{6, {3, 0, int64_t{1} << 40}, {"", kText}},
                                                       CallRefusal{7, Mismatch(kText)},
                                                       CallKnown{8},
                                                       LaneFailed{2, Communication("gone")},
                                                       LaneClosed{3, 12},
                                                       RoundArrival{3, 12, true, false},
                                                       RoundArrival{3, 0, false, true},
                                                       RoundsOpen{3, 13, true},
                                                       StallQuestion{1, 9, 60.125, "bucket 1"},
                                                       StallProbe{1, 5},
                                                       StallReport{5, Report()},
                                                       StallVerdict{1, "rank 2"},
                                                       RankJoined{{5, -6}, kText},
                                                       OthersJoined{},
                                                       Reached(),
                                                       Zeros(),
                                                       AllJoined{2, {"", kText}},
                                                       EngineFailed{Internal("broken")},
                                                       ShuttingDown{}};
  return messages;
}

// Lists the fields of a message in the order of its Fields.
class Listed {
 public:
  template <typename T>
  static std::string Of(const T& message) {
    Listed listed;
    std::apply(listed, message.Fields());
    return listed.text_;
  }
  template <typename... Values>
  void operator()(const Values&... values) {
    (Add(values), ...);
  }

 private:
  template <typename T>
  void Add(const T& value) {
    text_ += std::to_string(static_cast<int64_t>(value)) + " ";
  }
  void Add(double value) { text_ += std::to_string(value) + " "; }
  void Add(const std::string& value) { text_ += std::to_string(value.size()) + ":" + value + " "; }
  void Add(const Status& status) { (*this)(status.code, status.message); }
  template <typename T>
  void Add(const std::vector<T>& values) {
    Add(values.size());
    for (const T& value : values) Add(value);
  }
  template <typename T>
  void Add(const std::optional<T>& value) {
    Add(value.has_value());
    if (value) Add(*value);
  }

  std::string text_;
};

TEST("messages: every field of every message comes back as it was") {
  std::vector<bool> seen(std::variant_size_v<ControlMessage>);
  for (const ControlMessage& message : Messages()) {
    ControlMessage read;
    CHECK_OK(Decode(Encode(message), &read));
    CHECK_EQ(read.index(), message.index());
    seen[message.index()] = true;
    auto list = [](const auto& m) { return Listed::Of(m); };
    CHECK(std::visit(list, read) == std::visit(list, message));
  }
  for (size_t type = 0; type < seen.size(); ++type) CHECK_EQ(seen[type] ? type : 99, type);
}

TEST("messages: a message that is cut short or too long is refused, whatever its type") {
  for (const ControlMessage& message : Messages()) {
    std::string bytes = Encode(message);
    ControlMessage read;
    size_t step = bytes.size() > 1000 ? 977 : 1;
    for (size_t n = 0; n < bytes.size(); n += step) {
      CHECK_FAILS(Decode(bytes.substr(0, n), &read), Code::kInternal, "do all ranks run the same build");
    }
    CHECK_FAILS(Decode(bytes + "x", &read), Code::kInternal, "cut short or too long");
  }
}

TEST("messages: a type, a kind or a count that cannot be is refused, and so is a tensor without its rows") {
  ControlMessage read;
  for (int64_t type : {int64_t{-1}, static_cast<int64_t>(std::variant_size_v<ControlMessage>), int64_t{1} << 40}) {
    std::string bytes(reinterpret_cast<const char*>(&type), sizeof(type));
    CHECK(!Decode(bytes, &read).ok());
  }
  CallAnnouncement announced = Announced();
  announced.shape.clear();
  CHECK(!Decode(Encode(announced), &read).ok());
  announced.kind = static_cast<Kind>(7);
  CHECK(!Decode(Encode(announced), &read).ok());
  std::string huge = Encode(CallStart{1, {}, {}});
  huge[huge.size() - 9] = 0x7f;  // more rows than any memory holds
  CHECK(!Decode(huge, &read).ok());
}

}  // namespace
}  // namespace hvd_ext::test

#include "engine/coordinator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/stall.h"

namespace hvd_ext {
namespace {

// Where Announce puts what.
enum Field : size_t { kKind, kDType, kOp, kRoot, kPlanDigest, kSegmentNbytes, kWire, kShape };

constexpr int64_t kNoWire = -1;

Kind KindOf(const Message& a) { return static_cast<Kind>(a.numbers[kKind]); }

const char* NameOfKind(Kind kind) {
  switch (kind) {
    case Kind::kAllreduce:
      return "allreduce";
    case Kind::kAllgather:
      return "allgather";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kExchange:
      return "exchange";
    case Kind::kReducescatter:
      return "reducescatter";
    case Kind::kAlltoall:
      return "alltoall";
  }
  return "unknown call";
}

std::vector<int64_t> ShapeOf(const Message& a) { return {a.numbers.begin() + kShape, a.numbers.end()}; }

bool AnyFirstDimension(Kind kind) { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }

std::string ListOf(const std::vector<int64_t>& numbers) {
  std::string text;
  for (int64_t n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

// The rows that a rank sends to each rank (alltoall): its splits, or equal parts. Refuses what does not add up; all
// ranks hear of it, as they wait for this one.
Status RowsOf(int number, const Message& a, int size, std::vector<int64_t>* rows) {
  int64_t all = a.numbers[kShape];
  std::string who = NameOfCall(KindOf(a), a.text) + ": rank " + std::to_string(number) + " has ";
  std::string ranks = std::to_string(size) + " ranks";
  if (a.texts.size() < 2) {
    if (all % size == 0) {
      rows->insert(rows->end(), static_cast<size_t>(size), all / size);
      return Status::Ok();
    }
    return Invalid(who + std::to_string(all) + " rows and no splits; without splits the rows must divide evenly over " +
                   ranks);
  }
  std::vector<int64_t> splits(a.texts[1].size() / sizeof(int64_t));
  if (!splits.empty()) std::memcpy(splits.data(), a.texts[1].data(), splits.size() * sizeof(int64_t));
  int64_t left = all;
  bool fit = static_cast<int>(splits.size()) == size;
  for (int64_t n : splits) {
    fit = fit && n >= 0 && n <= left;
    if (fit) left -= n;
  }
  if (!fit || left != 0) {
    return Invalid(who + "splits " + ListOf(splits) + " for " + std::to_string(all) + " rows; splits must be " +
                   std::to_string(size) + " numbers, 0 or more, one for each of the " + ranks +
                   ", that add up to the rows");
  }
  rows->insert(rows->end(), splits.begin(), splits.end());
  return Status::Ok();
}

// "float32[3, 4]"
std::string TensorOf(const Message& a) {
  return std::string(NameOf(static_cast<DType>(a.numbers[kDType]))) + ListOf(ShapeOf(a));
}

bool SameTensor(const Message& a, const Message& b) {
  std::vector<int64_t> shape_a = ShapeOf(a), shape_b = ShapeOf(b);
  if (a.numbers[kDType] != b.numbers[kDType] || shape_a.size() != shape_b.size()) return false;
  if (AnyFirstDimension(KindOf(a))) shape_a[0] = shape_b[0];
  return shape_a == shape_b;
}

// What `a` (of `rank`) has that `b` (of rank 0) has not; empty if they agree.
std::string Difference(int rank, const Message& a, const Message& b, const std::vector<int>& numbers) {
  auto differ = [&](const std::string& mine, const std::string& first, const std::string& rule) {
    return "rank " + std::to_string(NumberOf(numbers, rank)) + " has " + mine + ", rank " +
           std::to_string(NumberOf(numbers, 0)) + " has " + first + "; " + rule;
  };
  if (a.numbers[kKind] != b.numbers[kKind]) {
    return differ(NameOfKind(KindOf(a)), NameOfKind(KindOf(b)), "one name must mean the same collective on all ranks");
  }
  if (!SameTensor(a, b)) {
    return differ(TensorOf(a), TensorOf(b),
                  AnyFirstDimension(KindOf(a)) ? "all ranks must give one dtype and one shape, except for dimension 0"
                                               : "all ranks must give one dtype and one shape");
  }
  if (a.numbers[kOp] != b.numbers[kOp]) {
    auto name = [](const Message& m) {
      return m.numbers[kOp] == static_cast<int64_t>(ReduceOp::kSum) ? "sum" : "average";
    };
    return differ(std::string("op ") + name(a), std::string("op ") + name(b), "all ranks must give one op");
  }
  if (a.numbers[kRoot] != b.numbers[kRoot]) {
    auto name = [&](const Message& m) {
      return "root rank " + std::to_string(NumberOf(numbers, static_cast<int>(m.numbers[kRoot])));
    };
    return differ(name(a), name(b), "all ranks must name one root rank");
  }
  if (a.numbers[kWire] != b.numbers[kWire]) {
    auto name = [](const Message& m) {
      int64_t wire = m.numbers[kWire];
      return std::string(wire == kNoWire ? "none" : NameOf(static_cast<DType>(wire)));
    };
    return differ("compression " + name(a), "compression " + name(b), "all ranks must give one compression");
  }
  for (Field field : {kPlanDigest, kSegmentNbytes}) {
    std::string word = field == kPlanDigest ? "plan " : "segments of bytes ";
    if (a.numbers[field] != b.numbers[field]) {
      return differ(word + std::to_string(a.numbers[field]), word + std::to_string(b.numbers[field]),
                    "all ranks must use one algorithm and one topology");
    }
  }
  return "";
}

}  // namespace

Message Announce(int64_t id, const CallSpec& spec, std::string payload) {
  Message message;
  message.type = MessageType::kAnnounce;
  message.id = id;
  message.text = spec.name;
  message.numbers = {static_cast<int64_t>(spec.kind),
                     static_cast<int64_t>(spec.dtype),
                     static_cast<int64_t>(spec.op),
                     spec.root,
                     spec.plan_digest,
                     spec.segment_nbytes,
                     spec.wire ? static_cast<int64_t>(*spec.wire) : kNoWire};
  message.numbers.insert(message.numbers.end(), spec.shape.begin(), spec.shape.end());
  message.texts.push_back(std::move(payload));
  if (spec.splits) {
    message.texts.emplace_back(reinterpret_cast<const char*>(spec.splits->data()),
                               spec.splits->size() * sizeof(int64_t));
  }
  return message;
}

std::string NameOfCall(Kind kind, const std::string& name) { return std::string(NameOfKind(kind)) + " '" + name + "'"; }

Coordinator::Coordinator(int size, std::vector<int> numbers) : size_(size), numbers_(std::move(numbers)) {}

int Coordinator::Number(int rank) const { return NumberOf(numbers_, rank); }

void Coordinator::Receive(int rank, Message announcement, double now_s, std::vector<Outgoing>* out) {
  std::string name = announcement.text;
  std::deque<Entry>& entries = entries_[name];
  size_t r = static_cast<size_t>(rank);
  auto entry = std::find_if(entries.begin(), entries.end(), [r](const Entry& e) { return !e.here[r]; });
  if (entry == entries.end()) {
    entries.emplace_back();
    entry = std::prev(entries.end());
    entry->announcements.resize(static_cast<size_t>(size_));
    entry->here.resize(static_cast<size_t>(size_));
    entry->since_s = now_s;
    ++waiting_;
  }
  entry->announcements[r] = std::move(announcement);
  entry->here[r] = 1;
  ++entry->count;
  if (gone_ < 0 && entry->count < size_) return;
  if (gone_ >= 0) {
    Refuse(*entry, Gone(*entry), out);
  } else {
    Finish(*entry, out);
  }
  entries.erase(entry);
  --waiting_;
  if (entries.empty()) entries_.erase(name);
}

void Coordinator::Finish(const Entry& entry, std::vector<Outgoing>* out) const {
  Message start;
  start.type = MessageType::kStart;
  Kind kind = KindOf(entry.announcements[0]);
  Status status = Compare(entry);
  for (int rank = 0; status.ok() && kind == Kind::kAlltoall && rank < size_; ++rank) {
    status = RowsOf(Number(rank), entry.announcements[static_cast<size_t>(rank)], size_, &start.numbers);
  }
  if (!status.ok()) {
    Refuse(entry, status, out);
    return;
  }
  for (const Message& a : entry.announcements) {
    if (kind == Kind::kAllgather) start.numbers.push_back(a.numbers[kShape]);
    if (kind == Kind::kExchange) start.texts.push_back(a.texts[0]);
  }
  for (int rank = 0; rank < size_; ++rank) {
    start.id = entry.announcements[static_cast<size_t>(rank)].id;
    out->push_back({rank, start});
  }
}

Status Coordinator::Compare(const Entry& entry) const {
  for (const Message& a : entry.announcements) {
    if (a.code == Code::kOk) continue;
    auto made = std::find_if(entry.announcements.begin(), entry.announcements.end(),
                             [](const Message& other) { return other.code == Code::kOk; });
    if (made == entry.announcements.end()) return Mismatch(a.texts[0]);  // all have refused it: nobody waits
    return Mismatch(NameOfCall(KindOf(*made), made->text) + ": rank " +
                    std::to_string(Number(static_cast<int>(&a - entry.announcements.data()))) +
                    " has refused it: " + a.texts[0]);
  }
  const Message& first = entry.announcements[0];
  for (int rank = 1; rank < size_; ++rank) {
    std::string difference = Difference(rank, entry.announcements[static_cast<size_t>(rank)], first, numbers_);
    if (!difference.empty()) return Mismatch(NameOfCall(KindOf(first), first.text) + ": " + difference);
  }
  return Status::Ok();
}

void Coordinator::Refuse(const Entry& entry, const Status& status, std::vector<Outgoing>* out) const {
  Message refuse;
  refuse.type = MessageType::kRefuse;
  refuse.code = status.code;
  refuse.text = status.message;
  for (int rank = 0; rank < size_; ++rank) {
    if (!entry.here[static_cast<size_t>(rank)]) continue;
    refuse.id = entry.announcements[static_cast<size_t>(rank)].id;
    out->push_back({rank, refuse});
  }
}

Status Coordinator::Gone(const Entry& entry) const {
  size_t first = static_cast<size_t>(std::find(entry.here.begin(), entry.here.end(), 1) - entry.here.begin());
  const Message& a = entry.announcements[first];
  return Communication(NameOfCall(KindOf(a), a.text) + ": " + HasLeft(Number(gone_)));
}

void Coordinator::Leave(int rank, std::vector<Outgoing>* out) {
  if (gone_ < 0) gone_ = rank;
  for (const auto& [name, entries] : entries_) {
    for (const Entry& entry : entries) Refuse(entry, Gone(entry), out);
  }
  entries_.clear();
  waiting_ = 0;
}

std::string Coordinator::Waits(const Entry& entry, double waited_s) const {
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!entry.here[static_cast<size_t>(rank)]) missing.push_back(Number(rank));
  }
  size_t first = static_cast<size_t>(std::find(entry.here.begin(), entry.here.end(), 1) - entry.here.begin());
  const Message& a = entry.announcements[first];
  return WaitsForCall(NameOfCall(KindOf(a), a.text), waited_s, missing);
}

Status Coordinator::Watch(double now_s, double warn_s, double fatal_s, std::vector<Outgoing>* out) {
  for (auto& [name, entries] : entries_) {
    for (Entry& entry : entries) {
      double waited_s = now_s - entry.since_s;
      if (fatal_s > 0 && waited_s >= fatal_s) return Communication(Waits(entry, waited_s));
      if (warn_s <= 0 || waited_s < warn_s * static_cast<double>(entry.warnings + 1)) continue;
      entry.warnings = static_cast<int64_t>(waited_s / warn_s);
      Message warn;
      warn.type = MessageType::kWarn;
      warn.text = Waits(entry, waited_s);
      for (int rank = 0; rank < size_; ++rank) {
        if (!entry.here[static_cast<size_t>(rank)]) continue;
        warn.id = entry.announcements[static_cast<size_t>(rank)].id;
        out->push_back({rank, warn});
      }
    }
  }
  return Status::Ok();
}

}  // namespace hvd_ext

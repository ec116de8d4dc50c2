#include "engine/coordinator.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "engine/stall.h"

namespace hvd_ext {
namespace {

// Where Announce puts what.
enum Field : size_t { kKind, kDType, kOp, kRoot, kPlanDigest, kSegmentNbytes, kWire, kCounted, kShape };
enum Text : size_t { kPayload, kTerms, kUsersDType, kSplits };

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

// A refusal has no text but its words.
std::string TextOf(const Message& a, Text text) { return text < a.texts.size() ? a.texts[text] : ""; }

// "allreduce", or what the user has called
std::string LabelOf(Kind kind, const std::string& terms) {
  return terms.empty() ? NameOfKind(kind) : terms.substr(0, terms.find('\n'));
}

std::string LabelOf(const Message& a) { return LabelOf(KindOf(a), TextOf(a, kTerms)); }

std::string NameOfCall(const Message& a) { return LabelOf(a) + " '" + a.text + "'"; }

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
  std::string who = NameOfCall(a) + ": rank " + std::to_string(number) + " has ";
  std::string ranks = std::to_string(size) + " ranks";
  if (a.texts.size() <= kSplits) {
    if (all % size == 0) {
      rows->insert(rows->end(), static_cast<size_t>(size), all / size);
      return Status::Ok();
    }
    return Invalid(who + std::to_string(all) + " rows and no splits; without splits the rows must divide evenly over " +
                   ranks);
  }
  std::vector<int64_t> splits(a.texts[kSplits].size() / sizeof(int64_t));
  if (!splits.empty()) std::memcpy(splits.data(), a.texts[kSplits].data(), splits.size() * sizeof(int64_t));
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

std::string DTypeOf(const Message& a) {
  std::string users = TextOf(a, kUsersDType);
  return users.empty() ? NameOf(static_cast<DType>(a.numbers[kDType])) : users;
}

// "float32[3, 4]"
std::string TensorOf(const Message& a) { return DTypeOf(a) + ListOf(ShapeOf(a)); }

bool SameTensor(const Message& a, const Message& b) {
  std::vector<int64_t> shape_a = ShapeOf(a), shape_b = ShapeOf(b);
  if (DTypeOf(a) != DTypeOf(b) || shape_a.size() != shape_b.size()) return false;
  if (AnyFirstDimension(KindOf(a))) shape_a[0] = shape_b[0];
  return shape_a == shape_b;
}

// The first line in which two terms differ, of each; false: they do not.
bool DifferentLines(const std::string& a, const std::string& b, std::string* line_a, std::string* line_b) {
  std::istringstream lines_a(a), lines_b(b);
  while (true) {
    bool more_a = static_cast<bool>(std::getline(lines_a, *line_a));
    bool more_b = static_cast<bool>(std::getline(lines_b, *line_b));
    if (!more_a && !more_b) return false;
    if (!more_a) *line_a = "nothing more";
    if (!more_b) *line_b = "nothing more";
    if (*line_a != *line_b) return true;
  }
}

// What `a` (of `rank`) has that `b` (of rank 0) has not; empty if they agree.
std::string Difference(int rank, const Message& a, const Message& b, const std::vector<int>& numbers) {
  auto differ = [&](const std::string& mine, const std::string& first, const std::string& rule) {
    return "rank " + std::to_string(NumberOf(numbers, rank)) + " has " + mine + ", rank " +
           std::to_string(NumberOf(numbers, 0)) + " has " + first + "; " + rule;
  };
  const std::string one_name = "one name must mean the same collective on all ranks";
  if (LabelOf(a) != LabelOf(b)) return differ(LabelOf(a), LabelOf(b), one_name);
  std::string terms_a = TextOf(a, kTerms), terms_b = TextOf(b, kTerms), line_a, line_b;
  if (!terms_a.empty() && !terms_b.empty() && DifferentLines(terms_a, terms_b, &line_a, &line_b)) {
    return differ(line_a, line_b, "all ranks must give the same");
  }
  if (a.numbers[kKind] != b.numbers[kKind]) return differ(NameOfKind(KindOf(a)), NameOfKind(KindOf(b)), one_name);
  if (!SameTensor(a, b)) {
    return differ(TensorOf(a), TensorOf(b),
                  AnyFirstDimension(KindOf(a)) ? "all ranks must give one dtype and one shape, except for dimension 0"
                                               : "all ranks must give one dtype and one shape");
  }
  if (a.numbers[kOp] != b.numbers[kOp]) {
    auto name = [](const Message& m) { return NameOf(static_cast<ReduceOp>(m.numbers[kOp])); };
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
                     spec.wire ? static_cast<int64_t>(*spec.wire) : kNoWire,
                     spec.counted};
  message.numbers.insert(message.numbers.end(), spec.shape.begin(), spec.shape.end());
  message.texts = {std::move(payload), spec.terms, spec.users_dtype};
  if (spec.splits) {
    message.texts.emplace_back(reinterpret_cast<const char*>(spec.splits->data()),
                               spec.splits->size() * sizeof(int64_t));
  }
  return message;
}

std::string NameOfCall(const CallSpec& spec) { return LabelOf(spec.kind, spec.terms) + " '" + spec.name + "'"; }

Coordinator::Coordinator(int size, std::vector<int> numbers) : size_(size), numbers_(std::move(numbers)) {}

int Coordinator::Number(int rank) const { return NumberOf(numbers_, rank); }

void Coordinator::Receive(int rank, Message announcement, double now_s, std::vector<Outgoing>* out) {
  std::string name = announcement.text;
  std::string clash = Clash(rank, announcement, out);
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
  if (!clash.empty()) entry->clash = clash;
  if (!entry->clash.empty()) Refuse(*entry, Invalid(NameOfCall(entry->announcements[r]) + ": " + entry->clash), out);
  if (gone_ < 0 && entry->count < size_) return;
  if (gone_ >= 0) {
    Refuse(*entry, Gone(*entry), out);
  } else if (entry->clash.empty()) {
    Finish(*entry, out);
  }
  entries.erase(entry);
  --waiting_;
  if (entries.empty()) entries_.erase(name);
}

std::string Coordinator::Clash(int rank, const Message& coming, std::vector<Outgoing>* out) {
  // Exchanges have the order of the thread that makes them; nobody can take another's place in a barrier.
  auto ordered = [](const Message& a) {
    return a.code != Code::kOk || KindOf(a) == Kind::kExchange || KindOf(a) == Kind::kBarrier;
  };
  if (ordered(coming)) return "";
  std::string words;
  auto look = [&](std::deque<Entry>* entries) {
    for (Entry& entry : *entries) {
      const Message& other = entry.announcements[static_cast<size_t>(rank)];
      if (!entry.here[static_cast<size_t>(rank)] || !entry.clash.empty() || ordered(other)) continue;
      bool counted = coming.numbers[kCounted] != 0 && other.numbers[kCounted] != 0;
      if (other.text != coming.text && !(counted && LabelOf(other) == LabelOf(coming))) continue;
      words = "rank " + std::to_string(Number(rank)) + " has called it while " + NameOfCall(other) +
              " was under way, and the other ranks cannot tell which is which; calls of several threads need names, "
              "each one its own";
      entry.clash = words;
      Refuse(entry, Invalid(NameOfCall(coming) + ": " + words), out);
    }
  };
  if (coming.numbers[kCounted] != 0) {
    for (auto& [name, entries] : entries_) look(&entries);
  } else if (auto found = entries_.find(coming.text); found != entries_.end()) {
    look(&found->second);
  }
  return words;
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
    return Mismatch(NameOfCall(*made) + ": rank " +
                    std::to_string(Number(static_cast<int>(&a - entry.announcements.data()))) +
                    " has refused it: " + a.texts[0]);
  }
  const Message& first = entry.announcements[0];
  for (int rank = 1; rank < size_; ++rank) {
    std::string difference = Difference(rank, entry.announcements[static_cast<size_t>(rank)], first, numbers_);
    if (!difference.empty()) return Mismatch(NameOfCall(first) + ": " + difference);
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
  return Communication(NameOfCall(a) + ": " + HasLeft(Number(gone_)));
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
  return WaitsForCall(NameOfCall(a) + InSet(numbers_), waited_s, missing);
}

bool Coordinator::Awaited(const Entry& entry) const {
  if (!entry.clash.empty()) return false;
  for (size_t rank = 0; rank < entry.here.size(); ++rank) {
    if (entry.here[rank] && entry.announcements[rank].code == Code::kOk) return true;
  }
  return false;
}

Status Coordinator::Watch(double now_s, double warn_s, double fatal_s, std::vector<Outgoing>* out,
                          std::vector<std::string>* warnings) {
  for (auto& [name, entries] : entries_) {
    for (Entry& entry : entries) {
      if (!Awaited(entry)) continue;
      double waited_s = now_s - entry.since_s;
      if (fatal_s > 0 && waited_s >= fatal_s) return Communication(Waits(entry, waited_s));
      if (warn_s <= 0 || waited_s < warn_s * static_cast<double>(entry.warnings + 1)) continue;
      entry.warnings = static_cast<int64_t>(waited_s / warn_s);
      Message known;
      known.type = MessageType::kKnown;
      if (entry.warned_of != entry.count) warnings->push_back(Waits(entry, waited_s));
      entry.warned_of = entry.count;
      for (int rank = 0; rank < size_; ++rank) {
        if (!entry.here[static_cast<size_t>(rank)]) continue;
        known.id = entry.announcements[static_cast<size_t>(rank)].id;
        out->push_back({rank, known});
      }
    }
  }
  return Status::Ok();
}

}  // namespace hvd_ext

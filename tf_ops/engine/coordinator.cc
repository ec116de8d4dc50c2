#include "engine/coordinator.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "engine/stall.h"

namespace hvd_ext {
namespace {

const char* NameOfKind(Kind kind) {
  constexpr const char* kNames[] = {"allreduce", "allgather",     "broadcast", "barrier",
                                    "exchange",  "reducescatter", "alltoall"};
  const size_t number = static_cast<size_t>(kind);
  return number < std::size(kNames) ? kNames[number] : "unknown call";
}

// "allreduce", or what the user has called
std::string LabelOf(const CallTerms& call) {
  return call.signature.empty() ? NameOfKind(call.kind) : call.signature.substr(0, call.signature.find('\n'));
}

bool AnyFirstDimension(Kind kind) { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }

std::string ListOf(const std::vector<int64_t>& numbers) { return "[" + Joined(numbers) + "]"; }

// The rows that a rank sends to each rank (alltoall): its splits, or equal parts. Refuses splits that do not add up;
// all ranks get the error, because they wait for this one.
Status RowsOf(int number, const CallAnnouncement& a, int size, std::vector<int64_t>* rows) {
  int64_t all = a.shape[0];
  std::string who = NameOfCall(a) + ": rank " + std::to_string(number) + " has ";
  std::string ranks = std::to_string(size) + " ranks";
  if (!a.splits) {
    if (all % size == 0) {
      rows->insert(rows->end(), static_cast<size_t>(size), all / size);
      return Status::Ok();
    }
    return Invalid(who + std::to_string(all) + " rows and no splits; without splits the rows must divide evenly over " +
                   ranks);
  }
  const std::vector<int64_t>& splits = *a.splits;
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

std::string DTypeOf(const CallAnnouncement& a) { return a.users_dtype.empty() ? NameOf(a.dtype) : a.users_dtype; }

// "float32[3, 4]"
std::string TensorOf(const CallAnnouncement& a) { return DTypeOf(a) + ListOf(a.shape); }

bool SameTensor(const CallAnnouncement& a, const CallAnnouncement& b) {
  if (DTypeOf(a) != DTypeOf(b) || a.shape.size() != b.shape.size()) return false;
  return std::equal(a.shape.begin() + (AnyFirstDimension(a.kind) ? 1 : 0), a.shape.end(),
                    b.shape.begin() + (AnyFirstDimension(b.kind) ? 1 : 0));
}

// Finds the first line in which two signatures differ; false where they do not.
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

// Says how `a` (of `rank`) differs from `b` (of `first`); empty if they agree.
std::string Difference(int rank, const CallAnnouncement& a, int first, const CallAnnouncement& b,
                       const std::vector<int>& numbers) {
  auto differ = [&](const std::string& mine, const std::string& of_first, const std::string& rule) {
    return "rank " + std::to_string(NumberOf(numbers, rank)) + " has " + mine + ", rank " +
           std::to_string(NumberOf(numbers, first)) + " has " + of_first + "; " + rule;
  };
  const std::string one_name = "one name must mean the same collective on all ranks";
  if (LabelOf(a) != LabelOf(b)) return differ(LabelOf(a), LabelOf(b), one_name);
  std::string line_a, line_b;
  if (!a.signature.empty() && !b.signature.empty() && DifferentLines(a.signature, b.signature, &line_a, &line_b)) {
    return differ(line_a, line_b, "all ranks must give the same");
  }
  if (a.kind != b.kind) return differ(NameOfKind(a.kind), NameOfKind(b.kind), one_name);
  if (!SameTensor(a, b)) {
    return differ(TensorOf(a), TensorOf(b),
                  AnyFirstDimension(a.kind) ? "all ranks must give one dtype and one shape, except for dimension 0"
                                            : "all ranks must give one dtype and one shape");
  }
  if (a.op != b.op) {
    return differ(std::string("op ") + NameOf(a.op), std::string("op ") + NameOf(b.op), "all ranks must give one op");
  }
  if (a.root != b.root) {
    auto name = [&](const CallAnnouncement& m) {
      return "root rank " + std::to_string(NumberOf(numbers, static_cast<int>(m.root)));
    };
    return differ(name(a), name(b), "all ranks must name one root rank");
  }
  if (a.wire != b.wire) {
    auto name = [](const CallAnnouncement& m) {
      return std::string("compression ") + (m.wire ? NameOf(*m.wire) : "none");
    };
    return differ(name(a), name(b), "all ranks must give one compression");
  }
  const std::string one_plan = "all ranks must use one algorithm and one topology";
  if (a.plan_digest != b.plan_digest) {
    return differ("plan " + std::to_string(a.plan_digest), "plan " + std::to_string(b.plan_digest), one_plan);
  }
  if (a.segment_nbytes != b.segment_nbytes) {
    return differ("segments of bytes " + std::to_string(a.segment_nbytes),
                  "segments of bytes " + std::to_string(b.segment_nbytes), one_plan);
  }
  return "";
}

}  // namespace

std::string NameOfCall(const CallTerms& call) { return LabelOf(call) + " " + Quoted(call.name); }

Coordinator::Coordinator(int size, std::vector<int> numbers)
    : size_(size),
      numbers_(std::move(numbers)),
      joined_(static_cast<size_t>(size)),
      digests_(static_cast<size_t>(size)) {}

int Coordinator::Number(int rank) const { return NumberOf(numbers_, rank); }

void Coordinator::Receive(int rank, CallAnnouncement announcement, double now_s, std::vector<Outgoing>* out) {
  std::string name = announcement.name;
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
  if (gone_ < 0 && !IsComplete(*entry)) return;
  if (gone_ >= 0) {
    Refuse(*entry, Gone(*entry), out);
  } else if (entry->clash.empty()) {
    Finish(*entry, out);
  }
  entries.erase(entry);
  --waiting_;
  if (entries.empty()) entries_.erase(name);
}

std::string Coordinator::Clash(int rank, const CallAnnouncement& coming, std::vector<Outgoing>* out) {
  // One thread makes all exchanges, so they have an order; and it does not matter which of two barriers a rank joins.
  auto ordered = [](const CallAnnouncement& a) {
    return a.refusal || a.kind == Kind::kExchange || a.kind == Kind::kBarrier;
  };
  if (ordered(coming)) return "";
  std::string words;
  auto look = [&](std::deque<Entry>* entries) {
    for (Entry& entry : *entries) {
      const CallAnnouncement& other = entry.announcements[static_cast<size_t>(rank)];
      if (!entry.here[static_cast<size_t>(rank)] || !entry.clash.empty() || ordered(other)) continue;
      bool counted = coming.counted && other.counted;
      if (other.name != coming.name && !(counted && LabelOf(other) == LabelOf(coming))) continue;
      words = "rank " + std::to_string(Number(rank)) + " has called it while " + NameOfCall(other) +
              " was under way, and the other ranks cannot tell which is which; calls of several threads must each "
              "have a name of their own";
      entry.clash = words;
      Refuse(entry, Invalid(NameOfCall(coming) + ": " + words), out);
    }
  };
  if (coming.counted) {
    for (auto& [name, entries] : entries_) look(&entries);
  } else if (auto found = entries_.find(coming.name); found != entries_.end()) {
    look(&found->second);
  }
  return words;
}

bool Coordinator::IsComplete(const Entry& entry) const {
  for (size_t rank = 0; rank < joined_.size(); ++rank) {
    if (!entry.here[rank] && !joined_[rank]) return false;
  }
  return true;
}

void Coordinator::Join(int rank, const std::vector<int64_t>& digests, std::vector<Outgoing>* out) {
  joined_[static_cast<size_t>(rank)] = 1;
  digests_[static_cast<size_t>(rank)] = digests;
  for (auto name = entries_.begin(); name != entries_.end();) {
    std::deque<Entry>& entries = name->second;
    for (auto entry = entries.begin(); entry != entries.end();) {
      if (!IsComplete(*entry)) {
        ++entry;
        continue;
      }
      if (entry->clash.empty()) Finish(*entry, out);
      entry = entries.erase(entry);
      --waiting_;
    }
    name = entries.empty() ? entries_.erase(name) : std::next(name);
  }
}

void Coordinator::EndJoin() { std::fill(joined_.begin(), joined_.end(), 0); }

Status Coordinator::CheckZeros(const Entry& entry) const {
  std::vector<int> absent;
  bool unknown = false;
  const CallAnnouncement& call = FirstOf(entry);
  for (size_t rank = 0; rank < entry.here.size(); ++rank) {
    if (entry.here[rank]) continue;
    const std::vector<int64_t>& known = digests_[rank];
    const bool has = std::find(known.begin(), known.end(), call.plan_digest) != known.end();
    unknown |= !has;
    absent.push_back(Number(static_cast<int>(rank)));
  }
  if (absent.empty() || call.kind == Kind::kBarrier) return Status::Ok();
  const std::string who =
      (absent.size() == 1 ? "rank " + Joined(absent) + " has" : "ranks " + Joined(absent) + " have") +
      " joined (hvd_ext.join)";
  if (call.kind == Kind::kExchange) {
    const auto agrees = [&entry](const CallAnnouncement& a) {
      return !entry.here[static_cast<size_t>(&a - entry.announcements.data())] || a.agrees;
    };
    if (std::all_of(entry.announcements.begin(), entry.announcements.end(), agrees)) return Status::Ok();
    return Invalid(NameOfCall(call) + ": " + who +
                   ", and it needs all ranks; let each rank train one step before it joins, or give all ranks as many "
                   "steps with hvd_ext.shard");
  }
  const bool sums = call.op == ReduceOp::kSum || call.op == ReduceOp::kAverage;
  if (call.kind != Kind::kAllreduce || !sums) {
    return Invalid(NameOfCall(call) + (sums ? "" : std::string(" with op ") + hvd_ext::NameOf(call.op)) + ": " + who +
                   "; until all ranks have joined, only barriers and allreduces with op Sum or Average run; make "
                   "sparse gradients dense with sparse_as_dense=True");
  }
  if (!unknown) return Status::Ok();
  return Invalid(NameOfCall(call) + ": " + who +
                 " without having used its algorithm; call it with this algorithm once before a rank joins");
}

void Coordinator::Finish(const Entry& entry, std::vector<Outgoing>* out) const {
  CallStart start;
  Kind kind = FirstOf(entry).kind;
  Status status = Compare(entry);
  if (status.ok()) status = CheckZeros(entry);
  for (int rank = 0; status.ok() && kind == Kind::kAlltoall && rank < size_; ++rank) {
    status = RowsOf(Number(rank), entry.announcements[static_cast<size_t>(rank)], size_, &start.rows);
  }
  if (!status.ok()) {
    Refuse(entry, status, out);
    return;
  }
  for (const CallAnnouncement& a : entry.announcements) {
    if (kind == Kind::kAllgather) start.rows.push_back(a.shape[0]);
    if (kind == Kind::kExchange) start.payloads.push_back(a.payload);
  }
  for (int rank = 0; rank < size_; ++rank) {
    if (entry.here[static_cast<size_t>(rank)]) {
      start.id = entry.announcements[static_cast<size_t>(rank)].id;
      out->push_back({rank, start});
    } else if (kind == Kind::kAllreduce) {
      ZeroCall zeros;
      static_cast<CallTerms&>(zeros) = FirstOf(entry);
      out->push_back({rank, zeros});
    }
  }
}

Status Coordinator::Compare(const Entry& entry) const {
  for (const CallAnnouncement& a : entry.announcements) {
    if (!a.refusal) continue;
    auto made = std::find_if(entry.announcements.begin(), entry.announcements.end(),
                             [](const CallAnnouncement& other) { return !other.refusal; });
    if (made == entry.announcements.end()) return Mismatch(*a.refusal);  // all have refused it: no rank waits
    return Mismatch(NameOfCall(*made) + ": rank " +
                    std::to_string(Number(static_cast<int>(&a - entry.announcements.data()))) +
                    " has refused it: " + *a.refusal);
  }
  const CallAnnouncement& first = FirstOf(entry);
  const int first_rank = static_cast<int>(&first - entry.announcements.data());
  for (int rank = first_rank + 1; rank < size_; ++rank) {
    if (!entry.here[static_cast<size_t>(rank)]) continue;
    const CallAnnouncement& other = entry.announcements[static_cast<size_t>(rank)];
    std::string difference = Difference(rank, other, first_rank, first, numbers_);
    if (!difference.empty()) return Mismatch(NameOfCall(first) + ": " + difference);
  }
  return Status::Ok();
}

void Coordinator::Refuse(const Entry& entry, const Status& status, std::vector<Outgoing>* out) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (!entry.here[static_cast<size_t>(rank)]) continue;
    out->push_back({rank, CallRefusal{entry.announcements[static_cast<size_t>(rank)].id, status}});
  }
}

const CallAnnouncement& Coordinator::FirstOf(const Entry& entry) const {
  const auto first = std::find(entry.here.begin(), entry.here.end(), 1) - entry.here.begin();
  return entry.announcements[static_cast<size_t>(first)];
}

std::string Coordinator::NameOf(const Entry& entry) const { return NameOfCall(FirstOf(entry)); }

Status Coordinator::Gone(const Entry& entry) const {
  return Communication(NameOf(entry) + ": " + HasLeft(Number(gone_)));
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
    if (!entry.here[static_cast<size_t>(rank)] && !joined_[static_cast<size_t>(rank)]) missing.push_back(Number(rank));
  }
  return WaitsForCall(NameOf(entry) + InSet(numbers_), waited_s, missing);
}

bool Coordinator::Awaited(const Entry& entry) const {
  if (!entry.clash.empty()) return false;
  for (size_t rank = 0; rank < entry.here.size(); ++rank) {
    if (entry.here[rank] && !entry.announcements[rank].refusal) return true;
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
      if (entry.warned_of != entry.count) warnings->push_back(Waits(entry, waited_s));
      entry.warned_of = entry.count;
      for (int rank = 0; rank < size_; ++rank) {
        if (!entry.here[static_cast<size_t>(rank)]) continue;
        out->push_back({rank, CallKnown{entry.announcements[static_cast<size_t>(rank)].id}});
      }
    }
  }
  return Status::Ok();
}

}  // namespace hvd_ext

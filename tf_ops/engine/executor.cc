#include "engine/executor.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

namespace hvd_ext {
namespace {

constexpr size_t kNamesKept = 64;  // names of runs that have ended, for each lane, for errors

// The same number on all ranks. In an alltoall, whose units have sizes of their own, `elements` differs from rank to
// rank, and may be 0 on some ranks only.
int64_t CountSegments(const Run& run) {
  if (!run.unit_begins.empty()) return 1;
  if (run.elements == 0) return 0;
  int64_t nbytes_each = static_cast<int64_t>(SizeOf(run.wire.value_or(run.dtype)));
  if (run.segment_nbytes <= 0 || run.sparse != nullptr) return 1;
  int64_t elements_each = std::max<int64_t>(1, run.segment_nbytes / nbytes_each);
  return (run.elements + elements_each - 1) / elements_each;
}

}  // namespace

Status CheckLane(int64_t lane, int64_t window, int64_t largest_tag) {
  if ((lane + 1) * window - 1 <= largest_tag) return Status::Ok();
  return Invalid(
      "lane (" + std::to_string(lane) + ") with a window of " + std::to_string(window) + " segments needs tags above " +
      std::to_string(largest_tag) +
      ", which this transport does not have: too many channels have been opened; shutdown() and init() start afresh");
}

Executor::Executor(Transport* transport, BufferPool* messages, int64_t window, Trace* trace,
                   std::shared_ptr<Device> device)
    : transport_(transport),
      messages_(messages),
      window_(window),
      trace_(trace),
      device_(std::move(device)),
      near_(BufferPool::Of(device_)) {
  transport_->NameBy([this](const Label& label) {
    AssertProgress();
    return NameOf(label);
  });
}

Executor::~Executor() {
  FailAll(Stopped("the engine has stopped"));
  transport_->NameBy(nullptr);
}

std::string Executor::NameOf(const Label& label) const {
  const int64_t number = label.tag / window_;
  const std::string place = " (run " + std::to_string(label.run) + " of lane " + std::to_string(number) + ")";
  auto found = lanes_.find(number);
  if (found == lanes_.end()) return "a run of another lane" + place;
  const Lane& lane = found->second;
  for (const std::unique_ptr<OpenRun>& open : lane.runs) {
    if (static_cast<uint32_t>(open->index) == label.run) return open->run.what + place;
  }
  for (const auto& [index, what] : lane.ended) {
    if (static_cast<uint32_t>(index) == label.run) return what + place;
  }
  const bool ahead = static_cast<int32_t>(label.run - static_cast<uint32_t>(lane.enqueued)) >= 0;
  return (ahead ? "a run that this rank has not begun" : "a run that ended here long ago") + place;
}

Executor::Lane& Executor::LaneOf(int64_t number) { return lanes_.try_emplace(number, number).first->second; }

void Executor::Enqueue(int64_t number, Run run, double now_s) {
  Lane& lane = LaneOf(number);
  if (lane.slots.empty()) lane.slots.resize(static_cast<size_t>(window_));
  int64_t index = lane.enqueued++;
  const Status& failure = failure_.ok() ? lane.failure : failure_;
  if (!failure.ok()) {
    run.done(Status(failure));
    return;
  }
  if (lane.runs.empty()) {
    lane.progress_s = now_s;
    auto after = [](int64_t n, const Lane* other) { return n < other->number; };
    busy_.insert(std::upper_bound(busy_.begin(), busy_.end(), number, after), &lane);
  }
  auto open = std::make_unique<OpenRun>();
  open->segments = CountSegments(run);
  open->codec = MakeDenseCodec(run.dtype, run.wire, run.op);
  open->run = std::move(run);
  open->index = index;
  lane.runs.push_back(std::move(open));
  ++open_runs_;
}

Status Executor::Progress(double now_s, bool* moved) {
  polls_ = false;
  for (Lane* lane : busy_) {
    bool lane_moved = false;
    HVD_EXT_RETURN_IF_ERROR(StartSegments(lane, &lane_moved));
    for (std::unique_ptr<Segment>& segment : lane->slots) {
      if (segment == nullptr) continue;
      bool ended = false;
      HVD_EXT_RETURN_IF_ERROR(Advance(segment.get(), &ended, &lane_moved));
      if (!ended) continue;
      ++segment->open->ended;
      ++statistics_.segments;
      segment.reset();
    }
    EndRuns(lane);
    if (lane_moved) lane->progress_s = now_s;
    *moved |= lane_moved;
  }
  auto idle = [](const Lane* lane) { return lane->runs.empty(); };
  busy_.erase(std::remove_if(busy_.begin(), busy_.end(), idle), busy_.end());
  return Status::Ok();
}

Status Executor::StartSegments(Lane* lane, bool* moved) {
  for (const std::unique_ptr<OpenRun>& open : lane->runs) {
    if (open->segments == 0) *moved = true;
    while (open->started < open->segments) {
      int64_t slot = lane->next_segment % window_;
      std::unique_ptr<Segment>& place = lane->slots[static_cast<size_t>(slot)];
      if (place != nullptr) return Status::Ok();
      const int64_t begin = UnitBegin(open->started, open->segments, open->run.elements);
      const int64_t end = UnitBegin(open->started + 1, open->segments, open->run.elements);
      const int64_t nbytes_each = static_cast<int64_t>(SizeOf(open->run.dtype));
      if (open->run.arriving != nullptr && !open->run.arriving->Has(begin * nbytes_each, end * nbytes_each)) {
        return Status::Ok();
      }
      if (!IsDone(device_->inputs(), open->run.buffer->input())) return Status::Ok();
      // The last step's run of this bucket has not ended; the runs behind this one keep their order. Enter is called
      // last, because a run that has entered must start.
      if (open->started == 0 && open->run.sparse != nullptr && !open->run.sparse->Enter()) return Status::Ok();
      place =
          std::make_unique<Segment>(Label(static_cast<int>(lane->number * window_ + slot), open->index, open->started));
      place->open = open.get();
      if (open->started == 0 && IsOn(trace_)) {
        open->begin_s = NowSeconds();
        const std::vector<Row>& rows = open->run.plan->rows;
        open->rounds.resize(rows.empty() ? 0 : static_cast<size_t>(rows.back().round + 1));
      }
      place->queue = device_->OfSegment(place->label.tag);
      place->plan = open->run.plan;
      place->buffer = open->run.buffer;
      place->sparse = open->run.sparse;
      place->begin = begin;
      place->elements = end - begin;
      if (open->codec->CountsTerms()) place->terms.assign(static_cast<size_t>(place->plan->units), 1);
      ++open->started;
      ++lane->next_segment;
      *moved = true;
      HVD_EXT_RETURN_IF_ERROR(StartRound(place.get()));
    }
  }
  return Status::Ok();
}

bool Executor::IsDone(Queue* queue, int64_t operation) {
  const bool done = queue->Done(operation);
  polls_ |= !done;
  return done;
}

int64_t Executor::UnitAt(const Segment& segment, int64_t unit) const {
  const std::vector<int64_t>& begins = segment.open->run.unit_begins;
  if (!begins.empty()) return begins[static_cast<size_t>(unit)];
  return segment.begin + UnitBegin(unit, segment.plan->units, segment.elements);
}

Status Executor::StartRound(Segment* segment) {
  const std::vector<Row>& rows = segment->plan->rows;
  segment->transfers.clear();
  segment->waiting = segment->sent = segment->reduced = 0;
  if (segment->next_row == rows.size()) return Status::Ok();
  int64_t piece_elements = kPieceNbytes / static_cast<int64_t>(SizeOf(segment->open->run.dtype));
  int64_t round = rows[segment->next_row].round;
  segment->round = round;
  NoteRound(*segment, false);
  if (IsLocal(rows[segment->next_row].opcode)) return RunLocalRows(segment);
  size_t end = segment->first_row = segment->next_row;
  for (; end < rows.size() && rows[end].round == round; ++end) {
    const Row& row = rows[end];
    if (IsSparse(row.opcode)) continue;
    int64_t begin = UnitAt(*segment, row.begin);
    int64_t elements = UnitAt(*segment, row.begin + row.count) - begin;
    // Nothing to move makes no message: the peer finds the same length and leaves it out too.
    for (int64_t piece = 0; piece < elements; piece += piece_elements) {
      int64_t length = std::min(piece_elements, elements - piece);
      segment->transfers.push_back(Transfer{&row, begin + piece, length});
    }
  }
  segment->next_row = end;
  segment->waiting = segment->transfers.size();
  segment->vectors = segment->sparse != nullptr;
  // Receives are posted first: a message that finds its receive is not copied twice.
  for (Transfer& transfer : segment->transfers) {
    if (transfer.row->opcode != Opcode::SEND) HVD_EXT_RETURN_IF_ERROR(PostReceive(segment, &transfer));
  }
  for (size_t i = 0; i < segment->transfers.size(); ++i) {
    if (segment->transfers[i].row->opcode == Opcode::SEND) WriteMessage(segment, &segment->transfers[i]);
    HVD_EXT_RETURN_IF_ERROR(PostWritten(segment, i + 1));
  }
  return PostWritten(segment, segment->transfers.size());
}

bool Executor::Combines(const OpenRun& open, const Row& row) const {
  return row.opcode == Opcode::RECV_REDUCE || (HasMessages(open) && row.opcode == Opcode::RECV);
}

// A message that is received without a copy must be added as soon as it is there. If it waited for sends of this rank,
// it would keep the peer's send from ending, which may wait for ours.
// On a device it is copied first.
bool Executor::ReceivesZeroCopy(const OpenRun& open, const Row& row) const {
  if (!device_->IsHost()) return OnDevice(open, row);
  bool waits = row.after_sends && open.codec->IsPlain();
  return Combines(open, row) && !waits && transport_->IsZeroCopy(row.peer);
}

Status Executor::PostReceive(Segment* segment, Transfer* transfer) {
  const OpenRun& open = *segment->open;
  const Row& row = *transfer->row;
  const int64_t nbytes = open.codec->Nbytes(transfer->elements);
  char* data = nullptr;
  if (!Combines(open, row)) {
    data = DataOf(*segment, transfer->begin);
  } else if (!ReceivesZeroCopy(open, row)) {
    transfer->scratch = messages_->Take(nbytes);
    data = transfer->scratch.data();
  }
  statistics_.bytes_received += nbytes;
  return transport_->Recv(row.peer, segment->label, data, nbytes, &transfer->request);
}

void Executor::WriteMessage(Segment* segment, Transfer* transfer) {
  const OpenRun& open = *segment->open;
  const Row& row = *transfer->row;
  char* data = DataOf(*segment, transfer->begin);
  transfer->message = data;
  transfer->operation = segment->queue->Last();
  if (!HasMessages(open) || (open.codec->IsPlain() && OnDevice(open, row))) return;
  int32_t terms = 1;
  if (open.codec->CountsTerms()) {
    auto first = segment->terms.begin() + row.begin;
    terms = *std::max_element(first, first + row.count);
  }
  transfer->scratch = MessagesOf(open, row)->Take(open.codec->Nbytes(transfer->elements));
  open.codec->Write(segment->queue, transfer->scratch.data(), data, transfer->elements, terms);
  transfer->message = transfer->scratch.data();
  transfer->operation = segment->queue->Last();
}

// Posts the sends before transfer `end` whose messages are written, in the order of the rows, and behind all of them
// the round's vectors: the receivers post theirs in that order.
Status Executor::PostWritten(Segment* segment, size_t end) {
  for (; segment->sent < end; ++segment->sent) {
    Transfer& transfer = segment->transfers[segment->sent];
    if (transfer.row->opcode != Opcode::SEND) continue;
    if (!IsDone(segment->queue, transfer.operation)) return Status::Ok();
    const int64_t nbytes = segment->open->codec->Nbytes(transfer.elements);
    statistics_.bytes_sent += nbytes;
    HVD_EXT_RETURN_IF_ERROR(
        transport_->Send(transfer.row->peer, segment->label, transfer.message, nbytes, &transfer.request));
  }
  if (segment->sent < segment->transfers.size() || !std::exchange(segment->vectors, false)) return Status::Ok();
  return PostVectors(segment);
}

void Executor::NoteRound(const Segment& segment, bool ended) {
  std::vector<RoundSpan>& rounds = segment.open->rounds;
  if (rounds.empty() || segment.round < 0) return;
  RoundSpan& span = rounds[static_cast<size_t>(segment.round)];
  double now_s = NowSeconds();
  if (ended) span.end_s = now_s;
  if (!ended && span.begin_s < 0) span.begin_s = now_s;
}

void Executor::Record(int64_t number, const OpenRun& open) {
  const Run& run = open.run;
  trace_->Add(TraceKind::kRun, number, run.id, run.part, open.begin_s, NowSeconds());
  for (size_t round = 0; round < open.rounds.size(); ++round) {
    const RoundSpan& span = open.rounds[round];
    if (span.begin_s < 0) continue;
    trace_->Add(TraceKind::kRound, number, run.id, run.part, span.begin_s, span.end_s, static_cast<int64_t>(round));
  }
}

Status Executor::Advance(Segment* segment, bool* ended, bool* moved) {
  const std::vector<Row>& rows = segment->plan->rows;
  while (!segment->held.empty() && IsDone(segment->queue, segment->held.front().first)) segment->held.pop_front();
  while (!segment->finished) {
    HVD_EXT_RETURN_IF_ERROR(TestTransfers(segment, moved));
    if (segment->sparse != nullptr) HVD_EXT_RETURN_IF_ERROR(TestVectors(segment, moved));
    if (segment->local) HVD_EXT_RETURN_IF_ERROR(RunLocalRows(segment));
    if (segment->local || IsWaiting(*segment)) return Status::Ok();
    NoteRound(*segment, true);
    if (segment->next_row < rows.size()) {
      HVD_EXT_RETURN_IF_ERROR(StartRound(segment));
    } else {
      Finish(segment);
    }
  }
  if (!IsDone(segment->queue, segment->operation)) return Status::Ok();
  *ended = true;
  *moved = true;
  return Status::Ok();
}

void Executor::Finish(Segment* segment) const {
  const Run& run = segment->open->run;
  Queue* queue = segment->queue;
  char* data = DataOf(*segment, segment->begin);
  if (!segment->plan->rows.empty()) segment->open->codec->Finish(queue, data, segment->elements, transport_->size());
  if (run.divisor > 1) queue->Divide(run.dtype, data, run.divisor, segment->elements);
  if (run.result != nullptr && run.result != run.buffer) {
    const int64_t nbytes_each = static_cast<int64_t>(SizeOf(run.dtype));
    queue->Copy(run.result->data() + segment->begin * nbytes_each, data, segment->elements * nbytes_each);
  }
  segment->operation = queue->Last();
  segment->finished = true;
}

Status Executor::TestTransfers(Segment* segment, bool* moved) {
  HVD_EXT_RETURN_IF_ERROR(PostWritten(segment, segment->transfers.size()));
  for (Transfer& transfer : segment->transfers) {
    if (transfer.request == nullptr) continue;
    bool done = false;
    const Status status = transport_->Test(transfer.request.get(), &done);
    if (!status.ok()) return status.Named(segment->open->run.what);
    if (!done) continue;
    --segment->waiting;
    *moved = true;
    if (!Combines(*segment->open, *transfer.row)) {
      transfer.request.reset();
      continue;
    }
    bool zero_copy = !transfer.scratch;
    transfer.message = zero_copy ? transport_->Received(transfer.request.get()) : transfer.scratch.data();
    if (!zero_copy) transfer.request.reset();
    ReduceInOrder(segment);
    if (transfer.request == nullptr) continue;
    // It must be added after others that have not come, and the peer must not wait until they have.
    int64_t nbytes = segment->open->codec->Nbytes(transfer.elements);
    transfer.scratch = MessagesOf(*segment->open, *transfer.row)->Take(nbytes);
    segment->queue->Copy(transfer.scratch.data(), transfer.message, nbytes);
    transfer.message = transfer.scratch.data();
    GiveBack(segment, &transfer);
  }
  ReduceInOrder(segment);
  return Status::Ok();
}

// The peer whose memory a message lies in may write there again when the operations on it have ended.
void Executor::GiveBack(Segment* segment, Transfer* transfer) const {
  if (transfer->request == nullptr) return;
  if (!device_->IsHost()) segment->held.emplace_back(segment->queue->Last(), std::move(transfer->request));
  transfer->request.reset();
}

// Whether elements of a reduction are being sent, or are to be sent, from the buffer itself.
bool Executor::IsSentFrom(const Segment& segment, const Transfer& reduction) {
  for (size_t i = 0; i < segment.transfers.size(); ++i) {
    const Transfer& other = segment.transfers[i];
    if (other.row->opcode == Opcode::SEND && !other.scratch && (other.request != nullptr || i >= segment.sent) &&
        other.begin < reduction.begin + reduction.elements && reduction.begin < other.begin + other.elements) {
      return true;
    }
  }
  return false;
}

// Adds in the order of the rows, whatever arrives first: sums of floats must not depend on timing.
void Executor::ReduceInOrder(Segment* segment) {
  while (segment->reduced < segment->transfers.size()) {
    Transfer& transfer = segment->transfers[segment->reduced];
    if (Combines(*segment->open, *transfer.row)) {
      if (transfer.message == nullptr) return;
      if (transfer.row->after_sends && IsSentFrom(*segment, transfer)) return;
      Combine(segment, transfer);
      transfer.message = nullptr;
      GiveBack(segment, &transfer);
      transfer.scratch = Buffer();
    }
    ++segment->reduced;
  }
}

void Executor::Combine(Segment* segment, const Transfer& transfer) const {
  const OpenRun& open = *segment->open;
  char* data = DataOf(*segment, transfer.begin);
  if (open.codec->CountsTerms()) NoteTerms(segment, transfer, open.codec->Terms(transfer.message, transfer.elements));
  if (transfer.row->opcode == Opcode::RECV) {
    return open.codec->Read(segment->queue, transfer.message, data, transfer.elements);
  }
  open.codec->Combine(segment->queue, transfer.message, data, transfer.elements);
}

// A row's messages have one number of values. It is that of the unit with the most, so sums of such numbers may be too
// large: a sum of all ranks' values has that of the ranks everywhere, and is scaled alike.
void Executor::NoteTerms(Segment* segment, const Transfer& transfer, int32_t terms) const {
  const Row& row = *transfer.row;
  if (transfer.begin != UnitAt(*segment, row.begin)) return;  // not the row's first message
  for (int64_t unit = row.begin; unit < row.begin + row.count; ++unit) {
    int32_t& noted = segment->terms[static_cast<size_t>(unit)];
    noted = row.opcode == Opcode::RECV ? terms : std::min(noted + terms, transport_->size());
  }
}

void Executor::EndRuns(Lane* lane) {
  for (size_t i = 0; i < lane->runs.size();) {
    OpenRun& open = *lane->runs[i];
    if (open.started < open.segments) return;  // later ones have not started either
    if (open.ended < open.segments) {
      ++i;
      continue;
    }
    std::unique_ptr<OpenRun> ended = std::move(lane->runs[i]);
    lane->runs.erase(lane->runs.begin() + static_cast<std::ptrdiff_t>(i));
    --open_runs_;
    if (ended->run.sparse != nullptr && ended->segments > 0) ended->run.sparse->Leave();
    if (ended->begin_s >= 0) Record(lane->number, *ended);
    lane->ended.emplace_back(ended->index, std::move(ended->run.what));
    if (lane->ended.size() > kNamesKept) lane->ended.pop_front();
    ended->run.done(Status::Ok());
  }
}

void Executor::Fail(int64_t number, const Status& status) {
  Lane& lane = LaneOf(number);
  if (lane.failure.ok()) lane.failure = status;
  for (std::unique_ptr<Segment>& segment : lane.slots) {
    if (segment != nullptr) Abandon(std::move(segment));
  }
  std::deque<std::unique_ptr<OpenRun>> runs = std::move(lane.runs);
  lane.runs.clear();
  busy_.erase(std::remove(busy_.begin(), busy_.end(), &lane), busy_.end());
  open_runs_ -= static_cast<int64_t>(runs.size());
  for (const std::unique_ptr<OpenRun>& open : runs) open->run.done(Status(lane.failure));
}

void Executor::FailAll(const Status& status) {
  if (failure_.ok()) failure_ = status;
  for (auto& [number, lane] : lanes_) Fail(number, failure_);
}

// A message under way cannot be called back, and the transport may still read or write its memory, unless it says that
// it forgets; and of a lane alone peers may still read it. A static that is never destroyed keeps that memory, so that
// leak checkers see it in use.
void Executor::Abandon(std::unique_ptr<Segment> segment) {
  static std::mutex* mutex = new std::mutex;
  static auto* kept = new std::vector<std::unique_ptr<Segment>>;
  if (!IsWaiting(*segment) && segment->held.empty()) return;
  abandoned_ = true;
  segment->open = nullptr;
  if (!failure_.ok() && transport_->Forgets()) return;
  std::lock_guard<std::mutex> lock(*mutex);
  kept->push_back(std::move(segment));
}

int64_t Executor::runs(int64_t lane) const {
  auto found = lanes_.find(lane);
  return found == lanes_.end() ? 0 : found->second.enqueued;
}

std::vector<LaneView> Executor::Views() const {
  std::vector<LaneView> views;
  for (const Lane* busy : busy_) {
    const Lane& lane = *busy;
    if (lane.runs.empty()) continue;
    const OpenRun& oldest = *lane.runs.front();
    LaneView view{lane.number, oldest.index, oldest.run.what, lane.progress_s, {}};
    for (const std::unique_ptr<Segment>& segment : lane.slots) {
      if (segment == nullptr) continue;
      for (const Transfer& transfer : segment->transfers) {
        if (transfer.request != nullptr) view.peers.push_back(transfer.row->peer);
      }
      if (segment->sparse != nullptr) segment->sparse->AddPeers(&view.peers);
    }
    std::sort(view.peers.begin(), view.peers.end());
    view.peers.erase(std::unique(view.peers.begin(), view.peers.end()), view.peers.end());
    views.push_back(std::move(view));
  }
  return views;
}

}  // namespace hvd_ext

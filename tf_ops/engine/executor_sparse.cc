// The rows of sparse plans in the executor, which hands them to the run (sparse_run.h).
#include <algorithm>
#include <utility>

#include "engine/executor.h"

namespace hvd_ext {

SparseWork Executor::WorkOf(const Segment& segment) {
  const bool staged = static_cast<bool>(segment.staged);
  Device* device = staged ? HostDevice().get() : device_.get();
  return {transport_,
          messages_,
          &scratch_,
          &statistics_.bytes_sent,
          &statistics_.bytes_received,
          segment.plan.get(),
          segment.label,
          device,
          staged ? messages_ : &near_,
          staged ? device->inputs() : segment.queue,
          reinterpret_cast<float*>(staged ? segment.staged.data() : segment.buffer->data()),
          segment.staged_first,
          segment.elements};
}

Status Executor::PostVectors(Segment* segment) {
  const Status posted = segment->sparse->Post(WorkOf(*segment), segment->first_row, segment->next_row);
  return posted.Named(segment->open->run.what);
}

Status Executor::TestVectors(Segment* segment, bool* moved) {
  if (segment->sparse->waiting() == 0) return Status::Ok();
  return segment->sparse->Test(WorkOf(*segment), moved).Named(segment->open->run.what);
}

// Local rows work where the bucket lies, or on the host on a copy of the units of the round, which is copied back.
Status Executor::RunLocalRows(Segment* segment) {
  if (segment->sparse == nullptr) {
    return Internal(segment->open->run.what + ": a sparse plan needs a bucket with error feedback");
  }
  const std::vector<Row>& rows = segment->plan->rows;
  size_t end = segment->next_row;
  int64_t first = segment->plan->units, last = 0;  // units
  bool needs_host = false;
  for (; end < rows.size() && rows[end].round == segment->round; ++end) {
    first = std::min(first, rows[end].begin);
    last = std::max(last, rows[end].begin + rows[end].count);
    needs_host |= !device_->IsHost() && segment->sparse->NeedsHost(device_.get(), rows[end]);
  }
  const int64_t begin = UnitAt(*segment, first), elements = UnitAt(*segment, last) - begin;
  const int64_t nbytes = elements * static_cast<int64_t>(sizeof(float));
  if (needs_host && !segment->staged) {
    segment->staged = messages_->Take(nbytes);
    segment->staged_first = begin;
    segment->queue->Copy(segment->staged.data(), DataOf(*segment, begin), nbytes);
    segment->operation = segment->queue->Last();
  }
  segment->local = true;
  if ((segment->staged || segment->selects) && !IsDone(segment->queue, segment->operation)) return Status::Ok();
  const SparseWork work = WorkOf(*segment);
  for (; segment->next_row < end; ++segment->next_row) {
    const Row& row = rows[segment->next_row];
    if (!segment->selects) {
      HVD_EXT_RETURN_IF_ERROR(segment->sparse->RunLocal(work, row).Named(segment->open->run.what));
    }
    if (row.opcode != Opcode::SELECT) continue;
    segment->selects = true;
    if (!segment->staged) segment->operation = segment->queue->Last();
    if (!IsDone(segment->queue, segment->operation)) return Status::Ok();
    segment->selects = false;
    segment->sparse->Selected(work);
  }
  if (segment->staged) segment->queue->Copy(DataOf(*segment, begin), segment->staged.data(), nbytes);
  segment->staged = Buffer();
  segment->staged_first = 0;
  segment->local = false;
  return Status::Ok();
}

}  // namespace hvd_ext

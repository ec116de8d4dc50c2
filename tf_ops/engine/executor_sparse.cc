// The rows of sparse plans in the executor, which hands them to the run (sparse_run.h).
#include <utility>

#include "engine/executor.h"

namespace hvd_ext {
namespace {

Status Named(const std::string& what, Status status) {
  if (!status.ok()) status.message = what + ": " + status.message;
  return status;
}

}  // namespace

SparseWork Executor::WorkOf(const Segment& segment) {
  return {transport_,
          pool_,
          &scratch_,
          &statistics_.bytes_sent,
          &statistics_.bytes_received,
          segment.plan.get(),
          segment.label,
          reinterpret_cast<float*>(segment.buffer->data()),
          segment.elements};
}

Status Executor::PostVectors(Segment* segment, size_t first, size_t end) {
  return Named(segment->open->run.what, segment->sparse->Post(WorkOf(*segment), first, end));
}

Status Executor::TestVectors(Segment* segment, bool* moved) {
  if (segment->sparse->waiting() == 0) return Status::Ok();
  return Named(segment->open->run.what, segment->sparse->Test(WorkOf(*segment), moved));
}

Status Executor::RunLocalRows(Segment* segment) {
  const std::vector<Row>& rows = segment->plan->rows;
  if (segment->sparse == nullptr) {
    return Internal(segment->open->run.what + ": a sparse plan needs a bucket with error feedback");
  }
  const SparseWork work = WorkOf(*segment);
  for (; segment->next_row < rows.size() && rows[segment->next_row].round == segment->round; ++segment->next_row) {
    HVD_EXT_RETURN_IF_ERROR(Named(segment->open->run.what, segment->sparse->RunLocal(work, rows[segment->next_row])));
  }
  return Status::Ok();
}

}  // namespace hvd_ext

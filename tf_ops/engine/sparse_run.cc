#include "engine/sparse_run.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

namespace hvd_ext {
namespace {

constexpr int64_t kHeadNbytes = static_cast<int64_t>(sizeof(VectorHead));

}  // namespace

Status SparseRun::Post(const SparseWork& work, size_t first, size_t end) {
  messages_.clear();
  waiting_ = 0;
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<VectorMessage>> encoded;  // several peers get the same one
  for (size_t i = first; i < end; ++i) {
    const Row& row = work.plan->rows[i];
    if (!IsSparseMessage(row.opcode)) continue;
    Message message{};
    message.row = &row;
    message.begin = work.ElementAt(row.begin);
    message.elements = work.ElementAt(row.begin + row.count) - message.begin;
    message.sends = row.opcode == Opcode::SEND_SPARSE;
    if (message.elements == 0) continue;  // the peer leaves it out too
    message.head = work.pool->Take(kHeadNbytes);
    if (message.sends) {
      std::shared_ptr<VectorMessage>& content = encoded[{message.begin, message.elements}];
      if (content == nullptr) {
        content = std::make_shared<VectorMessage>(vector_->Write(message.begin, message.elements, work.pool));
        content->head.marks = vector_->marked() ? VectorHead::kNotFinite : 0;
      }
      message.content = content;
      std::memcpy(message.head.data(), &content->head, sizeof(VectorHead));
    } else {
      message.content = std::make_shared<VectorMessage>();
      message.headless = true;
    }
    messages_.push_back(std::move(message));
  }
  waiting_ = messages_.size();
  for (bool sends : {false, true}) {
    for (Message& message : messages_) {
      if (message.sends != sends) continue;
      HVD_EXT_RETURN_IF_ERROR(PostPiece(work, &message, message.head.data(), kHeadNbytes));
    }
  }
  for (Message& message : messages_) {
    if (!message.sends) continue;
    Count(message);
    HVD_EXT_RETURN_IF_ERROR(PostBody(work, &message));
  }
  return Status::Ok();
}

void SparseRun::Count(const Message& message) const {
  counters_->entries += message.content->head.count;
  counters_->value_nbytes += message.content->value_nbytes;
  counters_->index_nbytes += message.content->index_nbytes;
  counters_->head_nbytes += kHeadNbytes;
}

Status SparseRun::PostPiece(const SparseWork& work, Message* message, char* data, int64_t nbytes) {
  std::unique_ptr<Request>* request = &message->requests.emplace_back();
  *(message->sends ? work.bytes_sent : work.bytes_received) += nbytes;
  return message->sends ? work.transport->Send(message->row->peer, work.label, data, nbytes, request)
                        : work.transport->Recv(message->row->peer, work.label, data, nbytes, request);
}

Status SparseRun::PostBody(const SparseWork& work, Message* message) {
  const int64_t nbytes = message->content->head.body_nbytes;
  char* body = message->content->body.data();
  for (int64_t at = 0; at < nbytes; at += kPieceNbytes) {
    HVD_EXT_RETURN_IF_ERROR(PostPiece(work, message, body + at, std::min(kPieceNbytes, nbytes - at)));
  }
  return Status::Ok();
}

Status SparseRun::TestRequests(const SparseWork& work, Message* message, bool* moved) {
  auto& requests = message->requests;
  for (size_t i = 0; i < requests.size();) {
    bool done = false;
    HVD_EXT_RETURN_IF_ERROR(work.transport->Test(requests[i].get(), &done));
    if (!done) {
      ++i;
      continue;
    }
    *moved = true;
    requests.erase(requests.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return Status::Ok();
}

// The head is checked before any memory is taken for the body.
Status SparseRun::TakeHead(const SparseWork& work, Message* message) {
  message->headless = false;
  VectorMessage* content = message->content.get();
  std::memcpy(&content->head, message->head.data(), sizeof(VectorHead));
  HVD_EXT_RETURN_IF_ERROR(vector_->CheckHead(content->head, message->elements));
  if (content->head.body_nbytes == 0) return Status::Ok();
  content->body = work.pool->Take(content->head.body_nbytes);
  return PostBody(work, message);
}

Status SparseRun::Test(const SparseWork& work, bool* moved) {
  if (waiting_ == 0) return Status::Ok();
  blocked_.assign(static_cast<size_t>(work.transport->size()), 0);
  for (Message& message : messages_) {
    if (message.done) continue;
    HVD_EXT_RETURN_IF_ERROR(TestRequests(work, &message, moved));
    char& blocked = blocked_[static_cast<size_t>(message.row->peer)];
    if (message.headless && message.requests.empty() && blocked == 0) {
      HVD_EXT_RETURN_IF_ERROR(TakeHead(work, &message).Named("from rank " + std::to_string(message.row->peer)));
    }
    if (message.headless) blocked = 1;
    if (message.headless || !message.requests.empty()) continue;
    message.done = true;
    --waiting_;
    if (!message.sends) Keep(&message);
  }
  return Status::Ok();
}

// A piece that comes replaces all pieces that it overlaps.
void SparseRun::Keep(Message* message) {
  const Row& row = *message->row;
  std::map<int64_t, Piece>& pieces = came_[row.peer];
  auto at = pieces.lower_bound(row.begin);
  if (at != pieces.begin() && std::prev(at)->first + std::prev(at)->second.count > row.begin) --at;
  while (at != pieces.end() && at->first < row.begin + row.count) at = pieces.erase(at);
  pieces[row.begin] = {row.count, std::move(message->content)};
}

void SparseRun::AddPeers(std::vector<int>* peers) const {
  for (const Message& message : messages_) {
    if (!message.done) peers->push_back(message.row->peer);
  }
}

// Null where the units hold no element, for which no message comes.
const VectorMessage* SparseRun::Find(const Row& row) const {
  auto peer = came_.find(row.peer);
  if (peer == came_.end()) return nullptr;
  auto piece = peer->second.find(row.begin);
  return piece == peer->second.end() ? nullptr : piece->second.content.get();
}

VectorWork SparseRun::VectorWorkOf(const SparseWork& work) const {
  const uint64_t seed = feedback_->spec().seed + static_cast<uint64_t>(step_) * 0x9e3779b97f4a7c15u;
  return {topk_, seed, work.scratch, work.pool, work.device, work.near, work.queue};
}

Status SparseRun::RunLocal(const SparseWork& work, const Row& row) {
  const int64_t begin = work.ElementAt(row.begin), elements = work.ElementAt(row.begin + row.count) - begin;
  float* units = work.data + (begin - work.first);
  const VectorWork vector_work = VectorWorkOf(work);
  switch (row.opcode) {
    case Opcode::SELECT:
      vector_->Select(vector_work, units);
      return Status::Ok();
    case Opcode::FOLD:
      feedback_->Fold(work.queue, topk_, units);
      return Status::Ok();
    case Opcode::CLEAR:
      work.queue->Clear(units, elements * static_cast<int64_t>(sizeof(float)));
      return Status::Ok();
    case Opcode::SCATTER_ADD: {
      if (elements == 0) return Status::Ok();
      bool marked = false;
      if (row.peer == work.transport->rank()) {
        vector_->Add(vector_work, begin, elements, units);
        marked = vector_->marked();
      } else if (const VectorMessage* message = Find(row)) {
        HVD_EXT_RETURN_IF_ERROR(vector_->Add(vector_work, *message, units, elements));
        marked = (message->head.marks & VectorHead::kNotFinite) != 0;
      }
      if (marked) {
        const Buffer message = work.pool->Take(sizeof(float));
        *reinterpret_cast<float*>(message.data()) = std::numeric_limits<float>::quiet_NaN();
        work.queue->Copy(units, message.data(), sizeof(float));
      }
      return Status::Ok();
    }
    case Opcode::RESELECT:
      return vector_->Reselect(vector_work, begin, elements, units);
    case Opcode::PACK:
      return vector_->Pack(vector_work, begin, elements, units);
    case Opcode::TAKE:
      return vector_->Take(vector_work, Find(row), begin, elements);
    case Opcode::MERGE: {
      const VectorMessage* message = Find(row);
      return message == nullptr ? Status::Ok() : vector_->Merge(vector_work, *message, begin, elements);
    }
    default:
      return Internal("a plan holds an opcode that is not a local row's");
  }
}

}  // namespace hvd_ext

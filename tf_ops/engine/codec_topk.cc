// The largest elements of a shard (kernels/topk.h), as entries (sparse_vector.h).
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "engine/codec.h"
#include "engine/sparse_vector.h"

namespace hvd_ext {
namespace {

class TopKCodec : public VectorCodec {
 public:
  explicit TopKCodec(std::shared_ptr<Feedback> feedback) : feedback_(std::move(feedback)) {}

  void Select(const VectorWork& work, const float* shard) override {
    const std::vector<int64_t>& cuts = feedback_->cuts();
    const SparseSpec& spec = feedback_->spec();
    const TopKOptions options{spec.selector, spec.samplings, work.seed, spec.threshold};
    selection_ = {options, feedback_->Arrays(work.step, shard), {}};
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t k = feedback_->EntriesIn(work.step.density, i);
      selection_.segments.push_back({cuts[i] - cuts.front(), cuts[i + 1] - cuts[i], k});
    }
    own_.Reserve(feedback_->EntriesAt(work.step.density), work.pool);
    own_.wire = spec.value_wire.value_or(DType::kFloat32);
    counts_.assign(selection_.segments.size(), 0);
    not_finite_ = work.pool->Take(sizeof(int32_t));
    const Buffer workspace = work.near->Take(work.device->WorkspaceNbytes(selection_));
    work.queue->TopKErrorFeedback(selection_, work.scratch, workspace.data(), counts_.data(), own_.position(),
                                  own_.value(), reinterpret_cast<int32_t*>(not_finite_.data()));
  }

  // Rounds the picks; what that takes from them returns to the residual.
  void Selected(const VectorWork& work) override {
    marked_ = *reinterpret_cast<const int32_t*>(not_finite_.data()) != 0;
    SparseVector left;
    if (own_.wire != DType::kFloat32) left.Reserve(selection_.picks(), work.pool);
    const int64_t begin = feedback_->shard().begin;
    int64_t place = 0;  // of a segment's picks
    for (size_t s = 0; s < counts_.size(); ++s) {
      for (int64_t i = place; i < place + counts_[s]; ++i) {
        const int32_t position = static_cast<int32_t>(begin + own_.position()[i]);
        const float value = own_.value()[i], sent = Put(position, value);
        if (sent == value || own_.wire == DType::kFloat32) continue;
        left.position()[left.count] = position;
        left.value()[left.count++] = value - sent;
      }
      place += selection_.segments[s].k;
    }
    feedback_->Return(work.queue, left.position(), left.value(), left.count);
  }

  VectorMessage Write(int64_t begin, int64_t elements, BufferPool* pool) const override {
    return EncodeSparse(own_, begin, elements, feedback_->spec().indices, pool);
  }

  Status CheckHead(const VectorHead& head, int64_t elements) const override { return CheckSparseHead(head, elements); }

  void Add(const VectorWork& work, int64_t begin, int64_t elements, float* data) const override {
    const int64_t first = own_.Find(begin), count = own_.Find(begin + elements) - first;
    work.queue->AddEntries(data, elements, begin, own_.position() + first, own_.value() + first, count);
  }

  Status Add(const VectorWork& work, const VectorMessage& message, float* data, int64_t elements) const override {
    if (work.device->IsHost()) return AddSparse(message.head, message.body.data(), data, elements);
    SparseVector vector;
    HVD_EXT_RETURN_IF_ERROR(DecodeSparse(message.head, message.body.data(), 0, elements, work.pool, &vector));
    work.queue->AddEntries(data, elements, 0, vector.position(), vector.value(), vector.count);
    return Status::Ok();
  }

  Status Pack(const VectorWork& work, int64_t begin, int64_t elements, float* data) override {
    int64_t count = 0;
    for (int64_t i = 0; i < elements; ++i) count += (BitsOf(data[i]) & 0x7fffffffu) != 0;
    own_.Reserve(count, work.pool);
    own_.wire = DType::kFloat32;
    marked_ = false;
    for (int64_t i = 0; i < elements; ++i) {
      if ((BitsOf(data[i]) & 0x7fffffffu) == 0) {
        data[i] = 0;
        continue;
      }
      own_.position()[own_.count] = static_cast<int32_t>(begin + i);
      own_.value()[own_.count++] = data[i];
    }
    return Status::Ok();
  }

  Status Take(const VectorWork& work, const VectorMessage* message, int64_t begin, int64_t elements) override {
    own_ = SparseVector();
    marked_ = message != nullptr && (message->head.marks & VectorHead::kNotFinite) != 0;
    if (message == nullptr) return Status::Ok();  // of units without elements
    return DecodeSparse(message->head, message->body.data(), begin, elements, work.pool, &own_);
  }

  Status Merge(const VectorWork& work, const VectorMessage& message, int64_t begin, int64_t elements) override {
    SparseVector other, sum;
    HVD_EXT_RETURN_IF_ERROR(DecodeSparse(message.head, message.body.data(), begin, elements, work.pool, &other));
    sum.Reserve(own_.count + other.count, work.pool);
    sum.wire = own_.wire;
    marked_ |= (message.head.marks & VectorHead::kNotFinite) != 0;
    auto put = [&sum](int32_t position, float value) {
      sum.position()[sum.count] = position;
      sum.value()[sum.count++] = value;
    };
    for (int64_t i = 0, j = 0; i < own_.count || j < other.count;) {
      const int64_t mine = i < own_.count ? own_.position()[i] : std::numeric_limits<int64_t>::max();
      const int64_t theirs = j < other.count ? other.position()[j] : std::numeric_limits<int64_t>::max();
      if (mine == theirs) {
        put(static_cast<int32_t>(mine), own_.value()[i++] + other.value()[j++]);
      } else if (mine < theirs) {
        put(static_cast<int32_t>(mine), own_.value()[i++]);
      } else {
        put(static_cast<int32_t>(theirs), other.value()[j++]);
      }
    }
    return Shorten(work, std::move(sum));
  }

 private:
  // Puts a pick behind the entries, and returns it as it is sent. A pick is not read again.
  float Put(int64_t position, float value) {
    const float sent = RoundForWire(own_.wire, value);
    marked_ |= IsTooLarge(value, sent);
    own_.position()[own_.count] = static_cast<int32_t>(position);
    own_.value()[own_.count++] = sent;
    return sent;
  }

  // Keeps the largest entries of a sum, as many as a step selects.
  Status Shorten(const VectorWork& work, SparseVector sum) {
    const int64_t k = std::min(sum.count, feedback_->EntriesAt(work.step.density));
    TopKSegment all{0, sum.count, k};
    Buffer picks = work.pool->Take(k * 4);
    auto* pick = reinterpret_cast<int32_t*>(picks.data());
    int64_t count = 0;
    bool not_finite = false;
    TopK(TopKOptions{}, DType::kFloat32, sum.value(), &all, 1, work.scratch, nullptr, &count, pick, /*wide=*/false,
         nullptr, &not_finite);
    marked_ |= not_finite;
    own_ = std::move(sum);
    const int64_t entries = std::exchange(own_.count, 0);
    for (int64_t i = 0; i < entries; ++i) {
      const int32_t position = own_.position()[i];
      const float value = own_.value()[i];
      if (own_.count == k || pick[own_.count] != i) {
        if (value != 0) feedback_->Return(position, value);
      } else if (const float sent = Put(position, value); sent != value) {
        feedback_->Return(position, value - sent);
      }
    }
    return Status::Ok();
  }

  const std::shared_ptr<Feedback> feedback_;
  SparseVector own_;
  Selection selection_;          // from Select to Selected
  std::vector<int64_t> counts_;  // of the picks of each segment
  Buffer not_finite_;            // whether one is not finite
};

const VectorCodecNamed<TopKCodec> topk_named("topk");

}  // namespace
}  // namespace hvd_ext

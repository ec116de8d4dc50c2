// Numbers of 8, 4 or 1 bits with a scale for each block (kernels/quantize.h), and error feedback. A message has the
// blocks that its elements lie in: first the scales, then the numbers.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/codec.h"
#include "kernels/quantize.h"

namespace hvd_ext {
namespace {

constexpr int32_t kQuantized = 0x51 << 24;  // VectorHead::form, with the bits and the place in the first block
constexpr int64_t kPiece = 1 << 14;         // elements of a sum that are quantised at once

class QuantizedCodec : public VectorCodec {
 public:
  explicit QuantizedCodec(std::shared_ptr<Feedback> feedback)
      : feedback_(std::move(feedback)), how_{feedback_->spec().bits, feedback_->spec().block} {}

  void Select(const VectorWork& work, const float* shard) override {
    const int64_t elements = feedback_->shard().elements;
    const ErrorFeedback arrays = feedback_->Arrays(work.step, shard);
    parts_.clear();
    Part* part = AddPart(feedback_->shard().begin, elements, work.pool);
    marked_ = !Quantize(how_, elements, arrays.residual, arrays.gradient, part->Scales(), part->Numbers(),
                        arrays.next_residual);
    is_sum_ = false;
  }

  // What is not sent of a sum returns to the residual of the rank that quantises it.
  Status Reselect(const VectorWork& work, int64_t begin, int64_t elements, const float* data) override {
    if (!is_sum_) parts_.clear();
    is_sum_ = true;
    if (elements == 0) return Status::Ok();  // another part may begin at the same element
    Part* part = AddPart(begin, elements, work.pool);
    const int64_t piece = kPiece / how_.block * how_.block;
    std::vector<float> left(static_cast<size_t>(std::min(piece, elements)));
    for (int64_t at = 0; at < elements; at += piece) {
      const int64_t count = std::min(piece, elements - at), block = at / how_.block;
      marked_ |= !Quantize(how_, count, data + at, nullptr, part->Scales() + block,
                           part->Numbers() + block * how_.BlockNbytes(), left.data());
      feedback_->Return(begin + at, count, left.data());
    }
    return Status::Ok();
  }

  VectorMessage Write(int64_t begin, int64_t elements, BufferPool* pool) const override {
    VectorMessage message;
    message.head.count = elements;
    message.head.form = kQuantized | how_.bits << 16;
    if (elements == 0) return message;
    const Part& part = Find(begin);
    const int64_t first = (begin - part.begin) / how_.block, place = (begin - part.begin) % how_.block;
    const int64_t blocks = how_.Blocks(place + elements);
    message.head.form |= static_cast<int32_t>(place);
    message.value_nbytes = message.head.body_nbytes = BodyNbytes(place, elements);
    message.body = pool->Take(message.head.body_nbytes);
    char* to = message.body.data();
    std::memcpy(to, part.Scales() + first, static_cast<size_t>(2 * blocks));
    std::memcpy(to + 2 * blocks, part.Numbers() + first * how_.BlockNbytes(),
                static_cast<size_t>(blocks * how_.BlockNbytes()));
    return message;
  }

  Status CheckHead(const VectorHead& head, int64_t elements) const override {
    if (head.magic != VectorHead::kMagic) return DamagedVector("it does not begin with a header");
    const int64_t place = head.form & 0xffff;
    if ((head.form & ~0xffff) == (kQuantized | how_.bits << 16) && place < how_.block && head.count == elements &&
        head.body_nbytes == BodyNbytes(place, elements)) {
      return Status::Ok();
    }
    return DamagedVector("it must have " + std::to_string(elements) + " numbers of " + std::to_string(how_.bits) +
                         " bits; it has " + std::to_string(head.count) + " in " + std::to_string(head.body_nbytes) +
                         " bytes, form " + std::to_string(head.form));
  }

  void Add(const VectorWork&, int64_t begin, int64_t elements, float* data) const override {
    if (elements == 0) return;
    const Part& part = Find(begin);
    AddQuantized(how_, part.Scales(), part.Numbers(), begin - part.begin, elements, data);
  }

  Status Add(const VectorWork&, const VectorMessage& message, float* data, int64_t elements) const override {
    const int64_t place = message.head.form & 0xffff, blocks = how_.Blocks(place + elements);
    const auto* scales = reinterpret_cast<const uint16_t*>(message.body.data());
    if (!std::all_of(scales, scales + blocks, IsScale)) return DamagedVector("a scale must be finite and at least 0");
    AddQuantized(how_, scales, reinterpret_cast<const unsigned char*>(scales + blocks), place, elements, data);
    return Status::Ok();
  }

 private:
  // Elements from `begin` of the bucket, in blocks of their own.
  struct Part {
    int64_t begin = 0, blocks = 0;
    Buffer body;

    uint16_t* Scales() const { return reinterpret_cast<uint16_t*>(body.data()); }
    unsigned char* Numbers() const { return reinterpret_cast<unsigned char*>(Scales() + blocks); }
  };

  int64_t BodyNbytes(int64_t place, int64_t elements) const {
    return elements == 0 ? 0 : how_.Blocks(place + elements) * (2 + how_.BlockNbytes());
  }

  Part* AddPart(int64_t begin, int64_t elements, BufferPool* pool) {
    Part& part = parts_[begin];
    part = {begin, how_.Blocks(elements), pool->Take(how_.Blocks(elements) * (2 + how_.BlockNbytes()))};
    return &part;
  }

  // A plan only reads elements that are in the vector (hvd_ext/planning/verify_sparse.py).
  const Part& Find(int64_t begin) const { return std::prev(parts_.upper_bound(begin))->second; }

  const std::shared_ptr<Feedback> feedback_;
  const Quantization how_;
  std::map<int64_t, Part> parts_;  // by their begins
  bool is_sum_ = false;            // parts_ are those of Reselect
};

const VectorCodecNamed<QuantizedCodec> quantized_named("quantized");

}  // namespace
}  // namespace hvd_ext

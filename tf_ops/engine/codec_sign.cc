// Signs with error feedback: each element of a = residual + gradient is sent as a bit, and with them one scale, the
// mean of |a| over the shard (EF-signSGD: Karimireddy et al., ICML 2019, algorithm 1). The residual keeps a - scale
// sign(a).
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "engine/codec.h"
#include "kernels/half.h"

namespace hvd_ext {
namespace {

constexpr int32_t kSigns = 0x516e;  // VectorHead::form
constexpr int64_t kScaleNbytes = static_cast<int64_t>(sizeof(float));
constexpr int64_t kBlock = 1 << 16;  // elements whose |a| are added in one float64, whatever divides the shard

int64_t BitsNbytes(int64_t elements) { return (elements + 7) / 8; }
int64_t BodyNbytes(int64_t elements) { return elements == 0 ? 0 : kScaleNbytes + BitsNbytes(elements); }

// to[i] = bits [first + 8 i, first + 8 i + 8) of `from`; those beyond `elements` are 0.
void CopyBits(const unsigned char* from, int64_t first, int64_t elements, unsigned char* to) {
  const int shift = static_cast<int>(first % 8);
  from += first / 8;
  const int64_t nbytes = BitsNbytes(elements), last = (shift + elements - 1) / 8;
  for (int64_t i = 0; i < nbytes; ++i) {
    const int next = shift > 0 && i < last ? from[i + 1] : 0;
    to[i] = static_cast<unsigned char>(from[i] >> shift | next << (8 - shift));
  }
  if (elements % 8 != 0) to[nbytes - 1] &= static_cast<unsigned char>((1 << elements % 8) - 1);
}

// data[i] += scale, or -= scale where bit i is set
void AddSigns(const unsigned char* bits, float scale, int64_t elements, float* data) {
  const uint32_t magnitude = BitsOf(scale);
  const int64_t whole = elements / 8;
  for (int64_t byte = 0; byte < whole; ++byte) {
    const uint32_t eight = bits[byte];
    float* to = data + 8 * byte;
    for (uint32_t j = 0; j < 8; ++j) to[j] += FloatOf(magnitude | (eight >> j & 1) << 31);
  }
  for (int64_t i = 8 * whole; i < elements; ++i) {
    data[i] += FloatOf(magnitude | static_cast<uint32_t>(bits[i / 8] >> i % 8 & 1) << 31);
  }
}

class SignCodec : public VectorCodec {
 public:
  explicit SignCodec(std::shared_ptr<Feedback> feedback) : feedback_(std::move(feedback)) {}

  void Select(const VectorWork& work, const float* shard) override {
    begin_ = feedback_->shard().begin;
    const int64_t elements = feedback_->shard().elements;
    const ErrorFeedback arrays = feedback_->Arrays(work.step, shard);
    float* a = arrays.next_residual;
    double sum = 0;
    for (int64_t block = 0; block < elements; block += kBlock) {
      const int64_t end = std::min(block + kBlock, elements);
      double lanes[8] = {};
      for (int64_t i = block; i < end; ++i) {
        a[i] = arrays.residual[i] + arrays.gradient[i];
        lanes[i % 8] += std::fabs(static_cast<double>(a[i]));
      }
      for (double lane : lanes) sum += lane;
    }
    marked_ = !std::isfinite(sum);
    scale_ = marked_ || elements == 0 ? 0 : static_cast<float>(sum / static_cast<double>(elements));
    bits_ = work.pool->Take(BitsNbytes(elements));
    auto* bits = Bits();
    for (int64_t i = 0; i < elements; i += 8) {
      unsigned byte = 0;
      const int64_t count = std::min<int64_t>(8, elements - i);
      for (int64_t j = 0; j < count; ++j) {
        const uint32_t sign = BitsOf(a[i + j]) & 0x80000000u;
        byte |= sign >> 31 << j;
        a[i + j] -= FloatOf(BitsOf(scale_) | sign);
      }
      bits[i / 8] = static_cast<unsigned char>(byte);
    }
  }

  VectorMessage Write(int64_t begin, int64_t elements, BufferPool* pool) const override {
    VectorMessage message;
    message.head.count = elements;
    message.head.form = kSigns;
    message.value_nbytes = message.head.body_nbytes = BodyNbytes(elements);
    message.body = pool->Take(message.head.body_nbytes);
    if (elements == 0) return message;
    std::memcpy(message.body.data(), &scale_, sizeof(scale_));
    CopyBits(Bits(), begin - begin_, elements, reinterpret_cast<unsigned char*>(message.body.data()) + kScaleNbytes);
    return message;
  }

  Status CheckHead(const VectorHead& head, int64_t elements) const override {
    if (head.magic != VectorHead::kMagic) return DamagedVector("it does not begin with a header");
    if (head.form == kSigns && head.count == elements && head.body_nbytes == BodyNbytes(elements)) return Status::Ok();
    return DamagedVector("it must have the signs of " + std::to_string(elements) + " elements in " +
                         std::to_string(BodyNbytes(elements)) + " bytes; it has " + std::to_string(head.count) +
                         " in " + std::to_string(head.body_nbytes) + ", form " + std::to_string(head.form));
  }

  void Add(const VectorWork&, int64_t begin, int64_t elements, float* data) const override {
    std::vector<unsigned char> bits(static_cast<size_t>(BitsNbytes(elements)));
    CopyBits(Bits(), begin - begin_, elements, bits.data());
    AddSigns(bits.data(), scale_, elements, data);
  }

  Status Add(const VectorWork&, const VectorMessage& message, float* data, int64_t elements) const override {
    float scale = 0;
    std::memcpy(&scale, message.body.data(), sizeof(scale));
    if (!(scale >= 0 && std::isfinite(scale))) {
      return DamagedVector("its scale (" + std::to_string(scale) + ") must be finite and at least 0");
    }
    AddSigns(reinterpret_cast<const unsigned char*>(message.body.data()) + kScaleNbytes, scale, elements, data);
    return Status::Ok();
  }

 private:
  unsigned char* Bits() const { return reinterpret_cast<unsigned char*>(bits_.data()); }

  const std::shared_ptr<Feedback> feedback_;
  int64_t begin_ = 0;  // of the shard
  float scale_ = 0;
  Buffer bits_;  // of the shard's elements: 1 where `a` is negative
};

const VectorCodecNamed<SignCodec> sign_named("sign");

}  // namespace
}  // namespace hvd_ext

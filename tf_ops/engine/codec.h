// How a bucket's values are written into messages. Two kinds of codecs, one for each kind of rows (plan/ir.def):
// - A DenseCodec writes the elements of SEND, RECV and RECV_REDUCE: as they are, or as halves.
// - A VectorCodec writes a rank's vector of a shard, which SELECT makes from the sum and the residual: the largest
//   elements (codec_topk.cc), numbers of few bits (codec_quantized.cc), or signs (codec_sign.cc). What it does not send
//   stays in the residual.
// A codec with error feedback is one file; VectorCodecNamed makes it known.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/status.h"
#include "engine/buffer_pool.h"
#include "engine/device.h"
#include "engine/error_feedback.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"
#include "plan/plan.h"

namespace hvd_ext {

// Its work on the buffer is queued (device.h).
class DenseCodec {
 public:
  virtual ~DenseCodec() = default;
  // Whether a message has the bytes of the buffer. If so, and if the buffer lies in the host's memory, it is sent from
  // there, received there, and added from the peer's memory.
  virtual bool IsPlain() const { return false; }
  // Whether messages say how many ranks' values their sums have.
  virtual bool CountsTerms() const { return false; }
  virtual int64_t Nbytes(int64_t elements) const = 0;
  // `data` becomes what the message says, so that the sender and the receivers continue with the same bits.
  virtual void Write(Queue* queue, char* message, char* data, int64_t elements, int32_t terms) const = 0;
  virtual int32_t Terms(const char* /*message*/, int64_t /*elements*/) const { return 1; }
  virtual void Read(Queue* queue, const char* message, char* data, int64_t elements) const = 0;
  virtual void Combine(Queue* queue, const char* message, char* data, int64_t elements) const = 0;
  // At the end of a segment, in which the values of all ranks are added up: what ranks have sent on is rounded, and
  // now it is on all ranks.
  virtual void Finish(Queue* queue, char* data, int64_t elements, int ranks) const = 0;
};

// `wire`: float16 or bfloat16, in which float32 is sent and added in float32.
std::unique_ptr<const DenseCodec> MakeDenseCodec(DType dtype, std::optional<DType> wire, ReduceOp op);

// Precedes the body of each message of a vector. A receiver checks it before it takes memory for the body.
struct VectorHead {
  static constexpr uint32_t kMagic = 0x70cc5e1f;
  static constexpr uint32_t kNotFinite = 1;

  int64_t body_nbytes = 0;
  int64_t count = 0;   // entries
  int32_t values = 0;  // the dtype of the values
  int32_t form = 0;    // the codec's
  uint32_t marks = 0;  // of the run: SparseRun sets them
  uint32_t magic = kMagic;
};
static_assert(sizeof(VectorHead) == 32, "the head is sent as it is");

struct VectorMessage {
  VectorHead head;
  Buffer body;
  int64_t value_nbytes = 0, index_nbytes = 0;  // of the body
};

Status DamagedVector(const std::string& what);

// What the rows of vectors work with.
struct VectorWork {
  TopKStep step;
  uint64_t seed = 0;  // another one in each step
  TopKScratch* scratch = nullptr;
  BufferPool* pool = nullptr;  // of messages
  Device* device = nullptr;    // in whose memory the bucket lies here
  BufferPool* near = nullptr;  // of its memory
  Queue* queue = nullptr;      // of the device, for all work on the bucket
};

// The vector of one run. Ranges are elements of the bucket. Its values lie in the memory of the work's device, which is
// the host but for codecs that KeepsFeedback (error_feedback.h) names; there, work on them is queued.
class VectorCodec {
 public:
  virtual ~VectorCodec() = default;

  // Makes the vector from the shard in the bucket's buffer and from the residual, and writes the next residual.
  // Selected is called when that has ended, and before the vector is used.
  virtual void Select(const VectorWork& work, const float* shard) = 0;
  virtual void Selected(const VectorWork& /*work*/) {}
  // Writes the part in [begin, begin + elements).
  virtual VectorMessage Write(int64_t begin, int64_t elements, BufferPool* pool) const = 0;
  // Refuses a head that no message about `elements` elements has. A head that passes bounds the body's length.
  virtual Status CheckHead(const VectorHead& head, int64_t elements) const = 0;
  // Adds the own vector, or a message, to the elements that it is about.
  virtual void Add(const VectorWork& work, int64_t begin, int64_t elements, float* data) const = 0;
  virtual Status Add(const VectorWork& work, const VectorMessage& message, float* data, int64_t elements) const = 0;
  // A value was not finite when the vector was made.
  bool marked() const { return marked_; }

  // Plans with RESELECT, PACK, TAKE or MERGE need a codec that has them. RESELECT makes the vector of sums, piece by
  // piece, and returns what it does not send to the residual. PACK makes the vector of what is not zero; TAKE makes it
  // from a message; MERGE adds a message, keeps as many entries as a step selects, and returns the rest to the
  // residual.
  virtual Status Reselect(const VectorWork& work, int64_t begin, int64_t elements, const float* data);
  virtual Status Pack(const VectorWork& work, int64_t begin, int64_t elements, float* data);
  virtual Status Take(const VectorWork& work, const VectorMessage* message, int64_t begin, int64_t elements);
  virtual Status Merge(const VectorWork& work, const VectorMessage& message, int64_t begin, int64_t elements);

 protected:
  bool marked_ = false;
};

using VectorCodecMaker = std::unique_ptr<VectorCodec> (*)(std::shared_ptr<Feedback> feedback);

// Of the codec that the feedback's specification names; null if there is none.
std::unique_ptr<VectorCodec> MakeVectorCodec(std::shared_ptr<Feedback> feedback);
bool IsVectorCodec(const std::string& name);

void AddVectorCodec(const char* name, VectorCodecMaker make);
// A static one in a codec's file makes it known by its name: that of its file in hvd_ext/compression.
template <typename Codec>
struct VectorCodecNamed {
  explicit VectorCodecNamed(const char* name) {
    AddVectorCodec(name, [](std::shared_ptr<Feedback> feedback) -> std::unique_ptr<VectorCodec> {
      return std::make_unique<Codec>(std::move(feedback));
    });
  }
};

}  // namespace hvd_ext

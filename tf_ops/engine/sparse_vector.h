// Vectors of entries (position, value), and how they travel: a head of fixed size, then a body whose length the head
// says. Positions in a message count from the first element of the units that it is about.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/status.h"
#include "engine/buffer_pool.h"
#include "engine/engine.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext {

struct SparseVector {
  int64_t count = 0;
  Buffer positions;              // int32, elements of the bucket, ascending
  Buffer values;                 // float32
  DType wire = DType::kFloat32;  // holds the values exactly
  bool marked = false;           // a value was not finite when the vector was made

  // Makes room for `most` entries and drops those that are there.
  void Reserve(int64_t most, BufferPool* pool);
  int32_t* position() const { return reinterpret_cast<int32_t*>(positions.data()); }
  float* value() const { return reinterpret_cast<float*>(values.data()); }
  // The index of the first entry at an element or behind it.
  int64_t Find(int64_t element) const {
    return count == 0 ? 0 : std::lower_bound(position(), position() + count, element) - position();
  }
};

struct SparseHead {
  static constexpr uint32_t kMagic = 0x70cc5e1f;
  static constexpr uint32_t kNotFinite = 1;

  int64_t body_nbytes = 0;
  int64_t count = 0;
  DType values = DType::kFloat32;
  SparseIndices indices = SparseIndices::kRaw;
  uint32_t marks = 0;
  uint32_t magic = kMagic;
};
static_assert(sizeof(SparseHead) == 32, "the head is what travels");

// The body holds the values, then the positions in one of three forms: as int32; as gaps, which are the first position
// and then the distance to each next one less 1, in groups of 7 bits, low ones first, with an eighth bit that says
// whether more follow; or as a bitmap, a bit for each element, low ones first.
struct SparseMessage {
  SparseHead head;
  Buffer body;
  int64_t value_nbytes = 0, index_nbytes = 0;
};

// Encodes the entries of [begin, begin + elements), with the form of positions that is asked for. For kSmallest it
// takes the shortest form, and of two that are equally short the one that is named first above.
SparseMessage EncodeSparse(const SparseVector& vector, int64_t begin, int64_t elements, SparseIndices indices,
                           BufferPool* pool);

// Refuses a head that no message about `elements` elements can have. A head that passes bounds the body's length.
Status CheckHead(const SparseHead& head, int64_t elements);

// Decodes the entries of a message about [begin, begin + elements).
Status DecodeSparse(const SparseHead& head, const char* body, int64_t begin, int64_t elements, BufferPool* pool,
                    SparseVector* vector);
// Adds every entry: data[position] += value. Where it fails, some have been added.
Status AddSparse(const SparseHead& head, const char* body, float* data, int64_t elements);

// The value as it travels: rounded to nearest, ties to even, and no larger than the largest finite number, so that the
// rest (value - result) is exact in float32. A value that is not finite stays as it is.
float RoundForWire(DType wire, float value);
// From 2^39 on, float16 cannot take a part of a value whose rest is exact in float32. Such a value would be selected in
// every step and never get smaller, so it counts as not finite.
inline bool IsTooLarge(float value, float rounded) { return rounded == 0 && std::fabs(value) > 1; }

}  // namespace hvd_ext

// Vectors of entries (position, value), and how they are sent. Positions in a message count from the first element of
// the range that it is about.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/status.h"
#include "engine/buffer_pool.h"
#include "engine/codec.h"
#include "engine/engine.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

namespace hvd_ext {

struct SparseVector {
  int64_t count = 0;
  Buffer positions;              // int32, elements of the bucket, ascending
  Buffer values;                 // float32
  DType wire = DType::kFloat32;  // holds the values exactly

  // Makes room for `most` entries and drops those that are there.
  void Reserve(int64_t most, BufferPool* pool);
  int32_t* position() const { return reinterpret_cast<int32_t*>(positions.data()); }
  float* value() const { return reinterpret_cast<float*>(values.data()); }
  // The index of the first entry at an element or behind it.
  int64_t Find(int64_t element) const {
    return count == 0 ? 0 : std::lower_bound(position(), position() + count, element) - position();
  }
};

inline DType ValuesOf(const VectorHead& head) { return static_cast<DType>(head.values); }
inline SparseIndices IndicesOf(const VectorHead& head) { return static_cast<SparseIndices>(head.form); }

// The body holds the values, then the positions in one of three forms: as int32; as gaps, which are the first position
// and then the distance to each next one less 1, in groups of 7 bits, low ones first, with an eighth bit that says
// whether more follow; or as a bitmap, a bit for each element, low ones first.
// Encodes the entries of [begin, begin + elements), with the form of positions that is asked for. For kSmallest it
// takes the shortest form, and of two that are equally short the one that is named first above.
VectorMessage EncodeSparse(const SparseVector& vector, int64_t begin, int64_t elements, SparseIndices indices,
                           BufferPool* pool);

// Refuses a head that no message about `elements` elements can have. A head that passes bounds the body's length.
Status CheckSparseHead(const VectorHead& head, int64_t elements);

// Decodes the entries of a message about [begin, begin + elements).
Status DecodeSparse(const VectorHead& head, const char* body, int64_t begin, int64_t elements, BufferPool* pool,
                    SparseVector* vector);
// Adds every entry: data[position] += value. Where it fails, some have been added.
Status AddSparse(const VectorHead& head, const char* body, float* data, int64_t elements);

// The value as it travels: rounded to nearest, ties to even, and no larger than the largest finite number, so that the
// rest (value - result) is exact in float32. A value that is not finite stays as it is.
float RoundForWire(DType wire, float value);
// From 2^39 on, float16 cannot take a part of a value whose rest is exact in float32. Such a value would be selected in
// every step and never get smaller, so it counts as not finite.
inline bool IsTooLarge(float value, float rounded) { return rounded == 0 && std::fabs(value) > 1; }

}  // namespace hvd_ext

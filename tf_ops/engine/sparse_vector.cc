#include "engine/sparse_vector.h"

#include <cmath>

namespace hvd_ext {
namespace {

constexpr int64_t kLongestGap = 5;  // bytes of a gap below 2^31

int64_t GapNbytes(uint32_t gap) {
  int64_t nbytes = 1;
  for (; gap >= 0x80; gap >>= 7) ++nbytes;
  return nbytes;
}

int64_t BitmapNbytes(int64_t elements) { return (elements + 7) / 8; }

int64_t GapsNbytes(const int32_t* positions, int64_t count, int64_t begin) {
  int64_t nbytes = 0, expected = begin;
  for (int64_t i = 0; i < count; ++i) {
    nbytes += GapNbytes(static_cast<uint32_t>(positions[i] - expected));
    expected = positions[i] + int64_t{1};
  }
  return nbytes;
}

void WriteValues(DType wire, const float* values, int64_t count, char* to) {
  if (wire == DType::kFloat32) {
    std::memcpy(to, values, static_cast<size_t>(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = wire == DType::kFloat16 ? ToFloat16(values[i]).bits : ToBFloat16(values[i]).bits;
    std::memcpy(to + 2 * i, &bits, 2);
  }
}

float ReadValue(DType wire, const char* from, int64_t i) {
  if (wire == DType::kFloat32) {
    float value;
    std::memcpy(&value, from + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from + 2 * i, 2);
  return wire == DType::kFloat16 ? ToFloat(Float16{bits}) : ToFloat(BFloat16{bits});
}

void WriteIndices(SparseIndices form, const int32_t* positions, int64_t count, int64_t begin, int64_t nbytes,
                  char* to) {
  if (form == SparseIndices::kRaw) {
    for (int64_t i = 0; i < count; ++i) {
      int32_t position = static_cast<int32_t>(positions[i] - begin);
      std::memcpy(to + 4 * i, &position, 4);
    }
    return;
  }
  if (form == SparseIndices::kBitmap) {
    std::memset(to, 0, static_cast<size_t>(nbytes));
    for (int64_t i = 0; i < count; ++i) {
      int64_t position = positions[i] - begin;
      to[position / 8] = static_cast<char>(to[position / 8] | 1 << position % 8);
    }
    return;
  }
  int64_t expected = begin;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t gap = static_cast<uint32_t>(positions[i] - expected);
    for (; gap >= 0x80; gap >>= 7) *to++ = static_cast<char>(gap | 0x80);
    *to++ = static_cast<char>(gap);
    expected = positions[i] + int64_t{1};
  }
}

// Calls use(i, position) for each entry, ascending; every position is below `elements`.
template <typename Use>
Status ForEachPosition(const VectorHead& head, const char* indices, int64_t nbytes, int64_t elements, Use use) {
  if (IndicesOf(head) == SparseIndices::kRaw) {
    int64_t last = -1;
    for (int64_t i = 0; i < head.count; ++i) {
      int32_t position;
      std::memcpy(&position, indices + 4 * i, 4);
      if (position <= last || position >= elements) {
        return DamagedVector("position " + std::to_string(position) + " must be in (" + std::to_string(last) + ", " +
                             std::to_string(elements) + ")");
      }
      last = position;
      use(i, int64_t{position});
    }
    return Status::Ok();
  }
  if (IndicesOf(head) == SparseIndices::kBitmap) {
    int64_t i = 0;
    for (int64_t byte = 0; byte < nbytes; ++byte) {
      for (unsigned bits = static_cast<unsigned char>(indices[byte]); bits != 0; bits &= bits - 1) {
        int64_t position = byte * 8 + __builtin_ctz(bits);
        if (i == head.count || position >= elements) return DamagedVector("its bitmap has too many bits");
        use(i++, position);
      }
    }
    return i == head.count ? Status::Ok() : DamagedVector("its bitmap has too few bits");
  }
  int64_t at = 0, expected = 0;
  for (int64_t i = 0; i < head.count; ++i) {
    uint64_t gap = 0;
    for (int shift = 0;; shift += 7) {
      if (at == nbytes || shift == 7 * kLongestGap) return DamagedVector("a gap between positions does not end");
      uint64_t byte = static_cast<unsigned char>(indices[at++]);
      gap |= (byte & 0x7f) << shift;
      if (byte < 0x80) break;
    }
    int64_t position = expected + static_cast<int64_t>(gap);
    if (position >= elements) {
      return DamagedVector("position " + std::to_string(position) + " must be below " + std::to_string(elements));
    }
    expected = position + 1;
    use(i, position);
  }
  return at == nbytes ? Status::Ok() : DamagedVector("bytes follow its last position");
}

template <typename Use>
Status ForEachEntry(const VectorHead& head, const char* body, int64_t elements, Use use) {
  HVD_EXT_RETURN_IF_ERROR(CheckSparseHead(head, elements));
  const int64_t value_nbytes = head.count * static_cast<int64_t>(SizeOf(ValuesOf(head)));
  const char* indices = body + value_nbytes;
  const int64_t nbytes = head.body_nbytes - value_nbytes;
  auto each = [&](DType wire) {
    return ForEachPosition(head, indices, nbytes, elements,
                           [=](int64_t i, int64_t position) { use(i, position, ReadValue(wire, body, i)); });
  };
  // Each call has a constant dtype, so that the loop does not test it.
  if (ValuesOf(head) == DType::kFloat16) return each(DType::kFloat16);
  if (ValuesOf(head) == DType::kBFloat16) return each(DType::kBFloat16);
  return each(DType::kFloat32);
}

}  // namespace

void SparseVector::Reserve(int64_t most, BufferPool* pool) {
  count = 0;
  positions = pool->Take(most * 4);
  values = pool->Take(most * 4);
}

VectorMessage EncodeSparse(const SparseVector& vector, int64_t begin, int64_t elements, SparseIndices indices,
                           BufferPool* pool) {
  const int64_t first = vector.Find(begin), end = vector.Find(begin + elements);
  VectorMessage message;
  VectorHead& head = message.head;
  head.count = end - first;
  head.values = static_cast<int32_t>(vector.wire);
  head.form = static_cast<int32_t>(indices == SparseIndices::kSmallest ? SparseIndices::kRaw : indices);
  if (head.count == 0) return message;
  const int32_t* positions = vector.position() + first;
  message.index_nbytes = 4 * head.count;
  auto consider = [&](SparseIndices form, int64_t nbytes) {
    if (indices != form && (indices != SparseIndices::kSmallest || nbytes >= message.index_nbytes)) return;
    head.form = static_cast<int32_t>(form);
    message.index_nbytes = nbytes;
  };
  consider(SparseIndices::kDelta, GapsNbytes(positions, head.count, begin));
  consider(SparseIndices::kBitmap, BitmapNbytes(elements));
  message.value_nbytes = head.count * static_cast<int64_t>(SizeOf(ValuesOf(head)));
  head.body_nbytes = message.value_nbytes + message.index_nbytes;
  message.body = pool->Take(head.body_nbytes);
  WriteValues(vector.wire, vector.value() + first, head.count, message.body.data());
  WriteIndices(IndicesOf(head), positions, head.count, begin, message.index_nbytes,
               message.body.data() + message.value_nbytes);
  return message;
}

Status CheckSparseHead(const VectorHead& head, int64_t elements) {
  if (head.magic != VectorHead::kMagic) return DamagedVector("it does not begin with a header");
  if (head.count < 0 || head.count > elements) {
    return DamagedVector("its number of entries, " + std::to_string(head.count) + ", must be in [0, " +
                         std::to_string(elements) + "]");
  }
  if (ValuesOf(head) != DType::kFloat32 && !IsWire(ValuesOf(head))) {
    return DamagedVector("its values' dtype is " + std::to_string(head.values));
  }
  int64_t least = 0, most = 0;
  switch (IndicesOf(head)) {
    case SparseIndices::kRaw:
      least = most = 4 * head.count;
      break;
    case SparseIndices::kDelta:
      least = head.count;
      most = kLongestGap * head.count;
      break;
    case SparseIndices::kBitmap:
      least = most = head.count == 0 ? 0 : BitmapNbytes(elements);
      break;
    default:
      return DamagedVector("the form of its positions is " + std::to_string(head.form));
  }
  const int64_t nbytes = head.body_nbytes - head.count * static_cast<int64_t>(SizeOf(ValuesOf(head)));
  if (nbytes >= least && nbytes <= most) return Status::Ok();
  return DamagedVector(std::to_string(nbytes) + " bytes of positions must be in [" + std::to_string(least) + ", " +
                       std::to_string(most) + "]");
}

Status DecodeSparse(const VectorHead& head, const char* body, int64_t begin, int64_t elements, BufferPool* pool,
                    SparseVector* vector) {
  HVD_EXT_RETURN_IF_ERROR(CheckSparseHead(head, elements));
  vector->Reserve(head.count, pool);
  vector->wire = ValuesOf(head);
  int32_t* positions = vector->position();
  float* values = vector->value();
  HVD_EXT_RETURN_IF_ERROR(ForEachEntry(head, body, elements, [=](int64_t i, int64_t position, float value) {
    positions[i] = static_cast<int32_t>(begin + position);
    values[i] = value;
  }));
  vector->count = head.count;
  return Status::Ok();
}

Status AddSparse(const VectorHead& head, const char* body, float* data, int64_t elements) {
  return ForEachEntry(head, body, elements, [=](int64_t, int64_t position, float value) { data[position] += value; });
}

float RoundForWire(DType wire, float value) {
  if (wire == DType::kFloat32 || !std::isfinite(value)) return value;
  if (wire == DType::kBFloat16) {
    const float largest = FloatOf(0x7f7f0000u);
    return std::fabs(value) >= largest ? std::copysign(largest, value) : ToFloat(ToBFloat16(value));
  }
  const uint32_t bits = BitsOf(value), magnitude = bits & 0x7fffffffu;
  if (magnitude < BitsOf(65504.0f)) return ToFloat(ToFloat16(value));
  // The rest must be a multiple of the value's last bit, 2^last.
  const int last = static_cast<int>(magnitude >> 23) - 127 - 23;
  uint32_t largest = 65504;
  if (last > 0) largest = last > 15 ? 0 : largest >> last << last;
  return std::copysign(static_cast<float>(largest), value);
}

}  // namespace hvd_ext

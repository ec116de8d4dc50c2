// Messages of selected entries: decoding gives what was encoded, the encoding is the shortest, and damaged messages are
// refused.
#include <cmath>
#include <limits>
#include <random>

#include "engine/sparse_vector.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

SparseVector VectorOf(const std::vector<int32_t>& positions, BufferPool* pool, DType wire = DType::kFloat32) {
  SparseVector vector;
  vector.Reserve(static_cast<int64_t>(positions.size()), pool);
  vector.wire = wire;
  for (int32_t position : positions) {
    vector.position()[vector.count] = position;
    vector.value()[vector.count++] = static_cast<float>(position % 101 - 50);  // exact in halves
  }
  return vector;
}

std::vector<int32_t> Random(int64_t begin, int64_t elements, double density, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<int32_t> positions;
  for (int64_t i = 0; i < elements; ++i) {
    if (uniform(random) < density) positions.push_back(static_cast<int32_t>(begin + i));
  }
  return positions;
}

void CheckRoundTrip(const std::vector<int32_t>& positions, int64_t begin, int64_t elements, SparseIndices indices,
                    DType wire) {
  BufferPool pool;
  const SparseVector vector = VectorOf(positions, &pool, wire);
  const VectorMessage message = EncodeSparse(vector, begin, elements, indices, &pool);
  CHECK_EQ(message.head.body_nbytes, message.value_nbytes + message.index_nbytes);
  SparseVector back;
  CHECK_OK(DecodeSparse(message.head, message.body.data(), begin, elements, &pool, &back));
  std::vector<float> sum(static_cast<size_t>(elements), 1.0f);
  CHECK_OK(AddSparse(message.head, message.body.data(), sum.data(), elements));
  int64_t seen = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < begin || positions[i] >= begin + elements) continue;
    CHECK_EQ(back.position()[seen], positions[i]);
    CHECK_EQ(back.value()[seen++], vector.value()[i]);
    CHECK_EQ(sum[static_cast<size_t>(positions[i] - begin)], 1 + vector.value()[i]);
  }
  CHECK_EQ(back.count, seen);
  CHECK(back.wire == wire);
}

const SparseIndices kForms[] = {SparseIndices::kSmallest, SparseIndices::kRaw, SparseIndices::kDelta,
                                SparseIndices::kBitmap};

TEST("sparse vector: entries come back, whatever the density, the form and the dtype") {
  unsigned seed = 1;
  for (DType wire : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (SparseIndices form : kForms) {
      for (double density : {0.0, 0.001, 0.02, 0.3, 0.9, 1.0}) {
        for (int64_t elements : {1, 7, 8, 9, 1000}) {
          CheckRoundTrip(Random(50, elements, density, seed++), 50, elements, form, wire);
        }
      }
      CheckRoundTrip({0}, 0, 1, form, wire);
      CheckRoundTrip({1, 5, 6, 9, 10, 11, 40}, 6, 5, form, wire);  // only the entries of the units are sent
      CheckRoundTrip({(1 << 20) - 1}, 0, 1 << 20, form, wire);
      CheckRoundTrip({3, 127, 128, 129, 16511, 16512, 1 << 20}, 0, (1 << 20) + 1, form, wire);
    }
  }
}

TEST("sparse vector: the last element that a bucket may have comes back, and no entry too") {
  BufferPool pool;
  const int32_t last = std::numeric_limits<int32_t>::max() - 1;
  const int64_t elements = int64_t{last} + 1 - 5;
  for (const std::vector<int32_t>& positions : {std::vector<int32_t>{5, last}, std::vector<int32_t>{}}) {
    SparseVector vector = VectorOf(positions, &pool), back;
    const VectorMessage message = EncodeSparse(vector, 5, elements, SparseIndices::kDelta, &pool);
    CHECK_OK(DecodeSparse(message.head, message.body.data(), 5, elements, &pool, &back));
    CHECK(std::vector<int32_t>(back.position(), back.position() + back.count) == positions);
  }
}

TEST("sparse vector: the shortest form is taken") {
  BufferPool pool;
  auto form = [&](const std::vector<int32_t>& positions, int64_t elements) {
    return IndicesOf(EncodeSparse(VectorOf(positions, &pool), 0, elements, SparseIndices::kSmallest, &pool).head);
  };
  CHECK(form({0, 1, 2, 3, 4, 5, 6, 7}, 8) == SparseIndices::kBitmap);
  CHECK(form({0, 100, 200}, 1000) == SparseIndices::kDelta);
  CHECK(form({1 << 21, (1 << 22) + 1, (1 << 23) + 1}, 1 << 24) ==
        SparseIndices::kRaw);  // gaps of 4 bytes are not shorter
  // At a density of 1/1000 a position takes about 2 bytes as a gap, 4 as raw, and 125 as a bitmap.
  const std::vector<int32_t> positions = Random(0, 1 << 20, 0.001, 7);
  const VectorMessage message =
      EncodeSparse(VectorOf(positions, &pool, DType::kFloat16), 0, 1 << 20, SparseIndices::kSmallest, &pool);
  CHECK(IndicesOf(message.head) == SparseIndices::kDelta);
  CHECK(message.index_nbytes < 2 * static_cast<int64_t>(positions.size()));
}

void Refused(const VectorHead& head, const std::string& body, int64_t elements, const std::string& words) {
  BufferPool pool;
  SparseVector back;
  // The message is in memory of exactly its length, so that a sanitizer sees a read behind it.
  const std::vector<char> exact(body.begin(), body.end());
  CHECK_FAILS(DecodeSparse(head, exact.data(), 0, elements, &pool, &back), Code::kCommunication, words);
  std::vector<float> sum(static_cast<size_t>(elements));
  CHECK_FAILS(AddSparse(head, exact.data(), sum.data(), elements), Code::kCommunication, "is damaged");
}

VectorHead HeadOf(SparseIndices indices, int64_t count, int64_t body_nbytes) {
  VectorHead head;
  head.form = static_cast<int32_t>(indices);
  head.count = count;
  head.body_nbytes = body_nbytes;
  return head;
}

std::string Ints(const std::vector<int32_t>& positions) {
  std::string bytes(positions.size() * 4, '\0');  // values
  bytes.append(reinterpret_cast<const char*>(positions.data()), positions.size() * 4);
  return bytes;
}

TEST("sparse vector: damaged heads are refused") {
  VectorHead head = HeadOf(SparseIndices::kRaw, 1, 8);
  head.magic = 0;
  Refused(head, Ints({0}), 4, "does not begin with a header");
  Refused(HeadOf(SparseIndices::kRaw, 5, 40), Ints({0, 1, 2, 3, 4}), 4, "number of entries, 5, must be in [0, 4]");
  Refused(HeadOf(SparseIndices::kRaw, -1, 8), "", 4, "number of entries, -1");
  Refused(HeadOf(SparseIndices::kRaw, 1, 9), Ints({0}), 4, "5 bytes of positions must be in [4, 4]");
  Refused(HeadOf(SparseIndices::kRaw, 1, 1 << 30), Ints({0}), 4, "must be in [4, 4]");
  Refused(HeadOf(SparseIndices::kDelta, 1, 4), Ints({}), 4, "0 bytes of positions must be in [1, 5]");
  Refused(HeadOf(SparseIndices::kDelta, 1, 10), std::string(10, '\0'), 4, "6 bytes of positions must be in [1, 5]");
  Refused(HeadOf(SparseIndices::kBitmap, 1, 6), std::string(6, '\0'), 8, "2 bytes of positions must be in [1, 1]");
  Refused(HeadOf(static_cast<SparseIndices>(7), 1, 8), Ints({0}), 4, "form of its positions is 7");
  Refused(HeadOf(SparseIndices::kSmallest, 1, 8), Ints({0}), 4, "form of its positions is 0");
  head = HeadOf(SparseIndices::kRaw, 1, 12);
  head.values = static_cast<int32_t>(DType::kFloat64);
  Refused(head, std::string(12, '\0'), 4, "values' dtype is 1");
}

TEST("sparse vector: damaged positions are refused") {
  Refused(HeadOf(SparseIndices::kRaw, 2, 16), Ints({2, 4}), 4, "position 4 must be in (2, 4)");
  Refused(HeadOf(SparseIndices::kRaw, 2, 16), Ints({2, 2}), 4, "position 2 must be in (2, 4)");
  Refused(HeadOf(SparseIndices::kRaw, 1, 8), Ints({-1}), 4, "position -1 must be in (-1, 4)");
  const std::string value(4, '\0');
  Refused(HeadOf(SparseIndices::kDelta, 1, 5), value + "\x04", 4, "position 4 must be below 4");
  Refused(HeadOf(SparseIndices::kDelta, 2, 10), value + value + std::string("\x03\0", 2), 4, "position 4 must be");
  Refused(HeadOf(SparseIndices::kDelta, 1, 6), value + "\x80\x80", 4, "a gap between positions does not end");
  Refused(HeadOf(SparseIndices::kDelta, 1, 9), value + "\xff\xff\xff\xff\xff", 4, "does not end");
  Refused(HeadOf(SparseIndices::kDelta, 1, 9), value + "\xff\xff\xff\xff\x7f", 4, "must be below 4");
  Refused(HeadOf(SparseIndices::kDelta, 1, 6), value + std::string("\x01\x01", 2), 4, "bytes follow its last position");
  Refused(HeadOf(SparseIndices::kBitmap, 1, 5), value + "\x03", 8, "too many bits");
  Refused(HeadOf(SparseIndices::kBitmap, 1, 5), value + std::string(1, '\0'), 8, "too few bits");
  Refused(HeadOf(SparseIndices::kBitmap, 1, 5), value + "\x10", 4, "too many bits");
}

TEST("sparse vector: any bytes are refused or read, and never break anything") {
  std::mt19937 random(11);
  BufferPool pool;
  for (int i = 0; i < 5000; ++i) {
    const int64_t elements = 1 + static_cast<int64_t>(random() % 40);
    VectorHead head = HeadOf(static_cast<SparseIndices>(1 + random() % 3), random() % 6, 0);
    head.values = static_cast<int32_t>(random() % 2 == 0 ? DType::kFloat32 : DType::kFloat16);
    std::vector<char> body(head.count * SizeOf(ValuesOf(head)) + random() % 24);
    head.body_nbytes = static_cast<int64_t>(body.size());
    for (char& byte : body) byte = static_cast<char>(random() % (i % 2 == 0 ? 256 : 4));
    SparseVector back;
    if (!DecodeSparse(head, body.data(), 0, elements, &pool, &back).ok()) continue;
    CHECK_EQ(back.count, head.count);
    for (int64_t j = 0; j < back.count; ++j) {
      CHECK(back.position()[j] >= (j == 0 ? 0 : back.position()[j - 1] + 1) && back.position()[j] < elements);
    }
  }
}

// float32 holds 24 bits; nothing but the sum of these two may come back.
void CheckWhole(DType wire, float value) {
  const float sent = RoundForWire(wire, value), rest = value - sent;
  CHECK(std::isfinite(sent));
  CHECK_EQ(static_cast<double>(sent) + static_cast<double>(rest), static_cast<double>(value));
  float back = wire == DType::kFloat16 ? ToFloat(ToFloat16(sent)) : ToFloat(ToBFloat16(sent));
  CHECK_EQ(BitsOf(back), BitsOf(sent));  // float32 is sent unchanged
}

TEST("sparse vector: what is sent and what is left make the value, exactly, for every magnitude") {
  std::mt19937 random(5);
  for (DType wire : {DType::kFloat16, DType::kBFloat16}) {
    for (int i = 0; i < 50000; ++i) {
      const float value = FloatOf(static_cast<uint32_t>(random()));
      if (std::isfinite(value)) CheckWhole(wire, value);
    }
    for (float value : {0.0f, -0.0f, 65503.9f, 65504.0f, 65519.0f, 65520.0f, 1e6f, -3e8f, 6e8f, 1e12f, 5e-8f, 1e-45f,
                        std::numeric_limits<float>::max(), -std::numeric_limits<float>::max()}) {
      CheckWhole(wire, value);
    }
  }
  CHECK_EQ(RoundForWire(DType::kFloat16, 1e6f), 65504.0f);
  CHECK_EQ(RoundForWire(DType::kFloat16, -1e6f), -65504.0f);
  CHECK_EQ(RoundForWire(DType::kFloat16, 1e-9f), 0.0f);
  CHECK_EQ(RoundForWire(DType::kFloat32, 1e30f), 1e30f);
  CHECK(std::isinf(RoundForWire(DType::kFloat16, std::numeric_limits<float>::infinity())));
  CHECK(std::isnan(RoundForWire(DType::kBFloat16, std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace hvd_ext::test

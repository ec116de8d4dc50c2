#include "cache/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define HVD_EXT_CRC32C_SSE42
#endif

namespace hvd_ext {
namespace {

// Polynomials over GF(2) of degree below 32, the coefficient of x^0 in the highest bit, as the checksum has them.
constexpr uint32_t kPolynomial = 0x82F63B78u;  // less x^32

// byte[k][v]: what v does as byte k of the checksum. One table for the next byte, eight for eight bytes at a time.
struct Bytes {
  uint32_t byte[8][256];
  Bytes() {
    for (uint32_t v = 0; v < 256; ++v) {
      uint32_t crc = v;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
      byte[0][v] = crc;
    }
    for (uint32_t v = 0; v < 256; ++v) {
      for (int k = 1; k < 8; ++k) byte[k][v] = (byte[k - 1][v] >> 8) ^ byte[0][byte[k - 1][v] & 0xff];
    }
  }
};

#ifdef HVD_EXT_CRC32C_SSE42

// a * b modulo the polynomial.
uint32_t Times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 31; i >= 0; --i) {
    if ((a >> i & 1u) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1u) != 0 ? kPolynomial : 0u);  // b * x
  }
  return product;
}

// x^(8 n): a checksum times it is that of the same bytes followed by n zeros, before the inversions at both ends.
uint32_t Zeros(uint64_t n) {
  uint32_t power = 0x80000000u;        // 1
  uint32_t square = 0x80000000u >> 8;  // x^8
  for (; n != 0; n >>= 1) {
    if ((n & 1u) != 0) power = Times(power, square);
    square = Times(square, square);
  }
  return power;
}

// Multiplies by a fixed x^(8 n), by one look-up for each byte.
struct Shift {
  uint32_t byte[4][256];
  explicit Shift(uint64_t n) {
    uint32_t power = Zeros(n);
    for (int k = 0; k < 4; ++k) {
      for (uint32_t v = 0; v < 256; ++v) byte[k][v] = Times(power, v << (8 * k));
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return byte[0][crc & 0xff] ^ byte[1][crc >> 8 & 0xff] ^ byte[2][crc >> 16 & 0xff] ^ byte[3][crc >> 24];
  }
};

uint64_t Load(const unsigned char* data) {
  uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// The instruction gives its result after three cycles and can begin in each: three streams side by side fill them. Each
// stream has `kStream` bytes; the streams are joined by shifting the first over the second, and both over the third.
template <int64_t kStream>
__attribute__((target("sse4.2"))) uint64_t ThreeStreams(uint64_t crc, const unsigned char** data, int64_t* nbytes) {
  static const Shift shift(kStream);
  while (*nbytes >= 3 * kStream) {
    const unsigned char* at = *data;
    uint64_t second = 0, third = 0;
    for (int64_t i = 0; i < kStream; i += 8, at += 8) {
      crc = _mm_crc32_u64(crc, Load(at));
      second = _mm_crc32_u64(second, Load(at + kStream));
      third = _mm_crc32_u64(third, Load(at + 2 * kStream));
    }
    crc = shift(shift(static_cast<uint32_t>(crc)) ^ static_cast<uint32_t>(second)) ^ static_cast<uint32_t>(third);
    *data += 3 * kStream;
    *nbytes -= 3 * kStream;
  }
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t Crc32cSse42(uint32_t begin, const void* data, int64_t nbytes) {
  const unsigned char* at = static_cast<const unsigned char*>(data);
  uint64_t crc = ~begin;
  crc = ThreeStreams<4096>(crc, &at, &nbytes);
  crc = ThreeStreams<256>(crc, &at, &nbytes);
  for (; nbytes >= 8; nbytes -= 8, at += 8) crc = _mm_crc32_u64(crc, Load(at));
  for (; nbytes > 0; --nbytes, ++at) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *at);
  return ~static_cast<uint32_t>(crc);
}

bool HasSse42() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}

#endif

}  // namespace

uint32_t Crc32cPortable(uint32_t begin, const void* data, int64_t nbytes) {
  static const Bytes tables;
  const auto& t = tables.byte;
  const unsigned char* at = static_cast<const unsigned char*>(data);
  uint32_t crc = ~begin;
  for (; nbytes >= 8; nbytes -= 8, at += 8) {
    uint32_t low = crc ^ (at[0] | at[1] << 8 | at[2] << 16 | static_cast<uint32_t>(at[3]) << 24);
    crc = t[7][low & 0xff] ^ t[6][low >> 8 & 0xff] ^ t[5][low >> 16 & 0xff] ^ t[4][low >> 24] ^ t[3][at[4]] ^
          t[2][at[5]] ^ t[1][at[6]] ^ t[0][at[7]];
  }
  for (; nbytes > 0; --nbytes, ++at) crc = (crc >> 8) ^ t[0][(crc ^ *at) & 0xff];
  return ~crc;
}

uint32_t Crc32c(uint32_t crc, const void* data, int64_t nbytes) {
#ifdef HVD_EXT_CRC32C_SSE42
  if (HasSse42()) return Crc32cSse42(crc, data, nbytes);
#endif
  return Crc32cPortable(crc, data, nbytes);
}

}  // namespace hvd_ext

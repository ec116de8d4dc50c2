// Quantisation in blocks: a block of elements has one scale, and each element a whole number of 8, 4 or 1 bits.
//
// With 8 and 4 bits an element is sent as scale * q, q from -127 to 127 or from -7 to 7, and the scale is the least
// that lets the block's largest element fit. With 1 bit it is sent as scale or -scale, and the scale is the mean of the
// absolute values. A scale is a float16 in units of 2^-10: blocks whose largest element is from 8e-6 to 8000 (with 8
// bits) have scales of full precision. A larger element is sent as the largest that there is, and the rest is left.
//
// The bits are the same on every processor: products and sums are not contracted, and sums have a fixed order.
#pragma once

#include <cstdint>

namespace hvd_ext {

struct Quantization {
  int32_t bits = 8;     // 8, 4 or 1
  int32_t block = 256;  // elements; a multiple of 64, at most kMostBlock

  static constexpr int32_t kMostBlock = 4096;
  static bool IsRight(int32_t bits, int32_t block) {
    return (bits == 8 || bits == 4 || bits == 1) && block > 0 && block % 64 == 0 && block <= kMostBlock;
  }

  int64_t Blocks(int64_t elements) const { return (elements + block - 1) / block; }
  int64_t BlockNbytes() const { return static_cast<int64_t>(block) * bits / 8; }
};

// Quantises x[i] + y[i]; `y` may be null. `left`, which may be `x`, gets what is not sent. Each block's numbers have
// BlockNbytes() in `packed`; those behind the last element are of zeros. Returns whether all elements are finite; if
// not, the numbers mean nothing, and scales are right ones all the same.
bool Quantize(const Quantization& how, int64_t elements, const float* x, const float* y, uint16_t* scales,
              unsigned char* packed, float* left);

// data[i] += the number of element `first` + i of the blocks. Scales must be what Quantize writes (IsScale).
void AddQuantized(const Quantization& how, const uint16_t* scales, const unsigned char* packed, int64_t first,
                  int64_t elements, float* data);

// Neither negative nor infinite nor a NaN.
inline bool IsScale(uint16_t bits) { return bits < 0x7c00; }

}  // namespace hvd_ext

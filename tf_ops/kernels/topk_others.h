// The selectors other than the exact one. They are for comparison and written for clarity.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/half.h"
#include "kernels/topk_memory.h"
#include "kernels/topk_scan.h"

namespace hvd_ext::topk {

// The bits of an element of type T, and conversions between them and its value.
template <typename T>
struct As {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  static constexpr int kMantissaBits = sizeof(T) == 8 ? 52 : sizeof(T) == 4 ? 23 : std::is_same_v<T, Float16> ? 10 : 7;
  static constexpr Bits kInfinity = kMagnitude<Bits> >> kMantissaBits << kMantissaBits;

  static double Value(Bits bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    return Wide(value);
  }
  static Bits Nearest(double value) {
    T nearest;
    if constexpr (std::is_floating_point_v<T>) {
      nearest = static_cast<T>(value);
    } else {
      FromFloat(static_cast<float>(value), &nearest);
    }
    Bits bits;
    std::memcpy(&bits, &nearest, sizeof(bits));
    return bits;
  }
};

// Returns the number of keys >= bound in x.
template <typename Bits>
int64_t CountFrom(const Bits* x, int64_t elements, Bits bound);

// Runs a selector other than kExact on the calling thread, and sets `counts`; x has elements of type T. Returns whether
// a picked key, or any key of a segment with k = 0, is not finite.
template <typename T>
bool SelectOthers(const TopKOptions& options, const typename As<T>::Bits* x, const TopKSegment* segments,
                  int64_t n_segments, Buffer<uint64_t>* memory, int64_t* counts, Picks<typename As<T>::Bits> picks);

}  // namespace hvd_ext::topk

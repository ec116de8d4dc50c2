// Quantisation in blocks: scales, numbers and what is left, against one element at a time, for each instruction set.
#include <limits>
#include <random>

#include "kernels/half.h"
#include "kernels/quantize.h"
#include "topk_inputs.h"

namespace hvd_ext::test {
namespace {

constexpr float kUnit = 1.0f / 1024;

struct Quantized {
  std::vector<uint16_t> scales;
  std::vector<unsigned char> packed;
  std::vector<float> left, sent;
  bool finite;

  Quantized(const Quantization& how, const std::vector<float>& x, const float* y)
      : scales(static_cast<size_t>(how.Blocks(static_cast<int64_t>(x.size()))), 0xffff),
        packed(scales.size() * static_cast<size_t>(how.BlockNbytes())),
        left(x.size()),
        sent(x.size()) {
    const auto n = static_cast<int64_t>(x.size());
    finite = Quantize(how, n, x.data(), y, scales.data(), packed.data(), left.data());
    for (uint16_t scale : scales) CHECK(IsScale(scale));
    if (finite) AddQuantized(how, scales.data(), packed.data(), 0, n, sent.data());
  }
};

float ScaleOf(uint16_t bits) { return ToFloat(Float16{bits}) * kUnit; }

// The scale of a block, by its definition; sums of the tests are exact.
uint16_t ScaleOf(const Quantization& how, const float* a, int64_t count) {
  if (how.bits == 1) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += std::fabs(static_cast<double>(a[i]));
    return std::min<uint16_t>(ToFloat16(static_cast<float>(sum) / static_cast<float>(count) / kUnit).bits, 0x7bff);
  }
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(a[i]));
  const float least = largest / (how.bits == 8 ? 127 : 7);
  uint16_t low = 0, high = 0x7bff;  // scales rise with their bits
  while (low < high) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    if (ScaleOf(middle) < least) {
      low = static_cast<uint16_t>(middle + 1);
    } else {
      high = middle;
    }
  }
  return low;
}

void Check(const Quantization& how, const std::vector<float>& x, const std::vector<float>& y) {
  const Quantized made(how, x, y.empty() ? nullptr : y.data());
  CHECK(made.finite);
  const float most = how.bits == 8 ? 127 : 7;
  for (size_t block = 0; block < made.scales.size(); ++block) {
    const size_t begin = block * static_cast<size_t>(how.block);
    const size_t end = std::min(begin + static_cast<size_t>(how.block), x.size());
    std::vector<float> a(x.begin() + static_cast<std::ptrdiff_t>(begin), x.begin() + static_cast<std::ptrdiff_t>(end));
    for (size_t i = begin; i < end && !y.empty(); ++i) a[i - begin] += y[i];
    CHECK_EQ(made.scales[block], ScaleOf(how, a.data(), static_cast<int64_t>(a.size())));
    CHECK(IsScale(made.scales[block]));
    const float scale = ScaleOf(made.scales[block]), inverse = scale > 0 ? 1 / scale : 0;
    for (size_t i = begin; i < end; ++i) {
      const float value = a[i - begin];
      const float sent = how.bits == 1 ? std::copysign(scale, value)
                                       : std::nearbyint(std::clamp(value * inverse, -most, most)) * scale;
      CHECK_EQ(made.sent[i], sent);
      CHECK_EQ(BitsOf(made.left[i]), BitsOf(value - sent));
    }
  }
}

void OnEachPath(const std::function<void()>& body) {
  for (topk::Path path : Paths()) {
    const With with(path);
    body();
  }
}

// Their sums are exact.
std::vector<float> Numbers(size_t elements, float magnitude, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(elements);
  for (float& x : numbers) x = static_cast<float>(static_cast<int>(random() % 257) - 128) * magnitude / 128;
  return numbers;
}

TEST("quantize: scales, what is sent and what is left are those of the definition, on each instruction set") {
  OnEachPath([] {
    for (int32_t bits : {8, 4, 1}) {
      for (int32_t block : {64, 256, 4096}) {
        for (size_t elements : {0, 1, 63, 64, 65, 700, 8200}) {
          for (float magnitude : {1.0f, 0x1p-12f, 0x1p-20f, 512.0f, 0x1p18f}) {
            Check({bits, block}, Numbers(elements, magnitude, 1), Numbers(elements, magnitude / 8, 2));
          }
        }
      }
      Check({bits, 64}, Numbers(100, 1.0f, 3), {});
      Check({bits, 64}, std::vector<float>(200, 0.0f), {});
      Check({bits, 64}, std::vector<float>(200, -1e-12f), {});
    }
  });
}

TEST("quantize: any part is added, and a value that is not finite is found wherever it is") {
  OnEachPath([] {
    for (int32_t bits : {8, 4, 1}) {
      const Quantization how{bits, 64};
      std::vector<float> x = Numbers(300, 1.0f, 5);
      const Quantized made(how, x, nullptr);
      for (int64_t first = 0; first < 300; first += 7) {
        for (int64_t count = 0; first + count <= 300; count += 13) {
          std::vector<float> part(static_cast<size_t>(count), 3.0f);
          AddQuantized(how, made.scales.data(), made.packed.data(), first, count, part.data());
          for (int64_t i = 0; i < count; ++i) {
            CHECK_EQ(part[static_cast<size_t>(i)], 3.0f + made.sent[static_cast<size_t>(first + i)]);
          }
        }
      }
      for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()}) {
        for (size_t at : {0, 63, 64, 150, 299}) {
          std::vector<float> damaged = x;
          damaged[at] = bad;
          CHECK(!Quantized(how, damaged, nullptr).finite);
          CHECK(!Quantized(how, x, damaged.data()).finite);
        }
      }
    }
  });
}

TEST("quantize: the results may overwrite the input") {
  const Quantization how{4, 64};
  const std::vector<float> x = Numbers(130, 1.0f, 7);
  const Quantized made(how, x, nullptr);
  std::vector<float> both = x;
  std::vector<uint16_t> scales(made.scales.size());
  std::vector<unsigned char> packed(made.packed.size());
  CHECK(Quantize(how, 130, both.data(), nullptr, scales.data(), packed.data(), both.data()));
  CHECK(both == made.left && scales == made.scales && packed == made.packed);
}

}  // namespace
}  // namespace hvd_ext::test

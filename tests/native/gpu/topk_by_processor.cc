// Stands in for the kernels of kernels/topk_gpu.h in jobs on the stand-in for CUDA: those, emulated, would take
// minutes, and jump from stack to stack, which sanitizers do not follow. It sorts float32, and shares no code with the
// selections that it is compared with.
#include <algorithm>
#include <cstring>
#include <vector>

#include "gpu/cuda_stand_in.h"
#include "kernels/topk_gpu.h"

int64_t hvd_ext_topk_gpu_workspace(int32_t, const HvdExtTopKSegment*, int64_t) { return 256; }

int hvd_ext_topk_gpu(int32_t, const void* x, const HvdExtTopKSegment* segments, int64_t n_segments, void* indices,
                     int32_t, void* values, int32_t* non_finite, void* workspace, int64_t, void* stream) {
  const std::vector<HvdExtTopKSegment> all(segments, segments + n_segments);
  const auto select = [=] {
    const auto* bits = static_cast<const uint32_t*>(x);
    auto* to = static_cast<int32_t*>(indices);
    auto* value = static_cast<uint32_t*>(values);
    *non_finite = 0;
    for (const HvdExtTopKSegment& segment : all) {
      std::vector<int32_t> order(static_cast<size_t>(segment.elements));
      for (int64_t i = 0; i < segment.elements; ++i)
        order[static_cast<size_t>(i)] = static_cast<int32_t>(segment.begin + i);
      const auto key = [bits](int32_t i) { return bits[i] & 0x7fffffffu; };
      const auto before = [key](int32_t a, int32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; };
      std::nth_element(order.begin(), order.begin() + segment.k, order.end(), before);
      if (segment.k > 0) order.resize(static_cast<size_t>(segment.k));
      for (int32_t i : order) *non_finite |= key(i) >= 0x7f800000u ? 1 : 0;
      if (segment.k == 0) continue;
      std::sort(order.begin(), order.end());
      for (int32_t i : order) {
        *to++ = i;
        *value++ = bits[i];
      }
    }
  };
  hvd_ext::gpu::stand_in::Enqueue(stream, select, {x, indices, values, non_finite, workspace});
  return 0;
}

const char* hvd_ext_topk_gpu_error(void) { return ""; }

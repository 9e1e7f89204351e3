// The product's kernels as a shared library for ctypes; GATE_FORMAT, UP_FORMAT and DOWN_FORMAT as for NVRTC.
#include "cuda_shim.h"

#include "publish.cu"
#include "experts.cu"
#include "apply.cu"
#include "combine.cu"

extern "C" int run_publish(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step) {
  return shim::launch(x, y, threads, [=] { publish(*layer, *step); });
}

extern "C" int run_experts_hit(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step, const Progress* progress,
                               const WorkList* list, int max_items, int up_tile, int down_tile) {
  return shim::launch(x, y, threads, [=] { experts_hit(*layer, *step, *progress, list, max_items, up_tile, down_tile); });
}

extern "C" int run_experts_plan(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step,
                                const Progress* progress, const WorkList* list, int max_items, int up_tile, int down_tile) {
  return shim::launch(x, y, threads, [=] { experts_plan(*layer, *step, *progress, list, max_items, up_tile, down_tile); });
}

extern "C" int run_apply(u32 x, u32 y, u32 threads, const Step* step, const Updates* list) {
  return shim::launch(x, y, threads, [=] { apply(*step, list); });
}

extern "C" int run_combine(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step) {
  return shim::launch(x, y, threads, [=] { combine(*layer, *step); });
}

extern "C" float widen_half(u32 bits) { return half_to_float((u16)bits); }
extern "C" u32 narrow_half(float value) { return float_to_half(value); }

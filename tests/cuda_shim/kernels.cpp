// The product's kernels as a shared library for ctypes; GATE_FORMAT, UP_FORMAT and DOWN_FORMAT as for NVRTC.
#include "cuda_shim.h"

#include "publish.cu"
#include "experts.cu"
#include "combine.cu"
#include "prefill.cu"
#include "prefill_experts.cu"

extern "C" int run_publish(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step) {
  return shim::launch(x, y, threads, [=] { publish(*layer, *step); });
}

extern "C" int run_experts_hit(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step, const Progress* progress,
                               const Tiles* tiles) {
  return shim::launch(x, y, threads, [=] { experts_hit(*layer, *step, *progress, *tiles); });
}

extern "C" int run_experts_plan(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step, const Progress* progress,
                                const Tiles* tiles, const WorkList* list, const Updates* updates, int max_items,
                                int wait) {
  return shim::launch(x, y, threads, [=] { experts_plan(*layer, *step, *progress, *tiles, list, updates, max_items, wait); });
}

extern "C" int run_combine(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step, const Progress* hits, const Progress* plan) {
  return shim::launch(x, y, threads, [=] { combine(*layer, *step, *hits, *plan); });
}

extern "C" int run_prefill_rows(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step) {
  return shim::launch(x, y, threads, [=] { prefill_rows(*layer, *step); });
}

extern "C" int run_prefill_group(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step, const Prefill* prefill,
                                 const Batches* batches) {
  return shim::launch(x, y, threads, [=] { prefill_group(*layer, *step, *prefill, batches); });
}

#define RUN_BATCH(name)                                                                                            \
  extern "C" int run_##name(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step, const Prefill* prefill, \
                            int batch, int splits, int span) {                                                     \
    return shim::launch(x, y, threads, [=] { name(*layer, *step, *prefill, batch, splits, span); });               \
  }
RUN_BATCH(prefill_up)
RUN_BATCH(prefill_hidden)
RUN_BATCH(prefill_down)

extern "C" int run_prefill_combine(u32 x, u32 y, u32 threads, const Layer* layer, const Step* step, const Prefill* prefill) {
  return shim::launch(x, y, threads, [=] { prefill_combine(*layer, *step, *prefill); });
}

// Kernels that are run from now on wait for `run_chain`.
extern "C" void begin_chain() { shim::is_chaining = true; }

extern "C" int run_chain(u64 seed, int window, void (*host)()) {
  shim::is_chaining = false;
  return shim::run_chain(seed, window, host);
}

extern "C" float widen_half(u32 bits) { return half_to_float((u16)bits); }
extern "C" u32 narrow_half(float value) { return float_to_half(value); }

// combine: the output of a layer-step, once the CPU lane's parts are there. Grid (column chunks, rows), 256 threads.
//
// Of few blocks each looks at the host's word itself; of many the first one does and tells the others, because reads of
// one word of host memory by many blocks queue up. They look before the plan has ended: what is later counts.
#include "combine.cuh"

constexpr int ASKING_BLOCKS = 32;

// One thread: until the CPU lane's parts are there, or the step has failed; both words are asked for side by side.
DEV void wait_for_processor(const Step& step) {
  u32 clock = *(const volatile u32*)&step.state->clock, sequence = *(const volatile u32*)&step.state->sequence;
  for (;; rest()) {
    u32 flag = step.cpu_flag ? *(const volatile u32*)step.cpu_flag : sequence;
    u32 aborted = step.abort ? *(const volatile u32*)step.abort : 0;  // whatever was waited for may not have come
    if (aborted) return fail(step, clock, ERROR_ABORTED);
    if (flag == sequence || *(const volatile u32*)&step.state->failed == clock) break;
  }
  __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  let_next_start();  // which waits until this has ended
  __shared__ CombineShared shared;
  __shared__ bool failed;
  u32 clock = *(const volatile u32*)&step.state->clock, missing = *(const volatile u32*)&step.state->missing;
  bool first = blockIdx.x + blockIdx.y == 0, all_ask = gridDim.x * gridDim.y <= ASKING_BLOCKS;
  bool ends = missing == 0 && combines_at_once(step);
  auto wait = [&] {
    if (threadIdx.x == 0 && missing && (first || all_ask)) wait_for_processor(step);
    wait_for_earlier();
    if (threadIdx.x == 0 && first) {
      step.state->epoch++;
      store_release_gpu(&step.state->summable, clock);
    }
    if (ends) return false;
    if (threadIdx.x == 0) {
      while (missing && !first && !all_ask && load_acquire_gpu(&step.state->summable) != clock) rest();
      failed = *(const volatile u32*)&step.state->failed == clock;
    }
    __syncthreads();
    return failed;
  };
  if (ends)
    wait();
  else
    combine_columns<false>(layer, step, blockIdx.y, blockIdx.x * DOWN_CHUNK, layer.hidden, shared, wait);
}

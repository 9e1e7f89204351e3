// combine: the output of a layer-step, once the CPU lane's parts are there. Grid (column chunks, rows), 256 threads.
//
// The first block waits for the host and tells the others: reads of one word of host memory by many blocks queue up.
#include "combine.cuh"

// One thread: until the CPU lane's parts are there; both words that it looks at are asked for side by side.
DEV void wait_for_processor(const Step& step) {
  u32 clock = step.state->clock, sequence = step.state->sequence;
  for (;;) {
    u32 flag = step.cpu_flag ? load_acquire_system(step.cpu_flag) : sequence;
    u32 aborted = step.abort ? load_acquire_system(step.abort) : 0;  // whatever was waited for may not have come
    if (aborted) return fail(step, clock, ERROR_ABORTED);
    if (flag == sequence || *(const volatile u32*)&step.state->failed == clock) return;
    rest();
  }
}

// One thread of each block.
DEV void wait_for_parts(const Step& step) {
  u32 clock = step.state->clock;
  if (step.state->missing == 0 || blockIdx.x + blockIdx.y == 0) return;
  while (load_acquire_gpu(&step.state->summable) != clock) rest();
}

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  let_next_start();  // which waits until this has ended
  bool first = threadIdx.x + blockIdx.x + blockIdx.y == 0;
  if (first && step.state->missing) wait_for_processor(step);
  wait_for_earlier();
  if (first) {
    step.state->published = 0;
    store_release_gpu(&step.state->summable, step.state->clock);
  }
  if (combines_at_once(step)) return;
  __shared__ CombineShared shared;
  combine_columns<false>(layer, step, blockIdx.y, blockIdx.x * DOWN_CHUNK, layer.hidden, shared, [&] {
    if (threadIdx.x == 0) wait_for_parts(step);
  });
}

// combine: the output of a layer-step, once the CPU lane's parts are there. Grid (column chunks, rows), 256 threads.
//
// The first block waits for the host and tells the others: reads of one word of host memory by many blocks queue up.
#include "combine.cuh"

DEV void wait_for_processor(const Step& step, u32 clock) {
  if (step.state->failed == clock) return;
  bool aborted = step.abort && load_acquire_system(step.abort);  // whatever was waited for may not have come
  if (!aborted && step.cpu_flag) aborted = !wait_for(step, step.cpu_flag, step.state->sequence);
  if (aborted) fail(step, clock, ERROR_ABORTED);
}

// One thread of each block.
DEV void wait_for_parts(const Step& step) {
  u32 clock = step.state->clock;
  if (step.state->missing == 0) return;
  if (blockIdx.x + blockIdx.y > 0) {
    while (load_acquire_gpu(&step.state->summable) != clock) rest();
    return;
  }
  wait_for_processor(step, clock);
  store_release_gpu(&step.state->summable, clock);
}

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  let_next_start();  // which waits until this has ended
  wait_for_earlier();
  if (threadIdx.x + blockIdx.x + blockIdx.y == 0) step.state->published = 0;
  if (combines_at_once(step)) return;
  __shared__ CombineShared shared;
  combine_columns<false>(layer, step, blockIdx.y, blockIdx.x * DOWN_CHUNK, layer.hidden, shared, [&] {
    if (threadIdx.x == 0) wait_for_parts(step);
  });
}

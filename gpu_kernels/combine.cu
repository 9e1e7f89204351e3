// combine: the output of a layer-step, once the CPU lane's parts are there. Grid (column chunks, rows), 256 threads.
#include "combine.cuh"

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  if (combines_at_once(step)) return;
  if (threadIdx.x == 0 && step.state->missing && step.state->failed != step.state->clock) {
    bool aborted = step.abort && load_acquire_system(step.abort);  // whatever was waited for may not have come
    if (!aborted && step.cpu_flag) aborted = !wait_for(step, step.cpu_flag, step.state->sequence);
    if (aborted) fail(step, step.state->clock, ERROR_ABORTED);
  }
  __syncthreads();
  combine_columns(layer, step, blockIdx.y, blockIdx.x);
}

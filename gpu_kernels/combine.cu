// combine: the output of a layer-step, once the CPU lane's parts are there. Grid (column chunks, rows), 256 threads.
#include "combine.cuh"

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  if (combines_at_once(step)) return;
  if (threadIdx.x == 0 && step.cpu_flag && step.state->missing && step.state->failed != step.state->clock)
    if (!wait_for(step, step.cpu_flag, step.state->sequence)) fail(step, step.state->clock, ERROR_ABORTED);
  __syncthreads();
  combine_columns(layer, step, blockIdx.y, blockIdx.x);
}

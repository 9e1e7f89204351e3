// combine: the output of a layer-step, once the CPU lane's parts are there. Grid (column chunks, rows), 256 threads.
//
// The first block waits for the host and tells the others: reads of one word of host memory queue up, about a microsecond
// each. It looks before the plan has ended: what is later counts.
#include "combine.cuh"

// One thread: until the CPU lane's parts are there, or the step has failed.
DEV void wait_for_processor(const Step& step) {
  u32 clock = *(const volatile u32*)&step.state->clock, sequence = *(const volatile u32*)&step.state->sequence;
  bool side_by_side = step.abort == step.cpu_flag + 1;  // one look for both
  for (;; rest()) {
    uint4 words = make_uint4(sequence, 0, 0, 0);
    if (step.cpu_flag && side_by_side) words = load16(step.cpu_flag);
    if (step.cpu_flag && !side_by_side) words.x = *(const volatile u32*)step.cpu_flag;
    if (step.abort && !side_by_side) words.y = *(const volatile u32*)step.abort;
    if (words.y) return fail(step, clock, ERROR_ABORTED);  // whatever was waited for may not have come
    if (words.x == sequence || *(const volatile u32*)&step.state->failed == clock) break;
  }
  __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  let_next_start();  // which waits until this has ended
  __shared__ CombineShared shared;
  __shared__ bool failed;
  const volatile State& state = *step.state;
  u32 clock = state.clock, missing = state.missing, epoch = state.epoch;
  bool first = threadIdx.x + blockIdx.x + blockIdx.y == 0, ends = missing == 0 && combines_at_once(step);
  auto wait = [&] {
    if (first && missing) wait_for_processor(step);
    wait_for_earlier();
    if (first) step.state->epoch = epoch + 1;
    if (ends) return false;
    if (first && missing) store_release_gpu(&step.state->summable, clock);
    if (threadIdx.x == 0) {
      while (missing && load_acquire_gpu(&step.state->summable) != clock) rest();
      failed = state.failed == clock;
    }
    __syncthreads();
    return failed;
  };
  if (ends)
    wait();
  else
    combine_columns<false>(layer, step, blockIdx.y, blockIdx.x * DOWN_CHUNK, layer.hidden, shared, wait);
}

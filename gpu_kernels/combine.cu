// combine: the output of a layer-step, once all parts are there. Grid (column chunks, rows), 256 threads.
//
// It starts before the lists' blocks have ended, and knows by their flags when the parts of its columns are there. The
// first block waits for the host too and tells the others: reads of one word of host memory queue up, about a microsecond
// each. The first block ends last, after the plan's kernel.
#include "columns.cuh"
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

// How many items the plan has, once it is relayed: with misses it will be, and a plan that fails is an empty one.
DEV int await_plan(const Step& step) {
  u32 sequence = *(const volatile u32*)&step.state->sequence;
  uint4 header = load16(step.plan);
  for (; header.x != sequence; header = load16(step.plan)) rest();
  return (int)header.y;
}

// One warp: until the parts of these columns are there, of the hits and of the plan, or the step has failed.
DEV void wait_for_parts(const Layer& layer, const Step& step, const Progress& hits, const Progress& plan, const uint4& list,
                        int start, int end) {
  u32 clock = *(const volatile u32*)&step.state->clock;
  int planned = list.z ? await_plan(step) : 0, share = columns_of_task(layer);
  auto failed = [&] { return *(const volatile u32*)&step.state->failed == clock; };
  for (int task = start / share; task <= (end - 1) / share; task++) {
    wait_for_blocks(hits.parts + task, (int)list.y, CHUNKS, list.x);
    wait_for_blocks(plan.parts + task, planned, CHUNKS, clock, failed);
  }
}

// The first block, if publish has left it to the step's end to acknowledge a list: once all hits have read their slots.
DEV void acknowledge_at_end(const Layer& layer, const Step& step, const Progress& hits, const uint4& list) {
  int tasks = (layer.hidden + columns_of_task(layer) - 1) / columns_of_task(layer), warps = blockDim.x / 32;
  for (int task = threadIdx.x / 32; task < tasks; task += warps)
    wait_for_blocks(hits.parts + task, (int)list.y, CHUNKS, list.x);
  __syncthreads();
  if (threadIdx.x == 0) store_release_system(step.acknowledged, *(const volatile u32*)&step.state->applied);
}

extern "C" __global__ void __launch_bounds__(256)
    combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step, const __grid_constant__ Progress hits,
            const __grid_constant__ Progress plan) {
  let_next_start();  // which waits until this has ended
  __shared__ CombineShared shared;
  __shared__ bool failed, owes;
  uint4 list = load16(step.hits);  // the hits' number, how many they are, how many shards are missing
  u32 clock = *(const volatile u32*)&step.state->clock;
  int start = blockIdx.x * DOWN_CHUNK, end = min(start + DOWN_CHUNK, layer.hidden);
  bool first = blockIdx.x + blockIdx.y == 0, missing = list.z != 0;
  auto wait = [&] {
    if (first && missing && threadIdx.x == 0) {
      wait_for_processor(step);
      store_release_gpu(&step.state->summable, clock);
    }
    if (threadIdx.x < 32) wait_for_parts(layer, step, hits, plan, list, start, end);
    if (threadIdx.x == 0) {
      while (missing && load_acquire_gpu(&step.state->summable) != clock) rest();
      failed = *(const volatile u32*)&step.state->failed == clock;
    }
    __syncthreads();
    return failed;
  };
  if (missing)
    combine_columns<false>(layer, step, blockIdx.y, start, end, shared, wait);
  else
    combine_columns<true>(layer, step, blockIdx.y, start, end, shared, wait);
  if (!first) return;
  wait_for_earlier();
  if (threadIdx.x == 0) {
    while (load_acquire_gpu(&step.state->published) != list.x) rest();  // the next step looks up what this one has changed
    owes = *(const volatile u32*)&step.state->owes != 0;
  }
  __syncthreads();
  if (owes) acknowledge_at_end(layer, step, hits, list);
  if (threadIdx.x == 0) step.state->epoch = list.x;
}

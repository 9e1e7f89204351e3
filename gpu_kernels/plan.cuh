// The first block of a plan: the one that talks to the host, so that the others look at device memory only.
//
// A thousand blocks that read the same words of host memory queue up, some microseconds each. So one block fetches
// the plan, changes the slot table, and asks for the sake of all whether copies are still to be waited for.
#pragma once
#include "shard.cuh"
#include "updates.cuh"

// One thread: whether a list of the host's is that of this step.
DEV bool is_there(const Step& step, const u32* sequence, int wait) {
  if (wait) return wait_for(step, sequence, step.state->sequence);
  return load_acquire_system(sequence) == step.state->sequence;
}

// All threads: a plan from host memory to `Step.plan`. A plan of another step becomes an empty one, and fails the step;
// with `wait` it is waited for.
DEV void relay_plan(const Step& step, const Progress& progress, const WorkList* list, int max_items, int wait) {
  __shared__ int ours;
  u32 clock = step.state->clock;
  if (threadIdx.x == 0) {
    ours = is_there(step, &list->sequence, wait);
    if (!ours) fail(step, clock, wait ? ERROR_ABORTED : ERROR_STALE_PLAN);
  }
  __syncthreads();
  int count = min(*(const volatile int*)&list->count, max_items);
  int words = ours ? count * (int)(sizeof(Item) / 4) : 0;
  for (int i = threadIdx.x; i < words; i += blockDim.x) ((u32*)(step.plan + 1))[i] = ((const volatile u32*)(list + 1))[i];
  if (threadIdx.x == 0) step.plan->count = ours ? count : 0;
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(progress.relayed, clock);
}

// All threads: the slot table as the plan wants it, for the look-ups of later steps.
DEV void run_updates(const Step& step, const Updates* updates, int wait) {
  __shared__ int ours;
  if (threadIdx.x == 0) {
    ours = is_there(step, &updates->sequence, wait);
    if (!ours) fail(step, step.state->clock, wait ? ERROR_ABORTED : ERROR_STALE_PLAN);
  }
  __syncthreads();
  if (ours) apply_updates(step.table, updates);
}

// One thread: until every copy has landed, or the host says that nothing will come any more.
DEV void watch_copies(const Step& step) {
  const Item* items = (const Item*)(step.plan + 1);
  for (int i = 0; i < step.plan->count; i++)
    if (items[i].flag && !wait_for(step, items[i].flag, items[i].flag_value))
      return fail(step, step.state->clock, ERROR_ABORTED);
}

// One thread of another block: until an item's copy has landed; false if the step has failed.
DEV bool wait_for_copy(const Step& step, const Work& work) {
  while (load_acquire_system(work.item.flag) != work.item.flag_value) {
    if (*(const volatile u32*)&step.state->failed == work.clock) return false;
    rest();
  }
  return true;
}

// Streamed shards: until the bytes are there. Every thread hears whether they are.
DEV bool bytes_are_there(const Step& step, const Work& work) {
  __shared__ int go;
  if (!work.item.flag) return true;
  if (threadIdx.x == 0) go = wait_for_copy(step, work);
  __syncthreads();
  return go;
}

// The first block's work.
DEV void tend_plan(const Step& step, const Progress& progress, const WorkList* list, const Updates* updates, int max_items,
                   int wait) {
  relay_plan(step, progress, list, max_items, wait);
  run_updates(step, updates, wait);
  if (threadIdx.x == 0) watch_copies(step);
}

// apply: a plan's changes of the slot table. One block. Nothing is done for a plan of another step.
#include "updates.cuh"

extern "C" __global__ void apply(const __grid_constant__ Step step, const Updates* list) {
  if (step.state->missing == 0) return;
  if (load_acquire_system(&list->sequence) == step.state->sequence)
    apply_updates(step.table, list);
  else if (threadIdx.x == 0)
    fail(step, step.state->clock, ERROR_STALE_PLAN);
}

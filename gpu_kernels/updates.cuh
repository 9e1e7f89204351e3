// The slot table's changes: a list of (entry, slot) from the host, applied by the stream that reads the table.
#pragma once
#include "waits.cuh"

// All threads of a block; entries of a list are distinct, so their order does not matter.
DEV void apply_updates(int* table, const Updates* list) {
  const Update* updates = (const Update*)(list + 1);
  int count = *(const volatile int*)&list->count;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const volatile Update& update = updates[i];
    int entry = update.entry, slot = update.slot;
    table[entry] = slot;
  }
}

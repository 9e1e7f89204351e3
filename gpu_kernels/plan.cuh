// The first block of a plan: the one that talks to the host, so that the others look at device memory only.
//
// A thousand blocks that read the same words of host memory queue up, and each way to the host and back takes some
// microseconds. So one block fetches the plan, all of it in one look: each of its threads reads sixteen bytes, over and
// over, until they have the step's number in them. The host writes the number last, into each sixteen bytes.
#pragma once
#include "shard.cuh"
#include "updates.cuh"

constexpr int ITEM_CHUNKS = 3;  // of an item's sixteen-byte chunks, those with something in them
// Threads that look: for the header and some items, and from the second half of the block on for some updates. What is
// more than that is read afterwards, so that a look is small.
constexpr int HALF = 128, ITEM_LOOKS = 8 * ITEM_CHUNKS, UPDATE_LOOKS = 16;

struct Relay {  // in shared memory
  int seen, count, num_updates, torn, stop;
};

// Chunk `i` of a plan's items.
DEV const uint4* item_chunk(const WorkList* list, int i) {
  return (const uint4*)((const Item*)(list + 1) + i / ITEM_CHUNKS) + i % ITEM_CHUNKS;
}

DEV void keep_item(const Step& step, int i, const uint4& chunk) {
  store16((volatile uint4*)((Item*)(step.plan + 1) + i / ITEM_CHUNKS) + i % ITEM_CHUNKS, chunk);
}

// All threads, 256 of them, with up to two updates an item: the plan from host memory to `Step.plan`, its updates to the slot table. A plan of another
// step becomes an empty one, and fails the step; with `wait` it is waited for.
DEV void relay_plan(const Step& step, const WorkList* list, const Updates* updates, int max_items, int wait) {
  __shared__ Relay relay;
  u32 clock = *(const volatile u32*)&step.state->clock, sequence = *(const volatile u32*)&step.state->sequence;
  int thread = threadIdx.x, own = thread < HALF ? thread - 1 : thread - HALF;
  const uint4* at = thread == 0 ? (const uint4*)list : thread < HALF ? item_chunk(list, own) : update_chunk(updates, own);
  bool looks_at = thread == 0 || own < (thread < HALF ? min(ITEM_LOOKS, max_items * ITEM_CHUNKS) : min(UPDATE_LOOKS, 2 * max_items));
  uint4 chunk = make_uint4(0, 0, 0, 0);
  for (u32 looks = 1;; looks++) {
    if (looks_at) chunk = load16(at);
    if (thread == 0) {
      relay = {chunk.x == sequence, min((int)chunk.y, max_items), (int)chunk.z, 0, !wait};
      if ((looks & 63u) == 0 && step.abort && load_acquire_system(step.abort)) relay.stop = 1;
    }
    __syncthreads();
    int mine = thread < HALF ? relay.count * ITEM_CHUNKS : relay.num_updates;
    if (relay.seen && thread > 0 && looks_at && own < mine && chunk.z != sequence) relay.torn = 1;
    __syncthreads();
    bool whole = relay.seen && !relay.torn, ends = whole || relay.stop;
    __syncthreads();
    if (ends) break;
    rest();
  }
  bool ours = relay.seen && !relay.torn;
  int count = ours ? relay.count : 0, chunks = count * ITEM_CHUNKS, num_updates = ours ? relay.num_updates : 0;
  if (thread > 0 && thread < HALF && looks_at && own < chunks) keep_item(step, own, chunk);
  for (int i = ITEM_LOOKS + thread; i < chunks; i += blockDim.x) keep_item(step, i, load16(item_chunk(list, i)));
  if (thread == 0) {
    if (!ours) fail(step, clock, wait ? ERROR_ABORTED : ERROR_STALE_PLAN);
    store16((volatile uint4*)step.plan, make_uint4(sequence, (u32)count, 0, 0));
  }
  if (thread >= HALF && looks_at && own < num_updates) step.table[chunk.x] = (int)chunk.y;
  for (int i = UPDATE_LOOKS + thread; i < num_updates; i += blockDim.x) {
    uint4 update = load16(update_chunk(updates, i));
    step.table[update.x] = (int)update.y;
  }
}

// Item `index` of the plan once the first block has relayed it, if there can be one, and how many there are: header and item
// have the step's number in each sixteen bytes, so one look is enough. With `acquires` what publish wrote may be read through
// L1 from here on; without, L1 may hold rows of an earlier step, since this kernel has started early.
DEV int await_item(const Step& step, int index, int max_items, bool acquires, Work& work) {
  static_assert(alignof(Work) >= 16, "an item is written in pieces of sixteen bytes");
  __shared__ int relayed;
  int thread = threadIdx.x;
  if (thread < 32) {
    u32 sequence = *(const volatile u32*)&step.state->sequence;
    bool of_item = thread >= 1 && thread <= ITEM_CHUNKS && index < max_items;
    const uint4* at = of_item ? (const uint4*)((const Item*)(step.plan + 1) + index) + thread - 1 : (const uint4*)step.plan;
    for (;; rest()) {
      uint4 seen = load16(at);
      bool header = __shfl_sync(FULL, seen.x, 0) == sequence;
      int count = __shfl_sync(FULL, (int)seen.y, 0);
      if (!header || !__all_sync(FULL, !of_item || index >= count || seen.z == sequence)) continue;
      if (of_item) ((uint4*)&work.item)[thread - 1] = seen;
      if (thread == 0) relayed = count;
      break;
    }
    if (acquires && thread == 0) load_acquire_gpu(&step.plan->sequence);
  }
  if (thread == 32) work.clock = *(const volatile u32*)&step.state->clock;
  __syncthreads();
  return relayed;
}

// One thread: until a copy has landed. False: the host said that nothing will come any more, or not in time.
DEV bool watch_copy(const Step& step, const Item& item, u32 clock) {
  for (u32 looks = 1; load_acquire_system(item.flag) != item.sequence; looks++) {
    if ((looks & 63u) == 0 && step.abort) {
      if (load_acquire_system(step.abort)) return fail(step, clock, ERROR_ABORTED), false;
      if (load_acquire_system(step.abort + 1) == item.sequence) return step.state->rescued = clock, false;
    }
    rest();
  }
  return true;
}

// One thread: until every copy has landed, or none will in time.
DEV void watch_copies(const Step& step) {
  const Item* items = (const Item*)(step.plan + 1);
  u32 clock = *(const volatile u32*)&step.state->clock;
  for (int i = 0; i < step.plan->count; i++)
    if (items[i].flag && !watch_copy(step, items[i], clock)) return;
}

// One thread of another block: until an item's copy has landed; false if the step has failed. What will not be copied in
// time is read in place, and stored into its slot: a copy that comes all the same brings the same bytes.
DEV bool wait_for_copy(const Step& step, Work& work) {
  Item& item = work.item;
  const u8* in_slot = item.weights;
  while (load_acquire_system(item.flag) != item.sequence) {
    if (*(const volatile u32*)&step.state->failed == work.clock) return false;
    if (*(const volatile u32*)&step.state->rescued == work.clock) {
      item.weights = item.fill, item.fill = (u8*)in_slot;
      return true;
    }
    rest();
  }
  item.fill = nullptr;  // it was where the copy came from
  return true;
}

// Streamed shards: until the bytes are there. Every thread hears whether they are.
DEV bool bytes_are_there(const Step& step, Work& work) {
  __shared__ int go;
  if (!work.item.flag) return true;
  if (threadIdx.x == 0) go = wait_for_copy(step, work);
  __syncthreads();
  return go;
}

// The first block's work.
DEV void tend_plan(const Step& step, const WorkList* list, const Updates* updates, int max_items, int wait) {
  relay_plan(step, list, updates, max_items, wait);
  __syncthreads();
  if (threadIdx.x == 0) watch_copies(step);
}

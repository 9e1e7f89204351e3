// The slot table's changes: a list of (entry, slot) from the host, applied by the stream that reads the table.
#pragma once
#include "waits.cuh"

constexpr int LOOKED_AT = 31;  // changes that are read together with the header

// Sixteen bytes of a list: which entry, its slot, the list's number.
DEV const uint4* update_chunk(const Updates* list, int i) { return (const uint4*)((const Update*)(list + 1) + i); }

// What one warp finds pending: the number of the list that is applied now, and when it is to be acknowledged.
struct Pending { u32 sequence; bool at_end; };

// One warp: the changes of the list that is pending, if it is a new one. The header and `most` changes are read in one look,
// since each way to the host and back takes more than a microsecond, and reads of one word queue up. Entries of a list are
// distinct, so their order does not matter.
DEV Pending apply_pending(int* table, const Updates* list, u32 applied, int most) {
  int lane = threadIdx.x % 32, looks = min(LOOKED_AT, most);
  const uint4* at = lane == 0 || lane > looks ? (const uint4*)list : update_chunk(list, lane - 1);
  u32 sequence, at_end;
  int count;
  for (;; rest()) {
    uint4 seen = load16(at);
    sequence = __shfl_sync(FULL, seen.x, 0), count = __shfl_sync(FULL, (int)seen.y, 0), at_end = __shfl_sync(FULL, seen.z, 0);
    if (sequence == applied) return {applied, false};
    bool mine = lane > 0 && lane <= min(looks, count);
    if (!__all_sync(FULL, !mine || seen.z == sequence)) continue;  // the header came before them
    if (mine) table[seen.x] = (int)seen.y;
    break;
  }
  for (int i = looks + lane; i < count; i += 32) {
    uint4 seen = load16(update_chunk(list, i));
    for (; seen.z != sequence; seen = load16(update_chunk(list, i))) rest();
    table[seen.x] = (int)seen.y;
  }
  return {sequence, at_end != 0};
}

// The routing of a step with up to 32 entries (rows x ranks), one a lane of one warp: no table over all experts.
#pragma once
#include "words.cuh"
#include "exact.cuh"

constexpr int FEW = 32;

struct Few {
  int expert;    // of this lane's entry; -1: skipped
  u32 peers;     // the lanes whose entries have it too
  int position;  // of the entry, sorted by expert, then by entry; -1: skipped
  int first;     // position of the group's first entry
  int group;     // place of the expert among those that are routed to, sorted
  bool leads;    // of its group, the first entry
  int num_groups;
};

// One warp; `expert` of this lane's entry, -1 without one or where it is skipped; entries from `count` on there are none.
DEV Few group_few(int expert, int count) {
  int lane = threadIdx.x % 32;
  Few few = {expert, __match_any_sync(FULL, expert), 0, 0, 0, false, 0};
  few.leads = expert >= 0 && lane == __ffs(few.peers) - 1;
  u32 leaders = __ballot_sync(FULL, few.leads);
  few.num_groups = __popc(leaders);
  for (int j = 0; j < count; j++) {
    int other = __shfl_sync(FULL, expert, j);
    bool below = other >= 0 && other < expert;
    few.first += below;
    few.position += below || (other == expert && j < lane);
    few.group += below && ((leaders >> j) & 1u);
  }
  if (expert < 0) few.position = -1;
  return few;
}

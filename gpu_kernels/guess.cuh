// Hits of a single row in a step without misses start while publish still looks them up.
//
// Each block looks up for itself which hit it will get, makes the row's records for itself, and sends for the bytes.
// Publish has the last word: while the bytes are on their way a block compares. Where the two differ (the slot table has just
// changed) it begins anew.
#pragma once
#include "combine.cuh"
#include "few.cuh"
#include "rows.cuh"
#include "shard.cuh"

struct Guess {
  int is_hit;  // of a step of hits alone, each expert once
  int expert[FEW];
};

DEV bool guesses(const Step& step, const Tiles& tiles) {
  return STARTS_EARLY && ONE_RECORD && tiles.whole && step.num_rows == 1 && step.top_k <= FEW;
}

// One warp: the hit that publish will put into place `index` of its list.
DEV void guess_item(const Layer& layer, const Step& step, int index, Guess& guess, Item& item) {
  int lane = threadIdx.x % 32, hits = 0;
  i64 id = lane < step.top_k ? id_of(step, lane) : -1;
  Few few = group_few(id >= 0 && id < layer.num_experts ? (int)id : -1, step.top_k);
  if (few.leads) guess.expert[few.group] = few.expert;
  bool once = __all_sync(FULL, few.expert < 0 || __popc(few.peers) == 1);
  __syncwarp();
  int total = few.num_groups * layer.num_shards;
  for (int base = 0; base < total; base += 32) {
    int at = base + lane, group = at / layer.num_shards, shard = at - group * layer.num_shards;
    int slot = at < total ? __ldcg(layer.slot_of + guess.expert[group] * layer.num_shards + shard) : -1;
    if (at == index && slot >= 0)
      item = {(const u8*)(layer.slots + slot * layer.slot_nbytes), 0, shard, nullptr, 0, group, nullptr, 0, 1, {}};
    hits += __popc(__ballot_sync(FULL, slot >= 0));
  }
  if (lane == 0) guess.is_hit = once && hits == total && index < total;
}

DEV void make_block(u8* row, int block, const float v[8]) {
  int lane = threadIdx.x % 32;
  if (UpFormat::INT8)
    write_record<true>(v, row + block * SPREAD_RECORD, lane);
  else
    store8((float*)row + block * BLOCK + 8 * lane, v);
}

// What each warp makes of the row, a block of it at first, in two parts: its elements are asked for at once, and turned into
// records when nothing else is to be done.
struct RowShare { float v[8]; };

DEV RowShare load_share(const Layer& layer, const Step& step, int block) {
  RowShare share;
  load8(step, (const u8*)step.x, block * BLOCK + 8 * (threadIdx.x % 32), layer.hidden, share.v);
  return share;
}

DEV void make_row(const Layer& layer, const Step& step, const RowShare& share, u8* row) {
  int nb = (layer.hidden + BLOCK - 1) / BLOCK, warp = threadIdx.x / 32;
  if (warp < nb) make_block(row, warp, share.v);
  for (int block = warp + WARPS; block < nb; block += WARPS) make_block(row, block, load_share(layer, step, block).v);
}

// The list's header in the lanes of a warp but 1 to 3, which get place `index`, sixteen bytes each.
DEV uint4 look_at(const Step& step, int index) {
  int lane = threadIdx.x % 32;
  const uint4* item = (const uint4*)((const Item*)(step.hits + 1) + index);
  return load16(lane >= 1 && lane <= 3 ? item + lane - 1 : (const uint4*)step.hits);
}

// One warp: whether the list has what was guessed. Waits for publish.
DEV bool judge(const Step& step, int index, const Work& work) {
  int lane = threadIdx.x % 32, count;
  uint4 seen;
  for (;; rest()) {
    seen = look_at(step, index);
    bool header = __shfl_sync(FULL, seen.x, 0) == work.clock, of_item = lane >= 1 && lane <= 3;
    count = __shfl_sync(FULL, (int)seen.y, 0);
    bool whole = __all_sync(FULL, !of_item || seen.z == work.clock);
    if (header && (whole || index >= count)) break;
  }
  const Item& item = work.item;
  bool same = true;
  if (lane == 1) same = (seen.x | (u64)seen.y << 32) == (u64)item.weights && (int)seen.w == item.shard;
  if (lane == 2) same = (int)seen.w == item.first_position;
  if (lane == 3) same = (int)seen.w == item.num_rows;
  return __all_sync(FULL, same) && index < count;
}

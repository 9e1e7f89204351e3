// publish: hidden rows to activation records, ids to groups, groups to hits and misses; with misses the mailbox.
//
// Grid: one block a row, 512 threads. Warp 0 of block 0 groups and looks up while the others make records, so a single
// row costs the longer of the two. Few rows go to the mailbox at once, whether anything is missing or not; more of them
// when it is known. The block that arrives last closes the step.
// Reads 4 * hidden bytes a row and the slot table's entries; writes 320 or 1024 bytes per 256 elements.
#include "combine.cuh"
#include "few.cuh"
#include "rows.cuh"
#include "updates.cuh"

// ------------------------------------------------------------------------------------------------ rows
// Whether rows go to the host before it is known if it needs them: cheaper than to wait for that.
DEV bool mails_at_once(const Step& step) { return step.num_rows <= MAILED_ROWS; }

// A single row's records are told piece by piece, each with the clock: to close a mailbox takes a way to the host and back.
DEV void mail_block(const Step& step, i64 block, const float v[8], u32 clock, int lane) {
  bool tells = step.told && step.num_rows == 1;
  u8* record = tells ? nullptr : step.mail_records + block * RECORD;
  if (step.mail_records) write_record(v, record, lane, tells ? step.told + 32 * block : nullptr, clock);
  if (step.mail_floats) store8(step.mail_floats + block * BLOCK + 8 * lane, v);
}

// Records of one block of a row, by one warp; whether an element is not finite.
DEV bool publish_block(const Layer& layer, const Step& step, int row, int block, u32 clock, int lane) {
  int nb = (layer.hidden + BLOCK - 1) / BLOCK;
  float v[8];
  load8(step, (const u8*)step.x + row * step.x_stride, block * BLOCK + 8 * lane, layer.hidden, v);
  if (step.floats) store8(step.floats + ((i64)row * nb + block) * BLOCK + 8 * lane, v);
  if (step.records) write_record(v, step.records + ((i64)row * nb + block) * RECORD, lane);
  if (mails_at_once(step)) mail_block(step, (i64)row * nb + block, v, clock, lane);
  return not_finite(v);
}

// -------------------------------------------------------------------------------------------- grouping
struct Grouping {  // in shared memory, num_experts each
  int *rows, *next;            // by expert: how many, and the next one's position
  int *expert, *first, *count; // by group: whose, first position, rows
  u64* missing;                // by group: a bit for each missing shard
};

DEV Grouping shared_grouping(u8* shared, int num_experts) {
  u64* missing = (u64*)shared;
  int* rows = (int*)(missing + num_experts);
  return {rows, rows + num_experts, rows + 2 * num_experts, rows + 3 * num_experts, rows + 4 * num_experts, missing};
}

DEV void note_group(const Step& step, const Grouping& g, int group, int expert, int first, int count) {
  int n = step.num_rows * step.top_k;
  g.expert[group] = expert, g.first[group] = first, g.count[group] = count, g.missing[group] = 0;
  step.groups[group] = expert, step.groups[n + group] = first, step.groups[2 * n + group] = count;
}

// The expert of an entry, -1 if it is skipped; ids that do not exist are skipped and reported.
DEV int expert_of(const Layer& layer, const Step& step, int entry, u32 clock) {
  i64 id = id_of(step, entry);
  if (id >= 0 && id < layer.num_experts) return (int)id;
  if (id != -1 && id != layer.num_experts && step.error) *(volatile u32*)(step.error + ERROR_BAD_ID) = clock;
  return -1;
}

DEV void count_rows(const Layer& layer, const Step& step, const Grouping& g, u32 clock, int lane) {
  int n = step.num_rows * step.top_k;
  for (int e = lane; e < layer.num_experts; e += 32) g.rows[e] = 0;
  __syncwarp();
  for (int base = 0; base < n; base += 32) {
    int e = base + lane < n ? expert_of(layer, step, base + lane, clock) : -1;
    u32 peers = __match_any_sync(FULL, e);
    if (e >= 0 && lane == __ffs(peers) - 1) g.rows[e] += __popc(peers);
    __syncwarp();
  }
}

DEV int sum_below(int value, int lane) {  // of the lanes before this one
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(FULL, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - value;
}

// Groups in the order of their experts; each expert's first position into `next`. The number of groups.
DEV int list_groups(const Layer& layer, const Step& step, const Grouping& g, int lane) {
  int share = (layer.num_experts + 31) / 32;
  int first = min(lane * share, layer.num_experts), last = min(first + share, layer.num_experts);
  int rows = 0, groups = 0;
  for (int e = first; e < last; e++) rows += g.rows[e], groups += g.rows[e] > 0;
  int position = sum_below(rows, lane), group = sum_below(groups, lane);
  int num_groups = __shfl_sync(FULL, group + groups, 31);
  for (int e = first; e < last; e++) {
    g.next[e] = position;
    if (g.rows[e] == 0) continue;
    note_group(step, g, group, e, position, g.rows[e]);
    position += g.rows[e], group++;
  }
  __syncwarp();
  return num_groups;
}

DEV void place_entries(const Layer& layer, const Step& step, const Grouping& g, u32 clock, int lane) {
  int n = step.num_rows * step.top_k;
  for (int base = 0; base < n; base += 32) {
    int entry = base + lane, e = entry < n ? expert_of(layer, step, entry, clock) : -1;
    u32 peers = __match_any_sync(FULL, e);
    int position = e < 0 ? -1 : g.next[e] + __popc(peers & ((1u << lane) - 1u));
    __syncwarp();
    if (e >= 0 && lane == __ffs(peers) - 1) g.next[e] += __popc(peers);
    __syncwarp();
    if (entry < n) step.position_of[entry] = position;
    if (position >= 0) step.token_of[position] = entry / step.top_k;
  }
}

// The same for up to FEW entries, one in each lane.
DEV Few place_few(const Layer& layer, const Step& step, const Grouping& g, u32 clock, int lane) {
  int n = step.num_rows * step.top_k;
  Few few = group_few(lane < n ? expert_of(layer, step, lane, clock) : -1, n);
  if (few.leads) note_group(step, g, few.group, few.expert, few.first, __popc(few.peers));
  if (lane < n) step.position_of[lane] = few.position;
  if (few.position >= 0) step.token_of[few.position] = lane / step.top_k;
  __syncwarp();
  return few;
}

// --------------------------------------------------------------------------------------------- look-up
// One item, each sixteen bytes of it with the number by which early starters know this step.
DEV void write_hit(const Layer& layer, const Step& step, int index, int slot, int shard, int first, int rows, u32 mark) {
  u64 at = layer.slots + (u64)slot * layer.slot_nbytes;
  volatile uint4* item = (volatile uint4*)((Item*)(step.hits + 1) + index);
  store16(item, make_uint4((u32)at, (u32)(at >> 32), mark, (u32)shard));
  store16(item + 1, make_uint4(0, 0, mark, (u32)first));
  store16(item + 2, make_uint4(0, 0, mark, (u32)rows));
}

// Every shard of every group: a hit becomes an item, a miss a bit. The number of missing shards.
DEV int look_up(const Layer& layer, const Step& step, const Grouping& g, int num_groups, u32 mark, int lane) {
  int total = num_groups * layer.num_shards, hits = 0;
  for (int base = 0; base < total; base += 32) {
    int at = base + lane, group = at / layer.num_shards, shard = at - group * layer.num_shards;
    bool real = at < total;
    int expert = real ? g.expert[group] : 0;
    int slot = real ? layer.slot_of[expert * layer.num_shards + shard] : -1;
    u32 found = __ballot_sync(FULL, slot >= 0);
    if (real) {
      int rows = g.count[group], first = g.first[group];
      if (slot >= 0)
        write_hit(layer, step, hits + __popc(found & ((1u << lane) - 1u)), slot, shard, first, rows, mark);
      else
        atomicOr(&g.missing[group], 1ull << shard);
      for (int row = first; row < first + rows; row++) step.lane[row * layer.num_shards + shard] = slot >= 0;
    }
    hits += __popc(found);
  }
  if (lane == 0) step.state->routed += (u64)total;
  return total - hits;
}

// ---------------------------------------------------------------------------------------- what was used
DEV void stamp(const Layer& layer, const Grouping& g, int num_groups, u32 clock, int lane) {
  if (layer.stamps)
    for (int i = lane; i < num_groups; i += 32) layer.stamps[g.expert[i]] = clock;
}

// What a single row's step without misses used, for a host that is not asked: four times sixteen bytes, each with the
// clock, in one store; layer and number of experts, then their ids in pairs.
DEV void tell_use(const Layer& layer, const Step& step, const Grouping& g, int num_groups, u32 clock, int lane) {
  if (!step.uses || num_groups > USE_IDS || lane >= 4) return;
  u32 words[3];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    int pair = 3 * lane + i - 1, first = 2 * pair, second = 2 * pair + 1;
    u32 low = pair >= 0 && first < num_groups ? (u32)g.expert[first] : 0;
    u32 high = pair >= 0 && second < num_groups ? (u32)g.expert[second] : 0;
    words[i] = pair < 0 ? (u32)layer.layer | (u32)num_groups << 16 : low | high << 16;
  }
  store16(step.uses + (i64)(clock % NUM_USES) * (USE_WORDS / 4) + lane, make_uint4(clock, words[0], words[1], words[2]));
}

// --------------------------------------------------------------------------------------------- mailbox
DEV void mail_header(const Layer& layer, const Step& step, int num_groups, int missing, u32 clock) {
  Mailbox* mail = step.mail;
  mail->begin = step.state->sequence = step.state->sequence + 1;
  mail->layer = layer.layer, mail->num_rows = step.num_rows, mail->top_k = step.top_k;
  mail->num_groups = num_groups, mail->num_missing = missing, mail->clock = clock;
}

DEV void mail_group(const Step& step, const Grouping& g, int group) {
  int n = step.num_rows * step.top_k;
  step.mail_groups[group] = g.expert[group];
  step.mail_groups[n + group] = g.first[group];
  step.mail_groups[2 * n + group] = g.count[group];
  step.mail_missing[group] = g.missing[group];
}

// All threads of block 0: what the host needs to plan.
DEV void write_mail(const Layer& layer, const Step& step, const Grouping& g, int num_groups, int missing, u32 clock) {
  int n = step.num_rows * step.top_k;
  if (threadIdx.x == 0) mail_header(layer, step, num_groups, missing, clock);
  for (int i = threadIdx.x; i < num_groups; i += blockDim.x) mail_group(step, g, i);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    step.mail_tokens[i] = step.token_of[i];
    step.mail_weights[i] = weight_of(step, i);
  }
}

// A single row's missing shards in sixteen bytes a group, each with the step's number at both ends: the host can plan
// before the mailbox is closed, which takes a way to the host and back.
DEV void write_brief(const Layer& layer, const Step& step, const Grouping& g, const Few& few, u32 clock, int lane) {
  bool once = __all_sync(FULL, few.expert < 0 || __popc(few.peers) == 1);
  if (!step.brief || step.num_rows != 1 || layer.num_shards > 32 || !once) return;
  u32 sequence = *(volatile u32*)&step.state->sequence + 1;
  if (few.leads) store16(step.brief + 1 + few.group, make_uint4(sequence, (u32)few.expert, (u32)g.missing[few.group], sequence));
  if (lane == 0) store16(step.brief, make_uint4(sequence, (u32)layer.layer | (u32)few.num_groups << 16, clock, sequence));
}

// The same by one warp that has the entries in its lanes.
DEV void write_few_mail(const Layer& layer, const Step& step, const Grouping& g, const Few& few, int missing, u32 clock, int lane) {
  write_brief(layer, step, g, few, clock, lane);
  __syncwarp();
  if (lane == 0) mail_header(layer, step, few.num_groups, missing, clock);
  if (few.leads) mail_group(step, g, few.group);
  if (few.position >= 0) step.mail_tokens[few.position] = lane / step.top_k;
  if (lane < step.num_rows * step.top_k) step.mail_weights[lane] = weight_of(step, lane);
}

DEV void copy_words(uint4* to, const uint4* from, i64 count) {
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) to[i] = __ldcg(from + i);
}

// All threads of the last block: the rows, if they are not there yet, then the word that says that all is there. That takes a
// way to the host and back, so the hits know their list by then, and the plan's blocks can start.
DEV void close_mail(const Layer& layer, const Step& step) {
  i64 blocks = (i64)step.num_rows * ((layer.hidden + BLOCK - 1) / BLOCK);
  bool later = !mails_at_once(step);
  if (later && step.records) copy_words((uint4*)step.mail_records, (const uint4*)step.records, blocks * (RECORD / 16));
  if (later && step.floats) copy_words((uint4*)step.mail_floats, (const uint4*)step.floats, blocks * (BLOCK / 4));
  for (int i = threadIdx.x; i < step.num_rows; i += blockDim.x) step.mail_bad[i] = __ldcg(step.row_bad + i);
  __syncthreads();
  if (threadIdx.x == 0) store_release_system(&step.mail->end, *(volatile u32*)&step.state->sequence);
}

// One warp of the last block, when the hits know their list: what is on its way to or from the host holds nothing up but the
// step's end. A pending list that the stream has not seen is applied after this step's look-ups, then acknowledged, or at the
// step's end by combine: then nobody reads any more what was looked up before.
DEV void end_publish(const Layer& layer, const Step& step, u32 mark) {
  u32 applied = step.state->applied;
  Pending pending = {applied, false};
  if (step.pending) pending = apply_pending(step.table, step.pending, applied, layer.num_experts * layer.num_shards);
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  step.state->applied = pending.sequence, step.state->owes = pending.at_end;
  store_release_gpu(&step.state->published, mark);
  if (pending.sequence != applied && !pending.at_end) store_release_system(step.acknowledged, pending.sequence);
}

// The list's header, in one piece and last of all: whoever started early knows by it that publish has done its work.
DEV void release_hits(const Layer& layer, const Step& step, u32 mark) {
  u32 missing = *(volatile u32*)&step.state->missing, groups = *(volatile u32*)&step.state->num_groups;
  __threadfence();
  store16((volatile uint4*)step.hits, make_uint4(mark, groups * layer.num_shards - missing, missing, 0));
}

// Whether all other blocks have done their part; of all blocks, one hears yes.
DEV bool arrives_last(const Step& step, u32& arrived) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(&step.state->arrived, 1u);
  __syncthreads();
  if (arrived != gridDim.x - 1) return false;
  __threadfence();
  if (threadIdx.x == 0) step.state->arrived = 0;
  return true;
}

extern "C" __global__ void __launch_bounds__(512) publish(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  wait_for_earlier();
  let_next_start();
  DYNAMIC_SHARED(shared);
  __shared__ int num_groups, missing, bad;
  __shared__ u32 arrived;
  Grouping g = shared_grouping(shared, layer.num_experts);
  int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  u32 clock = step.state->clock + 1, mark = step.state->epoch + 1;
  bool first = row == 0;
  if (threadIdx.x == 0) bad = 0;
  __syncthreads();
  bool few = step.num_rows * step.top_k <= FEW, tells = few && gridDim.x == 1;
  if (first && warp == 0) {
    int groups, misses;
    if (few) {
      Few routed = place_few(layer, step, g, clock, lane);
      groups = routed.num_groups, misses = look_up(layer, step, g, groups, mark, lane);
      __syncwarp();
      if (misses) write_few_mail(layer, step, g, routed, misses, clock, lane);
    } else {
      count_rows(layer, step, g, clock, lane);
      groups = list_groups(layer, step, g, lane);
      place_entries(layer, step, g, clock, lane);
      misses = look_up(layer, step, g, groups, mark, lane);
    }
    if (!tells) stamp(layer, g, groups, clock, lane);
    if (lane == 0) num_groups = groups, missing = misses;
  } else {
    int helpers = first ? num_warps - 1 : num_warps, nb = (layer.hidden + BLOCK - 1) / BLOCK;
    for (int block = first ? warp - 1 : warp; block < nb; block += helpers)
      if (publish_block(layer, step, row, block, clock, lane)) bad = 1;
  }
  __syncthreads();
  if (threadIdx.x == 0) step.row_bad[row] = bad;
  if (first) {
    if (missing && !few) write_mail(layer, step, g, num_groups, missing, clock);
    if (threadIdx.x == 0) step.state->missing = missing, step.state->num_groups = num_groups;
  }
  if (gridDim.x > 1 && !arrives_last(step, arrived)) return;
  if (threadIdx.x == 0) {
    step.state->clock = clock;
    release_hits(layer, step, mark);
  }
  if (gridDim.x == 1 ? missing : *(volatile int*)&step.state->missing) close_mail(layer, step);
  __syncthreads();
  if (warp != 0) return;
  if (tells) stamp(layer, g, num_groups, clock, lane);
  if (tells && missing == 0) tell_use(layer, step, g, num_groups, clock, lane);
  end_publish(layer, step, mark);
}

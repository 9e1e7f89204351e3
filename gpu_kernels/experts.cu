// experts_hit, experts_plan: the shards of a work list, from the records of their rows to their parts of the output.
//
// Grid: CHUNKS blocks an item, 256 threads, and for a plan one before them (plan.cuh). A block multiplies
// the gate and up rows of UP_CHUNK neurons, then makes its share of the columns of the shard's part, once the item's
// blocks have made h; without misses the last item's blocks combine. Weights go through shared memory by coalesced
// asynchronous copies: where both shares fit, all are sent before anything else is done (`whole`), else tile by
// tile. Each byte is read once for all rows, and stored into a slot from there if it is to be filled.
//
// Flags in Progress hold the step's clock when a block has done its part, so they need no reset. Blocks start in
// the order of their index, so what a block waits for has started if CHUNKS blocks fit on the GPU at a time.
// About 2 flops a weight and row.
//
// GATE_FORMAT, UP_FORMAT and DOWN_FORMAT are defined when this is compiled; GATE_FORMAT may be `none`.
#include "combine.cuh"
#include "down.cuh"
#include "few.cuh"
#include "plan.cuh"

// Biases and padding, which lie behind the matrices.
DEV void fill_tail(const Item& item, const ShardPlace& place) {
  for (int at = place.tail + 16 * threadIdx.x; at < place.nbytes; at += 16 * blockDim.x)
    *(uint4*)(item.fill + at) = *(const uint4*)(item.weights + at);
}

DEV void mark_lane(const Layer& layer, const Step& step, const Work& work) {
  for (int row = threadIdx.x; row < work.item.num_rows; row += blockDim.x)
    step.lane[(work.item.first_position + row) * layer.num_shards + work.item.shard] = 1;
}

// ------------------------------------------------------------------------------------------------ items
DEV void up_done(const Progress& progress, const Work& work, int index) {
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(progress.hidden + index * CHUNKS + work.task, work.clock);
}

// Where everything that a block needs of a shard is in shared memory.
struct Stage {
  UpSpans up;
  Span side, main;  // of down
  u8* row;          // the first row's records; null: they stay where they are
  Columns columns;
  bool has_up;  // neurons of its own; a short shard has none for its last blocks
};

DEV Stage stage_of(const Layer& layer, const Work& work, const ShardPlace& place, u8* shared) {
  Stage stage;
  stage.columns = columns_of(layer, work.task);
  stage.up = up_spans(layer, place, shared, work.task * UP_CHUNK, UP_CHUNK);
  stage.side = span_of(behind(stage.up.up), place.down_side, place.down_side_stride, stage.columns.first, stage.columns.count);
  stage.main = span_of(behind(stage.side), place.down_main, place.down_stride, stage.columns.first, stage.columns.count);
  stage.row = ONE_RECORD ? behind(stage.main) : nullptr;
  stage.has_up = work.task < up_chunks_of(place);
  return stage;
}

// Neurons, row and columns are sent for in this order, one group of copies each.
DEV void send_for_neurons(const Item& item, const Stage& stage) {
  if (stage.has_up) {
    stage_sides(item, stage.up);
    stage_tile(item, stage.up);
  }
  copies_sent();
}

DEV void send_for_row(const Layer& layer, const Step& step, const Stage& stage, int token) {
  int nb = (layer.hidden + BLOCK - 1) / BLOCK, nbytes = nb * (UpFormat::INT8 ? RECORD : 4 * BLOCK);
  const u8* from = (const u8*)records_of<UpFormat>(step, token, nb);
  if (stage.row && stage.has_up)
    for (int at = 16 * threadIdx.x; at < nbytes; at += 16 * blockDim.x) copy16(stage.row + at, from + at);
  copies_sent();
}

DEV void send_for_columns(const Item& item, const Stage& sent) {
  stage(item, sent.side);
  stage(item, sent.main);
  copies_sent();
}

DEV void run_whole(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index,
                   const ShardPlace& place, const Stage& stage) {
  if (stage.has_up) {
    FirstRow row = {stage.row, stage.row};
    if (!stage.row) row = first_row(layer, step, work.item.first_position);
    copies_done<1>();
    multiply_tile(layer, step, work, place, stage.up, 0, UP_CHUNK, row);
    up_done(progress, work, index);
    fill_up(work, stage.up);
    fill_sides(work, stage.up);
  }
  copies_done<0>();
  wait_for_hidden(place, work, progress.hidden + index * CHUNKS);
  multiply_columns(layer, step, work, place, stage.side, stage.main, 0, stage.columns.first, stage.columns.count);
  fill(work.item, stage.side);
}

DEV void run_by_tiles(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index,
                      const ShardPlace& place, u8* shared, const Tiles& tiles) {
  if (work.task < up_chunks_of(place)) {
    multiply_up_by_tiles(layer, step, work, place, shared, tiles.up);
    up_done(progress, work, index);
  }
  multiply_down_by_tiles(layer, step, work, place, progress.hidden + index * CHUNKS, shared, tiles.down);
}

// Without misses, by the last item's blocks (the first one's, if every id was skipped): their columns of all rows.
DEV void run_combine(const Layer& layer, const Step& step, const Progress& progress, int task, int count, u32 clock) {
  __shared__ CombineShared shared;
  Columns columns = columns_of(layer, task);
  int end = columns.first + columns.count;
  for (int token = 0; token < step.num_rows; token++)
    for (int start = columns.first; start < end; start += DOWN_CHUNK)
      combine_columns<true>(layer, step, token, start, end, shared, [&] {
        if (threadIdx.x < 32) wait_for_blocks(progress.parts + task, count, CHUNKS, clock);
      });
}

// What a block has sent for before it knew its item: neurons of a shard, and the only row's records.
struct Early {
  const u8* weights;  // null: nothing
  int shard;
};

template <bool PLAN>
DEV void run_item(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index, int count,
                  u8* shared, const Tiles& tiles, const Early& early) {
  const ShardPlace& place = layer.place[work.item.shard == layer.num_shards - 1];
  if (PLAN && work.task == 0) mark_lane(layer, step, work);
  if (PLAN && !bytes_are_there(step, work)) {
    up_done(progress, work, index);  // others of the item may have seen the flag
    return;
  }
  if (tiles.whole) {
    Stage stage = stage_of(layer, work, place, shared);
    if (early.weights != work.item.weights || early.shard != work.item.shard) {
      if (early.weights) {  // another shard's neurons are on their way to the same place
        copies_done<0>();
        __syncthreads();
      }
      send_for_neurons(work.item, stage);
      send_for_row(layer, step, stage, step.token_of[work.item.first_position]);
    }
    send_for_columns(work.item, stage);
    run_whole(layer, step, progress, work, index, place, stage);
  } else {
    run_by_tiles(layer, step, progress, work, index, place, shared, tiles);
  }
  if (PLAN) {
    if (work.task == 0 && work.item.fill) fill_tail(work.item, place);
    return;
  }
  if (!work.fused) return;
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(progress.parts + index * CHUNKS + work.task, work.clock);
  if (index == count - 1) run_combine(layer, step, progress, work.task, count, work.clock);
}

// ---------------------------------------------------------------------------------------------- kernels
// Item `index` of a list in device memory, and how many there are, read side by side.
DEV int read_item(const Step& step, const WorkList* list, int index, Work& work) {
  __shared__ int count;
  int i = threadIdx.x;
  if (i < (int)sizeof(Item) / 4) ((u32*)&work.item)[i] = __ldcg((const u32*)((const Item*)(list + 1) + index) + i);
  if (i == 32) count = __ldcg(&list->count);
  if (i == 64) work.clock = step.state->clock;
  if (i == 96) work.fused = combines_at_once(step);
  __syncthreads();
  return count;
}

// ------------------------------------------------------------------------------------------- early starts
// Hits of a single row start while publish still looks them up. So that their bytes come sooner, each block looks up
// for itself which one it will get; publish has the last word.
struct Guess {
  const u8* weights;  // null: no such hit
  int shard;
  int expert[FEW];  // by group
};

DEV bool guesses(const Step& step, const Tiles& tiles) {
  return STARTS_EARLY && tiles.whole && step.num_rows == 1 && step.top_k <= FEW;
}

// One warp: the hit that publish will put into place `index` of its list, unless the slot table changes before.
DEV void guess_item(const Layer& layer, const Step& step, int index, Guess& guess) {
  int lane = threadIdx.x % 32, hits = 0;
  i64 id = lane < step.top_k ? id_of(step, lane) : -1;
  Few few = group_few(id >= 0 && id < layer.num_experts ? (int)id : -1, step.top_k);
  if (few.leads) guess.expert[few.group] = few.expert;
  if (lane == 0) guess.weights = nullptr;
  __syncwarp();
  int total = few.num_groups * layer.num_shards;
  for (int base = 0; base < total && hits <= index; base += 32) {
    int at = base + lane, group = at / layer.num_shards, shard = at - group * layer.num_shards;
    int slot = at < total ? __ldcg(layer.slot_of + guess.expert[group] * layer.num_shards + shard) : -1;
    u32 found = __ballot_sync(FULL, slot >= 0);
    if (slot >= 0 && hits + __popc(found & ((1u << lane) - 1u)) == index)
      guess.weights = (const u8*)(layer.slots + slot * layer.slot_nbytes), guess.shard = shard;
    hits += __popc(found);
  }
}

// Sends for the neurons of the hit that was guessed.
DEV Early send_early(const Layer& layer, const Step& step, int index, const Work& work, u8* shared, Guess& guess) {
  if (threadIdx.x < 32) guess_item(layer, step, index, guess);
  __syncthreads();
  Early early = {guess.weights, guess.shard};
  if (!early.weights) return early;
  Item item = {};
  item.weights = early.weights;
  send_for_neurons(item, stage_of(layer, work, layer.place[early.shard == layer.num_shards - 1], shared));
  return early;
}

// Until publish has done its work; that it has ended comes a little later.
DEV void wait_for_publish(const Step& step) {
  if (!STARTS_EARLY) return;
  if (threadIdx.x == 0)
    while (load_acquire_gpu(&step.state->published) == 0) rest();
  __syncthreads();
}

// Whoever comes after a kernel waits for it alone, so it must not end before the one before it.
DEV void end_after_earlier() {
  if (blockIdx.x == 0) wait_for_earlier();
}

constexpr int BLOCKS = UpFormat::INT8 && DownFormat::INT8 ? 3 : 2;  // on a multiprocessor, at least

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_hit(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                const __grid_constant__ Progress progress, const __grid_constant__ Tiles tiles) {
  DYNAMIC_SHARED(shared);
  __shared__ Work work;
  __shared__ Guess guess;
  int index = blockIdx.x / CHUNKS;
  if (threadIdx.x == 0) work.task = blockIdx.x % CHUNKS;
  __syncthreads();
  Early early = {nullptr, 0};
  if (guesses(step, tiles)) early = send_early(layer, step, index, work, shared, guess);
  wait_for_publish(step);
  let_next_start();
  if (early.weights)
    send_for_row(layer, step, stage_of(layer, work, layer.place[early.shard == layer.num_shards - 1], shared), 0);
  int count = read_item(step, step.hits, index, work);
  if (index < count)
    run_item<false>(layer, step, progress, work, index, count, shared, tiles, early);
  else if (index == 0 && work.fused)
    run_combine(layer, step, progress, work.task, 0, work.clock);
  copies_done<0>();  // of a hit that was none
  end_after_earlier();
}

// A plan runs beside the hits, which let it start when publish had done its work.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_plan(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                 const __grid_constant__ Progress progress, const __grid_constant__ Tiles tiles, const WorkList* list,
                 const Updates* updates, int max_items, int wait) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  __shared__ Work work;
  if (*(const volatile u32*)&step.state->missing == 0) return end_after_earlier();
  if (blockIdx.x == 0) {
    tend_plan(step, progress, list, updates, max_items, wait);
    return end_after_earlier();
  }
  int index = (blockIdx.x - 1) / CHUNKS;
  if (threadIdx.x == 0) work.task = (blockIdx.x - 1) % CHUNKS;
  if (threadIdx.x < 32) wait_for_blocks(progress.relayed, 1, 1, step.state->clock);
  __syncthreads();
  int count = read_item(step, step.plan, index, work);
  Early early = {nullptr, 0};
  if (index < count) run_item<true>(layer, step, progress, work, index, count, shared, tiles, early);
}

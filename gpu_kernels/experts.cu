// experts_hit, experts_plan: the shards of a work list, from the records of their rows to their parts of the output.
//
// Grid: CHUNKS blocks an item, 256 threads. A plan has one more before them (plan.cuh), and may have blocks for some of its
// items at a time, which take the next ones then. A block multiplies the gate and up rows of UP_CHUNK neurons, then makes its
// share of the columns of the shard's part, once the item's blocks have made h. Weights go through shared memory by
// coalesced asynchronous copies: where both shares fit, all are sent before anything else is done (`whole`), else tile by
// tile. Each byte is read once for all rows, and stored into a slot from there if it is to be filled.
//
// Flags in Progress hold the step's number when a block has done its part (`State.epoch` + 1 of hits, the clock of a
// plan), so they need no reset. Blocks start in
// the order of their index, so what a block waits for has started if CHUNKS blocks fit on the GPU at a time.
// About 2 flops a weight and row.
//
// GATE_FORMAT, UP_FORMAT and DOWN_FORMAT are defined when this is compiled; GATE_FORMAT may be `none`.
#include "combine.cuh"
#include "down.cuh"
#include "guess.cuh"
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

// A block's share of an item's parts is there.
DEV void parts_done(const Progress& progress, const Work& work, int index) {
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(progress.parts + index * CHUNKS + work.task, work.clock);
}

// A row's records in shared memory, sixteen bytes at a time: int8 records are spread.
constexpr int ROW_NBYTES = UpFormat::INT8 ? SPREAD_RECORD : 4 * BLOCK;  // of a block
constexpr int ROW_CHUNKS = (UpFormat::INT8 ? RECORD : 4 * BLOCK) / 16;
DEV int row_chunk(int i) {
  if (!UpFormat::INT8) return 16 * i;
  return i / ROW_CHUNKS * SPREAD_RECORD + spread<true>(i % ROW_CHUNKS * 16);
}

// Where everything that a block needs of a shard is in shared memory.
struct Stage {
  UpSpans up;
  u8* row;  // the first row's records, at one place for all shards; null: they stay where they are
  Span side, main;  // of down
  Columns columns;
  bool has_up;  // neurons of its own; a short shard has none for its last blocks
};

DEV Stage stage_of(const Layer& layer, const Work& work, const ShardPlace& place, u8* shared) {
  Stage stage;
  stage.columns = columns_of(layer, work.task);
  stage.row = ONE_RECORD ? shared : nullptr;
  shared += ONE_RECORD ? (layer.hidden + BLOCK - 1) / BLOCK * ROW_NBYTES : 0;
  stage.up = up_spans(layer, place, shared, work.task * UP_CHUNK, UP_CHUNK);
  stage.side = span_of(behind(stage.up.up), place.down_side, place.down_side_stride, stage.columns.first, stage.columns.count);
  stage.main = span_of(behind(stage.side), place.down_main, place.down_stride, stage.columns.first, stage.columns.count);
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
  int nb = (layer.hidden + BLOCK - 1) / BLOCK;
  const u8* from = (const u8*)records_of<UpFormat>(step, token, nb);
  if (stage.row && stage.has_up)
    for (int i = threadIdx.x; i < nb * ROW_CHUNKS; i += blockDim.x) copy16(stage.row + row_chunk(i), from + 16 * i);
  copies_sent();
}

DEV void send_for_columns(const Item& item, const Stage& sent) {
  stage(item, sent.side);
  stage(item, sent.main);
  copies_sent();
}

// From what was sent for to the parts.
DEV void run_whole(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index,
                   const ShardPlace& place, const Stage& stage) {
  if (stage.has_up) {
    copies_done<1>();
    multiply_tile(layer, step, work, place, stage.up, 0, UP_CHUNK, stage.row);
    up_done(progress, work, index);
    fill_up(work, stage.up);
    fill_sides(work, stage.up);
  }
  copies_done<0>();
  if (stage.columns.count <= 0) return;  // nobody waits for this block: the flags may soon be another step's
  wait_for_hidden(place, work, progress.hidden + index * CHUNKS);
  multiply_columns(layer, step, work, place, stage.side, stage.main, 0, stage.columns.first, stage.columns.count);
  parts_done(progress, work, index);
}

DEV void run_by_tiles(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index,
                      const ShardPlace& place, u8* shared, const Tiles& tiles) {
  if (work.task < up_chunks_of(place)) {
    multiply_up_by_tiles(layer, step, work, place, shared, tiles.up);
    up_done(progress, work, index);
  }
  multiply_down_by_tiles(layer, step, work, place, progress.hidden + index * CHUNKS, shared, tiles.down);
  parts_done(progress, work, index);
}

template <bool PLAN>
DEV void run_item(const Layer& layer, const Step& step, const Progress& progress, Work& work, int index, u8* shared,
                  const Tiles& tiles) {
  const ShardPlace& place = place_of(layer, work.item.shard);
  if (PLAN && work.task == 0) mark_lane(layer, step, work);
  if (PLAN && !bytes_are_there(step, work)) {
    up_done(progress, work, index);  // others of the item may have seen the flag
    return;
  }
  if (tiles.whole) {
    Stage stage = stage_of(layer, work, place, shared);
    send_for_neurons(work.item, stage);
    send_for_row(layer, step, stage, step.num_rows == 1 ? 0 : __ldcg(step.token_of + work.item.first_position));
    send_for_columns(work.item, stage);
    run_whole(layer, step, progress, work, index, place, stage);
    fill(work.item, stage.side);
    fill(work.item, stage.main);
  } else {
    run_by_tiles(layer, step, progress, work, index, place, shared, tiles);
  }
  if (PLAN && work.task == 0 && work.item.fill) fill_tail(work.item, place);
}

// ---------------------------------------------------------------------------------------------- kernels
// Item `index` of a list in device memory, and how many there are, read side by side.
DEV int read_item(const Step& step, const WorkList* list, int index, Work& work) {
  __shared__ int count;
  int i = threadIdx.x;
  if (i < (int)sizeof(Item) / 4) ((u32*)&work.item)[i] = __ldcg((const u32*)((const Item*)(list + 1) + index) + i);
  if (i == 32) count = __ldcg(&list->count);
  __syncthreads();
  return count;
}

// Until publish has done its work; that it has ended comes a little later.
DEV void wait_for_publish(const Step& step, u32 mark) {
  if (threadIdx.x == 0)
    while (load_acquire_gpu(&step.hits->sequence) != mark) rest();
  __syncthreads();
}

// A hit of a step in which nothing misses, before publish has said so. False: something does, or the guess was wrong.
DEV bool run_guess(const Layer& layer, const Step& step, const Progress& progress, Work& work, int index, u8* shared) {
  __shared__ Guess guess;
  __shared__ bool right;
  int warp = threadIdx.x / 32;
  RowShare share = load_share(layer, step, warp);  // past the row's end it is zeros
  if (warp == 0) guess_item(layer, step, index, guess, work.item);
  __syncthreads();
  if (!guess.is_hit) return false;
  const ShardPlace& place = place_of(layer, work.item.shard);
  Stage stage = stage_of(layer, work, place, shared);
  send_for_neurons(work.item, stage);
  send_for_columns(work.item, stage);
  make_row(layer, step, share, stage.row);
  if (warp == 0) right = judge(step, index, work);  // while the bytes are on their way
  __syncthreads();
  if (right) {
    let_next_start();
    run_whole(layer, step, progress, work, index, place, stage);
  } else {
    copies_done<0>();  // into what is used again
    __syncthreads();
  }
  return right;
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
  int index = blockIdx.x / CHUNKS;
  u32 mark = *(volatile u32*)&step.state->epoch + 1;
  if (threadIdx.x == 0) work.task = blockIdx.x % CHUNKS, work.clock = mark;
  __syncthreads();
  if (!guesses(step, tiles) || !run_guess(layer, step, progress, work, index, shared)) {
    wait_for_publish(step, mark);
    int count = read_item(step, step.hits, index, work);
    let_next_start();  // from here on the list may be another step's
    if (index < count) run_item<false>(layer, step, progress, work, index, shared, tiles);
  }
  end_after_earlier();
}

// A plan runs beside the hits, which let it start when publish had done its work. Without misses it ends before them.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_plan(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                 const __grid_constant__ Progress progress, const __grid_constant__ Tiles tiles, const WorkList* list,
                 const Updates* updates, int max_items, int wait) {
  DYNAMIC_SHARED(shared);
  __shared__ Work work;
  if (*(const volatile u32*)&step.state->missing == 0) return;  // before combine starts: the word may be another step's then
  let_next_start();
  if (blockIdx.x == 0) {
    tend_plan(step, list, updates, max_items, wait);
    return end_after_earlier();
  }
  if (threadIdx.x == 0) work.task = (blockIdx.x - 1) % CHUNKS;
  bool acquires = step.num_rows > 1 || !tiles.whole || !ONE_RECORD;  // else a row comes by copies that pass L1 by
  int at_once = (gridDim.x - 1) / CHUNKS;
  for (int index = (blockIdx.x - 1) / CHUNKS; index < await_item(step, index, max_items, acquires, work); index += at_once) {
    run_item<true>(layer, step, progress, work, index, shared, tiles);
    __syncthreads();
  }
}

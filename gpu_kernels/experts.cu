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

// Everything that the block needs of the shard is sent for at once: two halves of its neurons, then its columns.
DEV void run_whole(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index,
                   const ShardPlace& place, u8* shared) {
  constexpr int HALF = UP_CHUNK / 2;
  Columns columns = columns_of(layer, work.task);
  UpSpans spans = up_spans(layer, place, shared, work.task * UP_CHUNK, HALF);
  Span side = span_of(behind(spans.up[1]), place.down_side, place.down_side_stride, columns.first, columns.count);
  Span main = span_of(behind(side), place.down_main, place.down_stride, columns.first, columns.count);
  bool up = work.task < up_chunks_of(place);
  if (up) {
    stage(work.item, spans.gate_side);
    stage(work.item, spans.up_side);
    stage_tile(work.item, spans, 0);
  }
  copies_sent();
  if (up) stage_tile(work.item, spans, 1);
  copies_sent();
  stage(work.item, side);
  stage(work.item, main);
  copies_sent();
  if (up) {
    prefetch_records(layer, step, work);
    copies_done<2>();
    multiply_tile(layer, step, work, place, spans, 0, 0, HALF);
    copies_done<1>();
    multiply_tile(layer, step, work, place, spans, 1, HALF, HALF);
    up_done(progress, work, index);
    fill_sides(work, spans);
  }
  copies_done<0>();
  wait_for_hidden(place, work, progress.hidden + index * CHUNKS);
  multiply_columns(layer, step, work, place, side, main, 0, columns.first, columns.count);
  fill(work.item, side);
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

template <bool PLAN>
DEV void run_item(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index, int count,
                  u8* shared, const Tiles& tiles) {
  const ShardPlace& place = layer.place[work.item.shard == layer.num_shards - 1];
  if (PLAN && work.task == 0) mark_lane(layer, step, work);
  if (PLAN && !bytes_are_there(step, work)) {
    up_done(progress, work, index);  // others of the item may have seen the flag
    return;
  }
  if (tiles.whole)
    run_whole(layer, step, progress, work, index, place, shared);
  else
    run_by_tiles(layer, step, progress, work, index, place, shared, tiles);
  if (PLAN) {
    if (work.task == 0 && work.item.fill) fill_tail(work.item, place);
    return;
  }
  if (!combines_at_once(step)) return;
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
  __syncthreads();
  return count;
}

constexpr int BLOCKS = UpFormat::INT8 && DownFormat::INT8 ? 3 : 2;  // on a multiprocessor, at least

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_hit(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                const __grid_constant__ Progress progress, const __grid_constant__ Tiles tiles) {
  wait_for_earlier();
  let_next_start();
  DYNAMIC_SHARED(shared);
  __shared__ Work work;
  int index = blockIdx.x / CHUNKS;
  if (threadIdx.x == 0) work.task = blockIdx.x % CHUNKS;
  int count = read_item(step, step.hits, index, work);
  if (index < count)
    run_item<false>(layer, step, progress, work, index, count, shared, tiles);
  else if (index == 0 && combines_at_once(step))
    run_combine(layer, step, progress, work.task, 0, work.clock);
}

// A plan runs beside the hits: publish had ended before the hits let it start. Whoever comes after it waits for it
// alone, so it must not end before they do.
DEV void end_with_hits() {
  if (blockIdx.x == 0) wait_for_earlier();
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_plan(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                 const __grid_constant__ Progress progress, const __grid_constant__ Tiles tiles, const WorkList* list,
                 const Updates* updates, int max_items, int wait) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  __shared__ Work work;
  if (*(const volatile u32*)&step.state->missing == 0) return end_with_hits();
  if (blockIdx.x == 0) {
    tend_plan(step, progress, list, updates, max_items, wait);
    return end_with_hits();
  }
  int index = (blockIdx.x - 1) / CHUNKS;
  if (threadIdx.x == 0) work.task = (blockIdx.x - 1) % CHUNKS;
  if (threadIdx.x < 32) wait_for_blocks(progress.relayed, 1, 1, step.state->clock);
  __syncthreads();
  int count = read_item(step, step.plan, index, work);
  if (index < count) run_item<true>(layer, step, progress, work, index, count, shared, tiles);
}

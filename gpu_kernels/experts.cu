// experts_hit, experts_plan: the shards of a work list, from the records of their rows to their parts of the output.
//
// Grid: CHUNKS blocks an item, 256 threads, and one more for a plan, which updates the slot table. A block multiplies
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
#include "dot_float.cuh"
#include "dot_q4_k.cuh"
#include "dot_q6_k.cuh"
#include "dot_sub_blocks.cuh"
#include "updates.cuh"

struct none : q4_k {};  // no gate matrix
typedef GATE_FORMAT GateFormat;
typedef UP_FORMAT UpFormat;
typedef DOWN_FORMAT DownFormat;
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
constexpr bool HAS_GATE = !Same<GateFormat, none>::value;
constexpr int WARPS = 8, HIDDEN_ROWS = 4;  // rows of h that a down block has at a time

struct Work {
  Item item;
  int task;  // which chunk of the item
  u32 clock;
};

struct Rows {  // planes of a matrix, from the row that the caller counts from 0
  const u8 *main, *side;
  int stride, side_stride;
};

DEV const u8* main_row(const Rows& rows, int i) { return rows.main + i * rows.stride; }
DEV const u8* side_row(const Rows& rows, int i) { return rows.side + i * rows.side_stride; }

// ------------------------------------------------------------------------------------------------ dots
// N rows by one warp: eight blocks at a time, four lanes each, so a lane group is an accumulator.
template <class F, int N>
DEV void dot_rows(const Rows rows[N], int i, const void* x, int columns, int lane, float out[N]) {
  int nb = (columns + BLOCK - 1) / BLOCK, g = lane >> 2, t = lane & 3;
  float acc[N];
#pragma unroll
  for (int j = 0; j < N; j++) acc[j] = 0;
  for (int first = 0; first < nb; first += 8) {
    bool live = first + g < nb;
    int block = live ? first + g : 0;
    typename F::X at = F::load_x(x, block, t, columns);
#pragma unroll
    for (int j = 0; j < N; j++) {
      typename F::Piece piece = F::load(main_row(rows[j], i), side_row(rows[j], i), block, t, columns);
      float v = F::value(piece, at, t);
      if (live) acc[j] += v;
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    for (int half = 16; half >= 4; half /= 2) acc[j] += __shfl_xor_sync(FULL, acc[j], half);
    out[j] = acc[j];
  }
}

// Gate and up value of a neuron, at once where both matrices have one format.
DEV void dot_neuron(const Rows& gate, const Rows& up, int i, const void* gate_x, const void* up_x, int columns, int lane,
                    float& g, float& u) {
  const Rows both[2] = {gate, up};
  float out[2] = {0, 0};
  if constexpr (Same<GateFormat, UpFormat>::value) {
    dot_rows<UpFormat, 2>(both, i, up_x, columns, lane, out);
  } else {
    dot_rows<UpFormat, 1>(both + 1, i, up_x, columns, lane, out + 1);
    if (HAS_GATE) dot_rows<GateFormat, 1>(both, i, gate_x, columns, lane, out);
  }
  g = out[0], u = out[1];
}

template <class F> DEV const void* records_of(const Step& step, int token, int nb) {
  if (F::INT8) return step.records + (i64)token * nb * RECORD;
  return step.floats + (i64)token * nb * BLOCK;
}

// --------------------------------------------------------------------------------------------- staging
struct Span {  // rows of a plane: where they lie in the shard, and in shared memory
  u8* shared;
  i64 offset;
  int nbytes;
};

// Rows `first` to `first + count` of a plane; none if the shard has no such plane.
DEV Span span_of(u8* shared, int plane, int stride, int first, int count) {
  return {shared, plane + (i64)first * stride, plane < 0 ? 0 : count * stride};
}

DEV u8* behind(const Span& span) { return span.shared + span.nbytes; }

DEV void stage(const Item& item, const Span& span) {
  for (int at = 16 * threadIdx.x; at < span.nbytes; at += 16 * blockDim.x)
    copy16(span.shared + at, item.weights + span.offset + at);
}

DEV void fill(const Item& item, const Span& span) {
  if (!item.fill) return;
  for (int at = 16 * threadIdx.x; at < span.nbytes; at += 16 * blockDim.x)
    *(uint4*)(item.fill + span.offset + at) = *(const uint4*)(span.shared + at);
}

// ----------------------------------------------------------------------------------------- gate and up
// Neurons `first` to `first + count` of the shard, one warp each; row 0 of the planes is neuron `first`.
DEV void multiply_up(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, const Rows& gate,
                     const Rows& up, int first, int count) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, nb = (layer.hidden + BLOCK - 1) / BLOCK;
  for (int row = 0; row < work.item.num_rows; row++) {
    int position = work.item.first_position + row, token = step.token_of[position];
    const void *gate_x = records_of<GateFormat>(step, token, nb), *up_x = records_of<UpFormat>(step, token, nb);
    float* h = step.h + ((i64)position * layer.num_shards + work.item.shard) * BLOCK;
    for (int i = warp; i < count; i += WARPS) {
      float g, u;
      dot_neuron(gate, up, i, gate_x, up_x, layer.hidden, lane, g, u);
      if (lane != 0) continue;
      int n = first + i;
      if (place.up_bias >= 0) u += ((const float*)(work.item.weights + place.up_bias))[n];
      if (HAS_GATE && place.gate_bias >= 0) g += ((const float*)(work.item.weights + place.gate_bias))[n];
      h[n] = activate(layer.gate_kind, layer.alpha, layer.limit, g, u);
    }
  }
}

// The records of the first row, to the nearest cache while weights are on their way.
DEV void prefetch_records(const Layer& layer, const Step& step, const Work& work) {
  int nb = (layer.hidden + BLOCK - 1) / BLOCK, token = step.token_of[work.item.first_position];
  const u8* records = (const u8*)records_of<UpFormat>(step, token, nb);
  int nbytes = nb * (UpFormat::INT8 ? RECORD : 4 * BLOCK);
  for (int at = 128 * threadIdx.x; at < nbytes; at += 128 * blockDim.x) prefetch(records + at);
}

struct UpSpans { Span gate_side, up_side, gate[2], up[2]; };

// A tile of main rows: `buffer` 0 or 1 of the neurons from `first` on.
DEV void span_tile(const Layer& layer, const ShardPlace& place, UpSpans& spans, u8* shared, int buffer, int first, int tile) {
  spans.gate[buffer] = span_of(shared, place.gate_main, layer.gate_stride, first, tile);
  spans.up[buffer] = span_of(behind(spans.gate[buffer]), place.up_main, layer.up_stride, first, tile);
}

DEV UpSpans up_spans(const Layer& layer, const ShardPlace& place, u8* shared, int first, int tile) {
  UpSpans spans;
  spans.gate_side = span_of(shared, place.gate_side, layer.gate_side_stride, first, UP_CHUNK);
  spans.up_side = span_of(behind(spans.gate_side), place.up_side, layer.up_side_stride, first, UP_CHUNK);
  span_tile(layer, place, spans, behind(spans.up_side), 0, first, tile);
  span_tile(layer, place, spans, behind(spans.up[0]), 1, first + tile, tile);
  return spans;
}

// The neurons of a tile whose rows have come; `i` is its first one in the chunk.
DEV void multiply_tile(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, const UpSpans& spans,
                       int buffer, int i, int tile) {
  __syncthreads();
  Rows gate = {spans.gate[buffer].shared, spans.gate_side.shared + i * layer.gate_side_stride, layer.gate_stride, layer.gate_side_stride};
  Rows up = {spans.up[buffer].shared, spans.up_side.shared + i * layer.up_side_stride, layer.up_stride, layer.up_side_stride};
  multiply_up(layer, step, work, place, gate, up, work.task * UP_CHUNK + i, tile);
  fill(work.item, spans.gate[buffer]);
  fill(work.item, spans.up[buffer]);
}

DEV void fill_sides(const Work& work, const UpSpans& spans) {
  fill(work.item, spans.gate_side);
  fill(work.item, spans.up_side);
}

DEV void stage_tile(const Item& item, const UpSpans& spans, int buffer) {
  stage(item, spans.gate[buffer]);
  stage(item, spans.up[buffer]);
}

// Rows too long for the shared memory: tile after tile in one buffer.
DEV void multiply_up_by_tiles(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, u8* shared,
                              int tile) {
  int first = work.task * UP_CHUNK;
  UpSpans spans = up_spans(layer, place, shared, first, tile);
  stage(work.item, spans.gate_side);
  stage(work.item, spans.up_side);
  for (int i = 0; i < UP_CHUNK; i += tile) {
    span_tile(layer, place, spans, behind(spans.up_side), 0, first + i, tile);
    stage_tile(work.item, spans, 0);
    copies_sent();
    copies_done<0>();
    multiply_tile(layer, step, work, place, spans, 0, i, tile);
    __syncthreads();
  }
  fill_sides(work, spans);
}

// Streamed shards: until the bytes are there. Every thread hears whether they are.
DEV bool bytes_are_there(const Step& step, const Work& work) {
  __shared__ int go;
  if (!work.item.flag) return true;
  if (threadIdx.x == 0) go = wait_for(step, work.item.flag, work.item.flag_value);
  __syncthreads();
  if (!go && threadIdx.x == 0) fail(step, work.clock, ERROR_ABORTED);
  return go;
}

DEV int up_chunks_of(const ShardPlace& place) { return (place.neurons + UP_CHUNK - 1) / UP_CHUNK; }

// ------------------------------------------------------------------------------------------------ down
struct HiddenRows {  // h of up to HIDDEN_ROWS rows as the down matrix takes it
  alignas(16) u8 row[HIDDEN_ROWS][DownFormat::INT8 ? RECORD : 4 * BLOCK];
  int bad[HIDDEN_ROWS];
};

// Rows `first` and on, one warp each: quantised, or padded with zeros.
DEV void make_hidden_rows(const Layer& layer, const Step& step, const Work& work, int neurons, int first, HiddenRows& rows) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= HIDDEN_ROWS || first + warp >= work.item.num_rows) return;
  const float* h = step.h + ((i64)(work.item.first_position + first + warp) * layer.num_shards + work.item.shard) * BLOCK;
  float v[8];
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int n = 8 * lane + i;
    v[i] = n < neurons ? __ldcg(h + n) : 0.0f;
    bad |= (__float_as_uint(v[i]) & 0x7fffffffu) >= INFINITY_BITS;
  }
  if (DownFormat::INT8)
    write_record(v, rows.row[warp], lane);
  else
    for (int i = 0; i < 8; i++) ((float*)rows.row[warp])[8 * lane + i] = v[i];
  bad = __any_sync(FULL, bad);
  if (lane == 0) rows.bad[warp] = bad;
}

// Columns `first` to `first + count` of the parts of some rows, four lanes a column; row 0 of the planes is `first`.
DEV void multiply_down(const Layer& layer, const Step& step, const Work& work, int neurons, const Rows& down,
                       const HiddenRows& hidden, int first, int count, int first_row) {
  int group = threadIdx.x / 4, t = threadIdx.x & 3, rows = min(HIDDEN_ROWS, work.item.num_rows - first_row);
  for (int base = 0; base < count; base += 8 * WARPS) {
    int i = min(base + group, count - 1);
    typename DownFormat::Piece piece = DownFormat::load(main_row(down, i), side_row(down, i), 0, t, neurons);
    for (int row = 0; row < rows; row++) {
      i64 at = (i64)(work.item.first_position + first_row + row) * layer.num_shards + work.item.shard;
      typename DownFormat::X x = DownFormat::load_x(hidden.row[row], 0, t, neurons);
      float v = DownFormat::value(piece, x, t) + 0.0f;
      if (t == 0 && base + group < count)
        step.parts[at * layer.hidden + first + i] = hidden.bad[row] ? canonical_nan() : v;
    }
  }
}

struct Columns { int first, count; };

// A block's share of the columns of a part.
DEV Columns columns_of(const Layer& layer, int task) {
  int share = (layer.hidden / 32 + CHUNKS - 1) / CHUNKS * 32, first = min(task * share, layer.hidden);
  return {first, min(share, layer.hidden - first)};
}

// Columns whose down rows have come, `i` from the first of the block's share.
DEV void multiply_columns(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, const Span& side,
                          const Span& main, int i, int first, int count) {
  __shared__ HiddenRows hidden;
  Rows down = {main.shared, side.shared + i * place.down_side_stride, place.down_stride, place.down_side_stride};
  for (int row = 0; row < work.item.num_rows; row += HIDDEN_ROWS) {
    make_hidden_rows(layer, step, work, place.neurons, row, hidden);
    __syncthreads();
    multiply_down(layer, step, work, place.neurons, down, hidden, first, count, row);
    __syncthreads();
  }
  fill(work.item, main);
}

DEV void wait_for_hidden(const ShardPlace& place, const Work& work, const u32* made) {
  if (threadIdx.x < 32) wait_for_blocks(made, up_chunks_of(place), 1, work.clock);
  __syncthreads();
}

DEV void multiply_down_by_tiles(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place,
                                const u32* made, u8* shared, int tile) {
  Columns columns = columns_of(layer, work.task);
  Span side = span_of(shared, place.down_side, place.down_side_stride, columns.first, columns.count);
  stage(work.item, side);
  for (int i = 0; i < columns.count; i += tile) {
    int count = min(tile, columns.count - i), first = columns.first + i;
    Span main = span_of(behind(side), place.down_main, place.down_stride, first, count);
    stage(work.item, main);
    copies_sent();
    copies_done<0>();
    wait_for_hidden(place, work, made);
    multiply_columns(layer, step, work, place, side, main, i, first, count);
    __syncthreads();
  }
  fill(work.item, side);
}

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

// One thread: whether a list of the host's is that of this step.
DEV bool is_there(const Step& step, const u32* sequence, int wait) {
  if (wait) return wait_for(step, sequence, step.state->sequence);
  return load_acquire_system(sequence) == step.state->sequence;
}

// All threads of block 0: a plan from host memory to `Step.plan`. Were every block to read it there, a thousand reads
// of the same words would queue up. A plan of another step becomes an empty one, and fails the step; with `wait` it is
// waited for.
DEV void relay_plan(const Step& step, const Progress& progress, const WorkList* list, int max_items, int wait) {
  __shared__ int ours;
  u32 clock = step.state->clock;
  if (threadIdx.x == 0) {
    ours = is_there(step, &list->sequence, wait);
    if (!ours) fail(step, clock, wait ? ERROR_ABORTED : ERROR_STALE_PLAN);
  }
  __syncthreads();
  int count = min(*(const volatile int*)&list->count, max_items);
  int words = ours ? count * (int)(sizeof(Item) / 4) : 0;
  for (int i = threadIdx.x; i < words; i += blockDim.x) ((u32*)(step.plan + 1))[i] = ((const volatile u32*)(list + 1))[i];
  if (threadIdx.x == 0) step.plan->count = ours ? count : 0;
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(progress.relayed, clock);
}

// The block behind those of a plan's items: the slot table as the plan wants it, for the look-ups of later steps.
DEV void run_updates(const Step& step, const Updates* updates, int wait) {
  __shared__ int ours;
  if (threadIdx.x == 0) {
    ours = is_there(step, &updates->sequence, wait);
    if (!ours) fail(step, step.state->clock, wait ? ERROR_ABORTED : ERROR_STALE_PLAN);
  }
  __syncthreads();
  if (ours) apply_updates(step.table, updates);
}

constexpr int BLOCKS = UpFormat::INT8 && DownFormat::INT8 ? 3 : 2;  // on a multiprocessor, at least

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_hit(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                const __grid_constant__ Progress progress, const __grid_constant__ Tiles tiles) {
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

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_plan(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                 const __grid_constant__ Progress progress, const __grid_constant__ Tiles tiles, const WorkList* list,
                 const Updates* updates, int max_items, int wait) {
  DYNAMIC_SHARED(shared);
  __shared__ Work work;
  if (step.state->missing == 0) return;
  int index = blockIdx.x / CHUNKS;
  if (index == max_items) return run_updates(step, updates, wait);
  if (blockIdx.x == 0) relay_plan(step, progress, list, max_items, wait);
  if (threadIdx.x == 0) work.task = blockIdx.x % CHUNKS;
  if (threadIdx.x < 32) wait_for_blocks(progress.relayed, 1, 1, step.state->clock);
  __syncthreads();
  int count = read_item(step, step.plan, index, work);
  if (index < count) run_item<true>(layer, step, progress, work, index, count, shared, tiles);
}

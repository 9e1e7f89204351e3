// experts_hit, experts_plan: the shards of a work list, from the records of their rows to their parts of the output.
//
// Grid: max_items * UP_CHUNKS blocks that each multiply the gate and up rows of UP_CHUNK neurons, max_items * down
// chunks blocks that each make DOWN_CHUNK columns of one shard's part and, for hits, a block for each row and DOWN_CHUNK
// columns of the output; 256 threads. Weights go through shared memory: coalesced asynchronous copies, everything in
// flight at once, each byte read once for all rows, and stored into a slot from there if it is to be filled. A block
// starts its copies first and then waits for what blocks of a lower index make (flags in Progress hold the step's
// clock, so they need no reset). Blocks start in the order of their index, so what a block waits for runs or has
// run. About 2 flops a weight and row.
//
// GATE_FORMAT, UP_FORMAT and DOWN_FORMAT are defined when this is compiled; GATE_FORMAT may be `none`.
#include "combine.cuh"
#include "dot_float.cuh"
#include "dot_q4_k.cuh"
#include "dot_q6_k.cuh"
#include "dot_sub_blocks.cuh"

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

// Side planes of all the chunk's rows, then main rows as many as fit.
DEV void multiply_up_chunk(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, u8* shared,
                           int tile) {
  const Item& item = work.item;
  int first = work.task * UP_CHUNK;
  Span gate_side = span_of(shared, place.gate_side, layer.gate_side_stride, first, UP_CHUNK);
  Span up_side = span_of(behind(gate_side), place.up_side, layer.up_side_stride, first, UP_CHUNK);
  stage(item, gate_side);
  stage(item, up_side);
  for (int i = 0; i < UP_CHUNK; i += tile) {
    Span gate_main = span_of(behind(up_side), place.gate_main, layer.gate_stride, first + i, tile);
    Span up_main = span_of(behind(gate_main), place.up_main, layer.up_stride, first + i, tile);
    stage(item, gate_main);
    stage(item, up_main);
    if (i == 0) prefetch_records(layer, step, work);
    copies_done();
    __syncthreads();
    Rows gate = {gate_main.shared, gate_side.shared + i * layer.gate_side_stride, layer.gate_stride, layer.gate_side_stride};
    Rows up = {up_main.shared, up_side.shared + i * layer.up_side_stride, layer.up_stride, layer.up_side_stride};
    multiply_up(layer, step, work, place, gate, up, first + i, tile);
    fill(item, gate_main);
    fill(item, up_main);
    __syncthreads();
  }
  fill(item, gate_side);
  fill(item, up_side);
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

template <bool PLAN>
DEV void run_up(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index, u8* shared,
                int tile) {
  const ShardPlace& place = layer.place[work.item.shard == layer.num_shards - 1];
  if (work.task >= up_chunks_of(place)) return;
  if (!PLAN || bytes_are_there(step, work)) multiply_up_chunk(layer, step, work, place, shared, tile);
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(progress.hidden + index * UP_CHUNKS + work.task, work.clock);
}

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

// The side plane of all the chunk's columns, then main rows as many as fit; h once the up blocks have made it.
DEV void multiply_down_chunk(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place,
                             const u32* made, u8* shared, int tile) {
  __shared__ HiddenRows hidden;
  const Item& item = work.item;
  int first = work.task * DOWN_CHUNK, columns = min(DOWN_CHUNK, layer.hidden - first);
  Span side = span_of(shared, place.down_side, place.down_side_stride, first, columns);
  stage(item, side);
  for (int i = 0; i < columns; i += tile) {
    int count = min(tile, columns - i);
    Span main = span_of(behind(side), place.down_main, place.down_stride, first + i, count);
    stage(item, main);
    if (i == 0 && threadIdx.x < 32) wait_for_blocks(made, up_chunks_of(place), 1, work.clock);
    copies_done();
    __syncthreads();
    Rows down = {main.shared, side.shared + i * place.down_side_stride, place.down_stride, place.down_side_stride};
    for (int row = 0; row < item.num_rows; row += HIDDEN_ROWS) {
      make_hidden_rows(layer, step, work, place.neurons, row, hidden);
      __syncthreads();
      multiply_down(layer, step, work, place.neurons, down, hidden, first + i, count, row);
      __syncthreads();
    }
    fill(item, main);
    __syncthreads();
  }
  fill(item, side);
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

template <bool PLAN>
DEV void run_down(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index,
                  int down_chunks, u8* shared, int tile) {
  const ShardPlace& place = layer.place[work.item.shard == layer.num_shards - 1];
  if (PLAN && work.task == 0) mark_lane(layer, step, work);
  if (!PLAN || bytes_are_there(step, work))
    multiply_down_chunk(layer, step, work, place, progress.hidden + index * UP_CHUNKS, shared, tile);
  if (PLAN && work.task == 0 && work.item.fill) fill_tail(work.item, place);
  __syncthreads();
  if (!PLAN && threadIdx.x == 0) store_release_gpu(progress.parts + index * down_chunks + work.task, work.clock);
}

// ---------------------------------------------------------------------------------------------- kernel
// What a block must know of the step and of its item, read side by side: a plan lies in host memory, where each
// read takes a microsecond. An item past the end of the list is read all the same, and not used.
struct Head { u32 clock, missing, sequence, list_sequence; int count; };

DEV Head read_head(const Step& step, const WorkList* list, int index, Work& work, Head& head) {
  int i = threadIdx.x;
  if (i < (int)sizeof(Item) / 4) ((u32*)&work.item)[i] = ((const volatile u32*)((const Item*)(list + 1) + index))[i];
  if (i == 32) head.list_sequence = load_acquire_system(&list->sequence);
  if (i == 64) head.clock = work.clock = step.state->clock, head.missing = step.state->missing, head.sequence = step.state->sequence;
  if (i == 96) head.count = *(const volatile int*)&list->count;
  __syncthreads();
  return head;
}

// Without misses, the blocks behind those of the items: some columns of a row, once every item's part is there.
DEV void run_combine(const Layer& layer, const Step& step, const Progress& progress, const WorkList* list, int block,
                     int down_chunks) {
  if (!combines_at_once(step)) return;
  int chunk = block % down_chunks, count = list->count;
  u32 clock = step.state->clock;
  combine_columns<true>(layer, step, block / down_chunks, chunk, [&] {
    if (threadIdx.x < 32) wait_for_blocks(progress.parts + chunk, count, down_chunks, clock);
  });
}

template <bool PLAN>
DEV void run_items(const Layer& layer, const Step& step, const Progress& progress, const WorkList* list, int max_items,
                   u8* shared, int up_tile, int down_tile) {
  __shared__ Work work;
  __shared__ Head shared_head;
  if (PLAN && step.state->missing == 0) return;
  int down_chunks = (layer.hidden + DOWN_CHUNK - 1) / DOWN_CHUNK, ups = max_items * UP_CHUNKS, downs = max_items * down_chunks;
  int block = blockIdx.x;
  if (!PLAN && block >= ups + downs) return run_combine(layer, step, progress, list, block - ups - downs, down_chunks);
  bool up = block < ups;
  int index = up ? block / UP_CHUNKS : (block - ups) / down_chunks;
  if (threadIdx.x == 0) work.task = up ? block % UP_CHUNKS : (block - ups) % down_chunks;
  Head head = read_head(step, list, index, work, shared_head);
  if (PLAN && head.list_sequence != head.sequence) {  // a plan of another step
    if (blockIdx.x == 0 && threadIdx.x == 0) fail(step, head.clock, ERROR_STALE_PLAN);
    return;
  }
  if (index >= head.count) return;
  if (up)
    run_up<PLAN>(layer, step, progress, work, index, shared, up_tile);
  else
    run_down<PLAN>(layer, step, progress, work, index, down_chunks, shared, down_tile);
}

constexpr int BLOCKS = UpFormat::INT8 && DownFormat::INT8 ? 4 : 2;  // on a multiprocessor, at least

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_hit(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                const __grid_constant__ Progress progress, const WorkList* list, int max_items, int up_tile, int down_tile) {
  DYNAMIC_SHARED(shared);
  run_items<false>(layer, step, progress, list, max_items, shared, up_tile, down_tile);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    experts_plan(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                 const __grid_constant__ Progress progress, const WorkList* list, int max_items, int up_tile, int down_tile) {
  DYNAMIC_SHARED(shared);
  run_items<true>(layer, step, progress, list, max_items, shared, up_tile, down_tile);
}

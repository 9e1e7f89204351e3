// experts_hit, experts_plan: the shards of a work list, from the records of their rows to their parts of the output.
//
// Grid: max_items * UP_CHUNKS blocks that each multiply the gate and up rows of UP_CHUNK neurons, then max_items * down
// chunks blocks that each make DOWN_CHUNK columns of one shard's part; 256 threads. A down block loads its weights,
// then waits for its shard's records, which the last of the shard's up blocks writes. Blocks start in the order of
// their index, so what a block waits for runs or has run. Each weight is read once for one row; rows of a batch read
// it again from the caches (VRAM) or shared memory (staged). About 2 flops a weight and row.
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
constexpr int WARPS = 8, PAIR = 1;  // neurons that a warp has at a time
constexpr int HIT_BLOCKS = DownFormat::INT8 && UpFormat::INT8 ? 3 : 1;  // on a multiprocessor, at least

struct Work {
  Item item;
  int task;  // which chunk of the item
  u32 clock;
};

struct Rows {  // planes of a matrix, from the row that the caller counts from 0
  const u8 *main, *side;
  int stride, side_stride;
};

// ------------------------------------------------------------------------------------------------ dots
// N rows by one warp: eight blocks at a time, four lanes each, so a lane group is an accumulator.
template <class F, int N, bool STAGED>
DEV void dot_rows(const u8* const main[N], const u8* const side[N], const void* x, int columns, int lane, float out[N]) {
  int nb = (columns + BLOCK - 1) / BLOCK, g = lane >> 2, t = lane & 3;
  float acc[N];
#pragma unroll
  for (int i = 0; i < N; i++) acc[i] = 0;
  for (int first = 0; first < nb; first += 8) {
    bool live = first + g < nb;
    int block = live ? first + g : 0;
    typename F::Piece pieces[N];
#pragma unroll
    for (int i = 0; i < N; i++) pieces[i] = F::template load<!STAGED>(main[i], side[i], block, t, columns);
    typename F::X at = F::load_x(x, block, t, columns);
#pragma unroll
    for (int i = 0; i < N; i++) {
      float v = F::value(pieces[i], at, t);
      if (live) acc[i] += v;
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    for (int half = 16; half >= 4; half /= 2) acc[i] += __shfl_xor_sync(FULL, acc[i], half);
    out[i] = acc[i];
  }
}

DEV const u8* main_row(const Rows& rows, int i) { return rows.main + (i64)i * rows.stride; }
DEV const u8* side_row(const Rows& rows, int i) { return rows.side + (i64)i * rows.side_stride; }

// Gate and up values of PAIR neurons: all rows at once where both matrices have one format.
template <bool STAGED>
DEV void dot_pair(const Rows& gate, const Rows& up, int i, const void* gate_x, const void* up_x, int columns, int lane,
                  float g[PAIR], float u[PAIR]) {
  const u8 *main[2 * PAIR], *side[2 * PAIR];
#pragma unroll
  for (int j = 0; j < PAIR; j++) {
    main[j] = main_row(up, i + j), side[j] = side_row(up, i + j);
    main[PAIR + j] = HAS_GATE ? main_row(gate, i + j) : main[j];
    side[PAIR + j] = HAS_GATE ? side_row(gate, i + j) : side[j];
  }
  float out[2 * PAIR];
  if constexpr (Same<GateFormat, UpFormat>::value) {
    dot_rows<UpFormat, 2 * PAIR, STAGED>(main, side, up_x, columns, lane, out);
  } else {
    dot_rows<UpFormat, PAIR, STAGED>(main, side, up_x, columns, lane, out);
    if (HAS_GATE) dot_rows<GateFormat, PAIR, STAGED>(main + PAIR, side + PAIR, gate_x, columns, lane, out + PAIR);
  }
#pragma unroll
  for (int j = 0; j < PAIR; j++) u[j] = out[j], g[j] = HAS_GATE ? out[PAIR + j] : 0.0f;
}

template <class F> DEV const void* records_of(const Step& step, int token, int nb) {
  if (F::INT8) return step.records + (i64)token * nb * RECORD;
  return step.floats + (i64)token * nb * BLOCK;
}

// --------------------------------------------------------------------------------------------- staging
// Coalesced 16-byte reads, several in flight, to shared memory and to the slot that is being filled.
DEV void stage(u8* shared, const u8* from, u8* fill, int nbytes) {
  constexpr int FLIGHT = 6;
  const uint4* source = (const uint4*)from;
  int words = nbytes / 16;
  for (int first = threadIdx.x; first < words; first += FLIGHT * blockDim.x) {
    uint4 v[FLIGHT];
#pragma unroll
    for (int j = 0; j < FLIGHT; j++) {
      int at = first + j * blockDim.x;
      if (at < words) v[j] = __ldcs(source + at);
    }
#pragma unroll
    for (int j = 0; j < FLIGHT; j++) {
      int at = first + j * blockDim.x;
      if (at >= words) continue;
      if (shared) ((uint4*)shared)[at] = v[j];
      if (fill) ((uint4*)fill)[at] = v[j];
    }
  }
}

DEV u8* filled(const Item& item, i64 offset) { return item.fill ? item.fill + offset : nullptr; }

// Rows `first` to `first + count` of a plane to shared memory; returns where the next plane goes.
DEV u8* stage_rows(u8* shared, const Item& item, int plane, int stride, int first, int count) {
  if (plane < 0) return shared;
  i64 offset = plane + (i64)first * stride;
  stage(shared, item.weights + offset, filled(item, offset), count * stride);
  return shared + count * stride;
}

// ----------------------------------------------------------------------------------------- gate and up
// One neuron in each of the first PAIR lanes: biases, the gate, h.
DEV void write_hidden(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, int position,
                      int neuron, int lane, const float g[PAIR], const float u[PAIR]) {
  if (lane >= PAIR) return;
  float gate = g[0], up = u[0];
#pragma unroll
  for (int j = 1; j < PAIR; j++)
    if (lane == j) gate = g[j], up = u[j];
  int n = neuron + lane;
  if (place.up_bias >= 0) up += ((const float*)(work.item.weights + place.up_bias))[n];
  if (HAS_GATE && place.gate_bias >= 0) gate += ((const float*)(work.item.weights + place.gate_bias))[n];
  i64 at = (i64)position * layer.num_shards + work.item.shard;
  step.h[at * BLOCK + n] = activate(layer.gate_kind, layer.alpha, layer.limit, gate, up);
}

// Neurons `first` to `first + count` of the shard; row 0 of the planes is neuron `first`.
template <bool STAGED>
DEV void multiply_up(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, const Rows& gate,
                     const Rows& up, int first, int count) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, nb = (layer.hidden + BLOCK - 1) / BLOCK;
  for (int row = 0; row < work.item.num_rows; row++) {
    int position = work.item.first_position + row, token = step.token_of[position];
    const void *gate_x = records_of<GateFormat>(step, token, nb), *up_x = records_of<UpFormat>(step, token, nb);
    for (int i = warp * PAIR; i < count; i += WARPS * PAIR) {
      float g[PAIR], u[PAIR];
      dot_pair<STAGED>(gate, up, i, gate_x, up_x, layer.hidden, lane, g, u);
      write_hidden(layer, step, work, place, position, first + i, lane, g, u);
    }
  }
}

DEV void multiply_up_in_place(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place) {
  int first = work.task * UP_CHUNK;
  const u8* w = work.item.weights;
  Rows gate = {w + place.gate_main + (i64)first * layer.gate_stride, w + place.gate_side + (i64)first * layer.gate_side_stride,
               layer.gate_stride, layer.gate_side_stride};
  Rows up = {w + place.up_main + (i64)first * layer.up_stride, w + place.up_side + (i64)first * layer.up_side_stride,
             layer.up_stride, layer.up_side_stride};
  multiply_up<false>(layer, step, work, place, gate, up, first, UP_CHUNK);
}

// The same through shared memory: the side planes of all the chunk's rows, then main rows as many as fit.
DEV void multiply_up_staged(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, u8* shared,
                            int tile) {
  int first = work.task * UP_CHUNK;
  u8* up_side = stage_rows(shared, work.item, place.gate_side, layer.gate_side_stride, first, UP_CHUNK);
  u8* mains = stage_rows(up_side, work.item, place.up_side, layer.up_side_stride, first, UP_CHUNK);
  for (int i = 0; i < UP_CHUNK; i += tile) {
    u8* up_main = stage_rows(mains, work.item, place.gate_main, layer.gate_stride, first + i, tile);
    stage_rows(up_main, work.item, place.up_main, layer.up_stride, first + i, tile);
    __syncthreads();
    Rows gate = {mains, shared + i * layer.gate_side_stride, layer.gate_stride, layer.gate_side_stride};
    Rows up = {up_main, up_side + i * layer.up_side_stride, layer.up_stride, layer.up_side_stride};
    multiply_up<true>(layer, step, work, place, gate, up, first + i, tile);
    __syncthreads();
  }
}

// All threads of the shard's last up block: h of each row to its down record, one warp a row.
DEV void finish_hidden(const Layer& layer, const Step& step, const Work& work, int neurons) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < work.item.num_rows; row += WARPS) {
    i64 at = (i64)(work.item.first_position + row) * layer.num_shards + work.item.shard;
    float* h = step.h + at * BLOCK;
    float v[8];
    bool bad = false;
    for (int i = 0; i < 8; i++) {
      int n = 8 * lane + i;
      v[i] = n < neurons ? __ldcg(h + n) : 0.0f;
      bad |= (__float_as_uint(v[i]) & 0x7fffffffu) >= INFINITY_BITS;
    }
    if (DownFormat::INT8)
      write_record(v, step.h_records + at * RECORD, lane);
    else
      for (int i = 0; i < 8; i++)
        if (8 * lane + i >= neurons) h[8 * lane + i] = 0.0f;
    bad = __any_sync(FULL, bad);
    if (lane == 0) step.h_bad[at] = bad;
  }
}

template <bool PLAN>
DEV void run_up(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index, u8* shared,
                int tile) {
  __shared__ int go, last;
  const ShardPlace& place = layer.place[work.item.shard == layer.num_shards - 1];
  int chunks = (place.neurons + UP_CHUNK - 1) / UP_CHUNK;
  if (work.task >= chunks) return;
  if (PLAN) {
    if (threadIdx.x == 0) go = !work.item.flag || wait_for(step, work.item.flag, work.item.flag_value);
    __syncthreads();
    if (!go && threadIdx.x == 0) fail(step, work.clock, ERROR_ABORTED);
  }
  if (PLAN && go && work.item.staged)
    multiply_up_staged(layer, step, work, place, shared, tile);
  else if (!PLAN || go)
    multiply_up_in_place(layer, step, work, place);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(progress.done + index, 1u) == (u32)chunks - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  finish_hidden(layer, step, work, place.neurons);
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  progress.done[index] = 0;
  store_release_gpu(progress.ready + index, work.clock);
}

// ------------------------------------------------------------------------------------------------ down
constexpr int DOWN_GROUPS = WARPS * 8, DOWN_PASSES = DOWN_CHUNK / DOWN_GROUPS;  // four lanes a row

// Columns `first` to `first + count` of the part, for all rows; row 0 of the planes is column `first`.
template <bool STAGED>
DEV void multiply_down(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place,
                       const Rows& down, const u32* ready, int first, int count) {
  int group = threadIdx.x / 4, t = threadIdx.x & 3;
  typename DownFormat::Piece pieces[DOWN_PASSES];
#pragma unroll
  for (int i = 0; i < DOWN_PASSES; i++) {
    int row = min(group + i * DOWN_GROUPS, count - 1);
    pieces[i] = DownFormat::template load<!STAGED>(main_row(down, row), side_row(down, row), 0, t, place.neurons);
  }
  if (threadIdx.x == 0) wait_for_block(ready, work.clock);
  __syncthreads();
  for (int row = 0; row < work.item.num_rows; row++) {
    i64 at = (i64)(work.item.first_position + row) * layer.num_shards + work.item.shard;
    const void* x = DownFormat::INT8 ? (const void*)(step.h_records + at * RECORD) : (const void*)(step.h + at * BLOCK);
    typename DownFormat::X piece = DownFormat::load_x(x, 0, t, place.neurons);
    bool bad = step.h_bad[at] != 0;
#pragma unroll
    for (int i = 0; i < DOWN_PASSES; i++) {
      float v = DownFormat::value(pieces[i], piece, t) + 0.0f;
      int column = group + i * DOWN_GROUPS;
      if (t == 0 && column < count) step.parts[at * layer.hidden + first + column] = bad ? canonical_nan() : v;
    }
  }
}

DEV void multiply_down_in_place(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place,
                                const u32* ready, int first, int count) {
  const u8* w = work.item.weights;
  Rows down = {w + place.down_main + (i64)first * place.down_stride, w + place.down_side + (i64)first * place.down_side_stride,
               place.down_stride, place.down_side_stride};
  multiply_down<false>(layer, step, work, place, down, ready, first, count);
}

DEV void multiply_down_staged(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place,
                              const u32* ready, int first, int count, u8* shared, int tile) {
  u8* mains = stage_rows(shared, work.item, place.down_side, place.down_side_stride, first, count);
  for (int i = 0; i < count; i += tile) {
    int rows = min(tile, count - i);
    stage_rows(mains, work.item, place.down_main, place.down_stride, first + i, rows);
    __syncthreads();
    Rows down = {mains, shared + i * place.down_side_stride, place.down_stride, place.down_side_stride};
    multiply_down<true>(layer, step, work, place, down, ready, first + i, rows);
    __syncthreads();
  }
  if (work.task == 0 && work.item.fill)  // biases and padding, behind the matrices
    stage(nullptr, work.item.weights + place.tail, work.item.fill + place.tail, place.nbytes - place.tail);
}

// Without misses: the block that makes the last part of some columns combines them.
DEV void combine_if_last(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int count) {
  __shared__ int last;
  if (!combines_at_once(step)) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(progress.columns + work.task, 1u) == (u32)count - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) progress.columns[work.task] = 0;
  for (int token = 0; token < step.num_rows; token++) combine_columns(layer, step, token, work.task);
}

template <bool PLAN>
DEV void run_down(const Layer& layer, const Step& step, const Progress& progress, const Work& work, int index, int count,
                  u8* shared, int tile) {
  __shared__ int go;
  const ShardPlace& place = layer.place[work.item.shard == layer.num_shards - 1];
  int first = work.task * DOWN_CHUNK, columns = min(DOWN_CHUNK, layer.hidden - first);
  if (!PLAN) {
    multiply_down_in_place(layer, step, work, place, progress.ready + index, first, columns);
    combine_if_last(layer, step, progress, work, count);
    return;
  }
  if (work.task == 0)
    for (int row = threadIdx.x; row < work.item.num_rows; row += blockDim.x)
      step.lane[(work.item.first_position + row) * layer.num_shards + work.item.shard] = 1;
  if (threadIdx.x == 0) go = !work.item.flag || wait_for(step, work.item.flag, work.item.flag_value);
  __syncthreads();
  if (!go) return;
  if (work.item.staged)
    multiply_down_staged(layer, step, work, place, progress.ready + index, first, columns, shared, tile);
  else
    multiply_down_in_place(layer, step, work, place, progress.ready + index, first, columns);
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

template <bool PLAN>
DEV void run_items(const Layer& layer, const Step& step, const Progress& progress, const WorkList* list, int max_items,
                   u8* shared, int up_tile, int down_tile) {
  __shared__ Work work;
  __shared__ Head shared_head;
  if (PLAN && step.state->missing == 0) return;
  int up_chunks = (layer.place[0].neurons + UP_CHUNK - 1) / UP_CHUNK, down_chunks = (layer.hidden + DOWN_CHUNK - 1) / DOWN_CHUNK;
  int block = blockIdx.x - max_items * up_chunks, chunks = block < 0 ? up_chunks : down_chunks;
  int task = block < 0 ? (int)blockIdx.x : block, index = task / chunks;
  task -= index * chunks;
  if (threadIdx.x == 0) work.task = task;
  Head head = read_head(step, list, index, work, shared_head);
  if (PLAN && head.list_sequence != head.sequence) {  // a plan of another step
    if (blockIdx.x == 0 && threadIdx.x == 0) fail(step, head.clock, ERROR_STALE_PLAN);
    return;
  }
  if (index >= head.count) {  // nothing of this list; a step in which every id is skipped still has an output
    bool nothing = !PLAN && head.count == 0 && block >= 0 && index == 0 && combines_at_once(step);
    for (int token = 0; nothing && token < step.num_rows; token++) combine_columns(layer, step, token, task);
    return;
  }
  if (block < 0)
    run_up<PLAN>(layer, step, progress, work, index, shared, up_tile);
  else
    run_down<PLAN>(layer, step, progress, work, index, head.count, shared, down_tile);
}

extern "C" __global__ void __launch_bounds__(256, HIT_BLOCKS)
    experts_hit(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                const __grid_constant__ Progress progress, const WorkList* list, int max_items) {
  run_items<false>(layer, step, progress, list, max_items, nullptr, 0, 0);
}

extern "C" __global__ void __launch_bounds__(256)
    experts_plan(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                 const __grid_constant__ Progress progress, const WorkList* list, int max_items, int up_tile, int down_tile) {
  DYNAMIC_SHARED(shared);
  run_items<true>(layer, step, progress, list, max_items, shared, up_tile, down_tile);
}

// Prefill around the experts: rows to records, ids to positions and each expert's rows, where each shard's bytes are; and
// the sum over a token's experts in the end. No step of it talks to the host.
#include "row_tiles.cuh"

// One block a row.
extern "C" __global__ void __launch_bounds__(256) prefill_rows(const __grid_constant__ Layer layer, const __grid_constant__ Step step) {
  wait_for_earlier();
  __shared__ int bad;
  int nb = (layer.hidden + BLOCK - 1) / BLOCK, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) bad = 0;
  __syncthreads();
  for (int block = warp; block < nb; block += blockDim.x / 32)
    if (publish_block(layer, step, blockIdx.x, block, 0, lane)) bad = 1;
  __syncthreads();
  if (threadIdx.x == 0) step.row_bad[blockIdx.x] = bad;
}

// ------------------------------------------------------------------------------------------------- grouping
DEV void count_entries(const Layer& layer, const Step& step, u32 clock, u32* rows) {
  for (int e = threadIdx.x; e < layer.num_experts; e += blockDim.x) rows[e] = 0;
  __syncthreads();
  for (int entry = threadIdx.x; entry < step.num_rows * step.top_k; entry += blockDim.x) {
    int e = expert_of(layer, step, entry, clock);
    if (e >= 0) atomicAdd(rows + e, 1u);
  }
  __syncthreads();
}

// One warp: each expert's first position, also into `next`.
DEV void list_experts(const Layer& layer, const Prefill& prefill, const u32* rows, u32* next) {
  int lane = threadIdx.x, share = (layer.num_experts + 31) / 32;
  int first = min(lane * share, layer.num_experts), last = min(first + share, layer.num_experts), sum = 0;
  for (int e = first; e < last; e++) sum += (int)rows[e];
  int position = sum_below(sum, lane);
  for (int e = first; e < last; e++) {
    prefill.first[e] = position, prefill.rows[e] = (int)rows[e];
    next[e] = (u32)position;
    position += (int)rows[e];
  }
}

// The rows of an expert may take its positions in any order: each gets its own result.
DEV void place_positions(const Layer& layer, const Step& step, u32 clock, u32* next) {
  for (int entry = threadIdx.x; entry < step.num_rows * step.top_k; entry += blockDim.x) {
    int e = expert_of(layer, step, entry, clock), position = e < 0 ? -1 : (int)atomicAdd(next + e, 1u);
    step.position_of[entry] = position;
    if (position >= 0) step.token_of[position] = entry / step.top_k;
  }
}

// Where each shard's bytes are: in a slot, copied past the slots, else where they are in host memory. The slot table is
// looked at here, in the order of the stream, so it does not matter what the host knew of it. The hits of the step.
DEV void find_sources(const Layer& layer, const Prefill& prefill, const Batches* batches, const u32* rows, u32* hits) {
  const u64* staged = (const u64*)(batches + 1);
  for (int i = threadIdx.x; i < layer.num_experts * layer.num_shards; i += blockDim.x) {
    int expert = i / layer.num_shards, shard = i - expert * layer.num_shards, slot = layer.slot_of[i];
    u64 at = slot >= 0 ? layer.slots + (u64)slot * layer.slot_nbytes : staged[i];
    u64 in_place = prefill.host + (u64)expert * prefill.host_stride + (u64)shard * layer.place[0].nbytes;
    prefill.source[i] = at ? at : in_place;
    if (slot >= 0 && !staged[i] && rows[expert]) atomicAdd(hits, 1u);
  }
}

// Which experts a batch has, as the host has put them.
DEV void copy_batches(const Layer& layer, const Prefill& prefill, const Batches* batches) {
  const int* order = (const int*)((const u64*)(batches + 1) + layer.num_experts * layer.num_shards);
  const int* first = order + layer.num_experts;
  for (int i = threadIdx.x; i < layer.num_experts; i += blockDim.x) prefill.order[i] = order[i];
  for (int i = threadIdx.x; i <= batches->count; i += blockDim.x) prefill.batch[i] = first[i];
}

// One block. What was copied counts as routed to, so that routed less copied are the hits.
extern "C" __global__ void __launch_bounds__(512)
    prefill_group(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                  const __grid_constant__ Prefill prefill, const Batches* batches) {
  wait_for_earlier();
  DYNAMIC_SHARED(shared);
  __shared__ u32 hits;
  u32 *rows = (u32*)shared, *next = rows + layer.num_experts, clock = step.state->clock + 1;
  if (threadIdx.x == 0) hits = 0;
  count_entries(layer, step, clock, rows);
  if (threadIdx.x < 32) list_experts(layer, prefill, rows, next);
  __syncthreads();
  place_positions(layer, step, clock, next);
  find_sources(layer, prefill, batches, rows, &hits);
  copy_batches(layer, prefill, batches);
  __syncthreads();
  if (threadIdx.x == 0) step.state->clock = clock, step.state->routed += hits + (u64)batches->copied;
}

// -------------------------------------------------------------------------------------------------- combine
// 256 columns of a token: its experts in rank order.
extern "C" __global__ void __launch_bounds__(256)
    prefill_combine(const __grid_constant__ Layer layer, const __grid_constant__ Step step, const __grid_constant__ Prefill prefill) {
  wait_for_earlier();
  int token = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= layer.hidden) return;
  bool bad = step.row_bad[token] != 0;
  float y = 0;
  for (int entry = token * step.top_k; entry < (token + 1) * step.top_k; entry++) {
    int position = step.position_of[entry];
    if (position < 0) continue;
    float weight = load_element(step.weights, step.weight_element, entry);
    y = bad ? canonical_nan() : __fmaf_rn(weight, prefill.outs[(i64)position * layer.hidden + column], y);
  }
  store_element((u8*)step.out + token * step.out_stride, step.out_element, column, y);
}

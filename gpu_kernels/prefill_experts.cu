// Prefill's experts: gate and up, hidden values to records, down, for the experts of a batch. blockIdx.y is a part of an
// expert's rows, blockIdx.x its neurons or columns; weights are read where `Prefill.source` says, once for each tile.
#include "row_tiles.cuh"

DEV void load_tokens(const Step& step, int position, int count, int* tokens) {
  __syncthreads();
  if (threadIdx.x < count) tokens[threadIdx.x] = step.token_of[position + threadIdx.x];
  __syncthreads();
}

// The gate of one neuron for the rows of a tile, a lane each.
DEV void store_hidden(const Layer& layer, const Prefill& prefill, const ShardPlace& place, const u8* bytes, int position,
                      int count, int shard, int n, const float sums[2][TILE_QUADS]) {
  int lane = threadIdx.x % 32;
  float g = of_own_row(sums[0], lane), u = of_own_row(sums[1], lane);
  if (lane >= count) return;
  if (place.up_bias >= 0) u += ((const float*)(bytes + place.up_bias))[n];
  if (HAS_GATE && place.gate_bias >= 0) g += ((const float*)(bytes + place.gate_bias))[n];
  ((float*)hidden_of(layer, prefill, position + lane, shard))[n] = activate(layer.gate_kind, layer.alpha, layer.limit, g, u);
}

// Eight neurons, one warp each.
extern "C" __global__ void __launch_bounds__(256, 2)
    prefill_up(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
               const __grid_constant__ Prefill prefill, int batch, int splits, int span) {
  wait_for_earlier();
  DYNAMIC_SHARED(shared);
  int* tokens = (int*)shared;
  uint4* staged = (uint4*)(tokens + ROW_TILE);
  Part part;
  if (!find_part(prefill, batch, splits, span, part)) return;
  int shard = blockIdx.x / (BLOCK / WARPS), n = blockIdx.x % (BLOCK / WARPS) * WARPS + threadIdx.x / 32;
  const ShardPlace& place = place_of(layer, shard);
  if ((int)(blockIdx.x % (BLOCK / WARPS) * WARPS) >= place.neurons) return;
  const u8* bytes = shard_bytes(layer, prefill, part.expert, shard);
  const Rows weights[2] = {{bytes + place.gate_main, bytes + place.gate_side, layer.gate_stride, layer.gate_side_stride},
                           {bytes + place.up_main, bytes + place.up_side, layer.up_stride, layer.up_side_stride}};
  for (int row = 0; row < part.count; row += ROW_TILE) {
    int count = min(ROW_TILE, part.count - row);
    load_tokens(step, part.position + row, count, tokens);
    float sums[2][TILE_QUADS] = {};
    dot_neuron_tile(step, tokens, count, weights, n, layer.hidden, staged, sums);
    store_hidden(layer, prefill, place, bytes, part.position + row, count, shard, n, sums);
  }
}

// A position's hidden values of a shard as down takes them, in their place, by one warp.
DEV void convert_hidden(const Layer& layer, const Prefill& prefill, int position, int shard) {
  int lane = threadIdx.x % 32, neurons = place_of(layer, shard).neurons;
  u8* hidden = hidden_of(layer, prefill, position, shard);
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = 8 * lane + i < neurons ? ((const float*)hidden)[8 * lane + i] : 0.0f;
  bool bad = __any_sync(FULL, not_finite(v));  // all have read
  if (DownFormat::INT8)
    write_record(v, hidden, lane);
  else
    store8((float*)hidden + 8 * lane, v);
  if (lane == 0) prefill.hidden_bad[(i64)position * layer.num_shards + shard] = bad;
}

extern "C" __global__ void __launch_bounds__(256)
    prefill_hidden(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                   const __grid_constant__ Prefill prefill, int batch, int splits, int span) {
  wait_for_earlier();
  Part part;
  if (!find_part(prefill, batch, splits, span, part)) return;
  int all = part.count * layer.num_shards;
  for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < all; i += gridDim.x * WARPS)
    convert_hidden(layer, prefill, part.position + i / layer.num_shards, i % layer.num_shards);
}

// A row's column: the accumulators of four lanes in the order of a row, then the bias.
DEV void store_column(const Layer& layer, const Prefill& prefill, const Part& part, int row, int column, float low, float high) {
  float sum = low + high;
  sum += __shfl_xor_sync(FULL, sum, 2);
  sum += __shfl_xor_sync(FULL, sum, 1);
  if ((int)(threadIdx.x & 3) != (row & 3) || column >= layer.hidden) return;
  if (layer.down_bias) sum += layer.down_bias[(i64)part.expert * layer.hidden + column];
  prefill.outs[(i64)(part.position + row) * layer.hidden + column] = sum;
}

// Eight columns a warp, four lanes each.
extern "C" __global__ void __launch_bounds__(256, 2)
    prefill_down(const __grid_constant__ Layer layer, const __grid_constant__ Step step,
                 const __grid_constant__ Prefill prefill, int batch, int splits, int span) {
  wait_for_earlier();
  DYNAMIC_SHARED(shared);
  Part part;
  if (!find_part(prefill, batch, splits, span, part)) return;
  int own = blockIdx.x * (blockDim.x / 4) + threadIdx.x / 4, column = min(own, layer.hidden - 1);
  for (int row = 0; row < part.count; row += DOWN_ROWS) {
    int count = min(DOWN_ROWS, part.count - row);
    float low[DOWN_ROWS] = {}, high[DOWN_ROWS] = {};
    for (int first = 0; first < layer.num_shards; first += SHARDS_AT_ONCE) {
      if (DownFormat::INT8) {
        __syncthreads();  // what is there has been read
        stage_hidden(layer, prefill, part.position + row, count, first, (uint4*)shared);
        __syncthreads();
      }
      for (int shard = first; shard < min(first + SHARDS_AT_ONCE, layer.num_shards); shard++)
        add_shard(layer, prefill, part, row, count, shard, column, (const uint4*)shared, low, high);
    }
#pragma unroll
    for (int r = 0; r < DOWN_ROWS; r++)
      if (r < count) store_column(layer, prefill, part, row + r, own, low[r], high[r]);
  }
}

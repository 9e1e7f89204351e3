// Combine: shards to experts, experts to the token's row, in the written order, for DOWN_CHUNK columns.
//
// Per expert eight accumulators from +0 take the shards, shard b into b mod 8, then the tree and the bias; per token
// y = fma(w_k, out_k, y) in rank order. Reads 4 * top_k * num_shards bytes a column; a block has 256 threads.
#pragma once
#include "waits.cuh"

constexpr int COMBINE_RANKS = 8;  // experts whose sums are in shared memory at a time

// Without misses few rows are combined by the kernel that makes the last part; combine then has nothing to do.
DEV bool combines_at_once(const Step& step) { return step.state->missing == 0 && step.num_rows <= FUSED_ROWS; }

DEV i64 id_of(const Step& step, int entry) {
  return step.id_nbytes == 8 ? ((const i64*)step.ids)[entry] : (i64)((const int*)step.ids)[entry];
}

DEV float sum_shards(const Layer& layer, const Step& step, int position, int column) {
  float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  int first = position * layer.num_shards;
  for (int shard = 0; shard < layer.num_shards; shard += 8) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (shard + i >= layer.num_shards) continue;
      int part = first + shard + i;
      const float* parts = __ldcg(step.lane + part) ? step.parts : step.cpu_parts;
      acc[i] += __ldcg(parts + (i64)part * layer.hidden + column);
    }
  }
  return ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]));
}

DEV float expert_output(const Layer& layer, const Step& step, int entry, int position, int column) {
  float out = sum_shards(layer, step, position, column);
  if (!layer.down_bias) return out;
  return out + layer.down_bias[id_of(step, entry) * layer.hidden + column];
}

DEV void combine_columns(const Layer& layer, const Step& step, int token, int chunk) {
  __shared__ float outs[COMBINE_RANKS][DOWN_CHUNK];
  int at = threadIdx.x % DOWN_CHUNK, column = chunk * DOWN_CHUNK + at, part = threadIdx.x / DOWN_CHUNK;
  int parts = blockDim.x / DOWN_CHUNK;
  bool inside = column < layer.hidden, bad = step.row_bad[token] != 0 || step.state->failed == step.state->clock;
  float y = 0;
  for (int first = 0; first < step.top_k; first += COMBINE_RANKS) {
#pragma unroll 4
    for (int rank = part; rank < COMBINE_RANKS; rank += parts) {
      if (first + rank >= step.top_k || !inside) continue;
      int entry = token * step.top_k + first + rank, position = __ldcg(step.position_of + entry);
      if (position >= 0) outs[rank][at] = expert_output(layer, step, entry, position, column);
    }
    __syncthreads();
    for (int rank = 0; part == 0 && inside && rank < COMBINE_RANKS && first + rank < step.top_k; rank++) {
      int entry = token * step.top_k + first + rank;
      if (__ldcg(step.position_of + entry) < 0) continue;
      y = bad ? canonical_nan() : __fmaf_rn(step.weights[entry], outs[rank][at], y);
    }
    __syncthreads();
  }
  if (part == 0 && inside) store_element((u8*)step.out + token * step.out_stride, step.out_element, column, y);
}

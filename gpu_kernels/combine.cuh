// Combine: shards to experts, experts to the token's row, in the written order, for DOWN_CHUNK columns.
//
// Per expert eight accumulators from +0 take the shards, shard b into b mod 8, then the tree and the bias; per token
// y = fma(w_k, out_k, y) in rank order. Reads 4 * top_k * num_shards bytes a column; a block has 256 threads.
#pragma once
#include "waits.cuh"

constexpr int COMBINE_RANKS = 8;  // experts whose sums are in shared memory at a time

DEV i64 id_of(const Step& step, int entry) {
  return step.id_nbytes == 8 ? __ldcg((const i64*)step.ids + entry) : (i64)__ldcg((const int*)step.ids + entry);
}

DEV float weight_of(const Step& step, int entry) { return load_element(step.weights, step.weight_element, entry); }

DEV float4 add4(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Four columns of a position's output; a shard that is not there counts as it does elsewhere, not at all.
template <bool ALL_HERE>  // every part is in `parts`
DEV float4 sum_shards(const Layer& layer, const Step& step, int position, int column) {
  float4 zero = make_float4(0, 0, 0, 0), acc[8] = {zero, zero, zero, zero, zero, zero, zero, zero};
  int first = position * layer.num_shards;
  for (int shard = 0; shard < layer.num_shards; shard += 8) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (shard + i >= layer.num_shards) continue;
      int part = first + shard + i;
      const float* parts = ALL_HERE || __ldcg(step.lane + part) ? step.parts : step.cpu_parts;
      acc[i] = add4(acc[i], __ldcg((const float4*)(parts + (i64)part * layer.hidden + column)));
    }
  }
  return add4(add4(add4(acc[0], acc[4]), add4(acc[2], acc[6])), add4(add4(acc[1], acc[5]), add4(acc[3], acc[7])));
}

// What a block knows of a token before its parts are there: positions, weights, experts of COMBINE_RANKS entries.
struct Ranks {
  int position[COMBINE_RANKS];
  float weight[COMBINE_RANKS];
  int expert[COMBINE_RANKS];
};

struct CombineShared {
  alignas(16) float outs[COMBINE_RANKS][DOWN_CHUNK];
  Ranks ranks;
};

DEV void load_ranks(const Step& step, int token, int first, Ranks& ranks) {
  int rank = threadIdx.x, entry = token * step.top_k + first + rank;
  if (rank >= COMBINE_RANKS) return;
  bool real = first + rank < step.top_k;
  ranks.position[rank] = real ? __ldcg(step.position_of + entry) : -1;
  ranks.weight[rank] = real ? weight_of(step, entry) : 0.0f;
  ranks.expert[rank] = real ? (int)id_of(step, entry) : 0;
}

// The part of a rank's sum that comes after: `y` over COMBINE_RANKS experts in rank order.
DEV float add_ranks(const Ranks& ranks, const float (*outs)[DOWN_CHUNK], int at, bool bad, float y) {
  for (int rank = 0; rank < COMBINE_RANKS; rank++) {
    if (ranks.position[rank] < 0) continue;
    y = bad ? canonical_nan() : __fmaf_rn(ranks.weight[rank], outs[rank][at], y);
  }
  return y;
}

// A warp a rank, four columns a lane: all loads of a thread are under way at once.
template <bool ALL_HERE>
DEV void sum_experts(const Layer& layer, const Step& step, const Ranks& ranks, float (*outs)[DOWN_CHUNK], int start, int end) {
  static_assert(DOWN_CHUNK == 4 * 32, "a warp has a rank's columns");
  int at = 4 * (threadIdx.x % 32), column = start + at;
  if (column >= end) return;
  for (int rank = threadIdx.x / 32; rank < COMBINE_RANKS; rank += blockDim.x / 32) {
    int position = ranks.position[rank];
    if (position < 0) continue;
    float4 out = sum_shards<ALL_HERE>(layer, step, position, column);
    if (layer.down_bias) out = add4(out, *(const float4*)(layer.down_bias + (i64)ranks.expert[rank] * layer.hidden + column));
    *(float4*)&outs[rank][at] = out;
  }
}

// DOWN_CHUNK columns from `start` on, but none from `end` on, by all 256 threads. `wait`, called by every thread, says once
// the parts are there whether the step has failed; what does not depend on them is read before.
template <bool ALL_HERE, class Wait>
DEV void combine_columns(const Layer& layer, const Step& step, int token, int start, int end, CombineShared& shared,
                         const Wait& wait) {
  int at = threadIdx.x % DOWN_CHUNK, column = start + at;
  bool bad = __ldcg(step.row_bad + token) != 0;
  float y = 0;
  for (int first = 0; first < step.top_k; first += COMBINE_RANKS) {
    load_ranks(step, token, first, shared.ranks);
    if (first == 0) bad |= wait();
    __syncthreads();
    sum_experts<ALL_HERE>(layer, step, shared.ranks, shared.outs, start, end);
    __syncthreads();
    y = add_ranks(shared.ranks, shared.outs, at, bad, y);
    __syncthreads();
  }
  if (threadIdx.x < DOWN_CHUNK && column < end)
    store_element((u8*)step.out + token * step.out_stride, step.out_element, column, y);
}

// Down: a block's share of the columns of a shard's part, from the hidden values that all blocks of the item have made.
#pragma once
#include "columns.cuh"
#include "gate_up.cuh"

constexpr int HIDDEN_ROWS = 4;  // rows of h that a block has at a time

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
  float4 a = __ldcg((const float4*)(h + 8 * lane)), b = __ldcg((const float4*)(h + 8 * lane) + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (8 * lane + i >= neurons) v[i] = 0.0f;
  if (DownFormat::INT8)
    write_record(v, rows.row[warp], lane);
  else
    store8((float*)rows.row[warp] + 8 * lane, v);
  bool bad = __any_sync(FULL, not_finite(v));
  if (lane == 0) rows.bad[warp] = bad;
}

// Columns `first` to `first + count` of the parts of some rows, four lanes a column; row 0 of the planes is `first`.
DEV void multiply_down(const Layer& layer, const Step& step, const Work& work, int neurons, const Rows& down,
                       const HiddenRows& hidden, int first, int count, int first_row) {
  constexpr int AT_ONCE = DownFormat::INT8 && sizeof(typename DownFormat::Piece) <= 48 ? 2 : 1, GROUPS = 8 * WARPS;
  int group = threadIdx.x / 4, t = threadIdx.x & 3, rows = min(HIDDEN_ROWS, work.item.num_rows - first_row);
  for (int base = 0; base < count; base += AT_ONCE * GROUPS) {
    typename DownFormat::Piece pieces[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      int i = min(base + k * GROUPS + group, count - 1);
      pieces[k] = DownFormat::load(main_row(down, i), side_row(down, i), 0, t, neurons);
    }
    for (int row = 0; row < rows; row++) {
      i64 at = (i64)(work.item.first_position + first_row + row) * layer.num_shards + work.item.shard;
      float* parts = step.parts + at * layer.hidden + first;
      typename DownFormat::X x = DownFormat::load_x(hidden.row[row], 0, t, neurons);
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        int i = base + k * GROUPS + group;
        float v = DownFormat::value(pieces[k], x, t) + 0.0f;
        if (t == 0 && i < count) parts[i] = hidden.bad[row] ? canonical_nan() : v;
      }
    }
  }
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
    fill(work.item, main);
    __syncthreads();
  }
  fill(work.item, side);
}

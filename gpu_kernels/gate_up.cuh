// Gate and up: the hidden values of a chunk of neurons, a warp for some of them, eight blocks of a row at a time.
#pragma once
#include "shard.cuh"

constexpr bool ONE_FORMAT = Same<GateFormat, UpFormat>::value;  // gate and up are multiplied at once

struct RowAt { const u8 *main, *side; };

DEV RowAt stagedat(const Rows& rows, int i) { return {main_row(rows, i), side_row(rows, i)}; }

constexpr bool ONE_RECORD = !HAS_GATE || GateFormat::INT8 == UpFormat::INT8;  // gate and up take the same rows

// N rows by one warp: eight blocks at a time, four lanes each, so a lane group is an accumulator.
template <class F, int N, bool SPREAD>
DEV void dot_rows(const RowAt* rows, const void* x, int columns, int lane, float* out) {
  int nb = (columns + BLOCK - 1) / BLOCK, g = lane >> 2, t = lane & 3;
  float acc[N];
#pragma unroll
  for (int j = 0; j < N; j++) acc[j] = 0;
  for (int first = 0; first < nb; first += 8) {
    bool live = first + g < nb;
    int block = live ? first + g : 0;
    typename F::X at = F::template load_x<SPREAD>(x, block, t, columns);
#pragma unroll
    for (int j = 0; j < N; j++) {
      typename F::Piece piece = F::load(rows[j].main, rows[j].side, block, t, columns);
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

// Gate and up values of N neurons, WARPS apart from `i` on.
template <int N, bool SPREAD>
DEV void dot_neurons(const Rows& gate, const Rows& up, int i, const void* gate_x, const void* up_x, int columns, int lane,
                     float* g, float* u) {
  RowAt rows[2 * N];
  float out[2 * N];
#pragma unroll
  for (int j = 0; j < N; j++) {
    rows[j] = stagedat(up, i + j * WARPS);
    if (HAS_GATE) rows[N + j] = stagedat(gate, i + j * WARPS);
  }
  if constexpr (ONE_FORMAT) {
    dot_rows<UpFormat, 2 * N, SPREAD>(rows, up_x, columns, lane, out);
  } else {
    dot_rows<UpFormat, N, SPREAD>(rows, up_x, columns, lane, out);
    if constexpr (HAS_GATE) dot_rows<GateFormat, N, SPREAD>(rows + N, gate_x, columns, lane, out + N);
  }
#pragma unroll
  for (int j = 0; j < N; j++) u[j] = out[j], g[j] = HAS_GATE ? out[N + j] : 0.0f;
}

// Hidden values of N neurons of one row; lane j has the j-th of them.
template <int N, bool SPREAD>
DEV void make_hidden(const Layer& layer, const Work& work, const ShardPlace& place, const Rows& gate, const Rows& up, int i,
                     int first, const void* gate_x, const void* up_x, float* h) {
  int lane = threadIdx.x % 32;
  float gs[N], us[N];
  dot_neurons<N, SPREAD>(gate, up, i, gate_x, up_x, layer.hidden, lane, gs, us);
  float g = gs[0], u = us[0];
  if (N > 1 && lane == 1) g = gs[N - 1], u = us[N - 1];
  if (lane >= N) return;
  int n = first + i + lane * WARPS;
  if (place.up_bias >= 0) u += __ldcg((const float*)(work.item.weights + place.up_bias) + n);
  if (HAS_GATE && place.gate_bias >= 0) g += __ldcg((const float*)(work.item.weights + place.gate_bias) + n);
  h[n] = activate(layer.gate_kind, layer.alpha, layer.limit, g, u);
}

constexpr bool PAIRS = UpFormat::INT8 && sizeof(typename UpFormat::Piece) <= 48;  // two neurons fit into registers

// Neurons `first` to `first + count` of the shard, for one row of the item; row 0 of the planes is neuron `first`.
template <bool SPREAD>
DEV void multiply_row(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, const Rows& gate,
                      const Rows& up, int first, int count, int row, const void* gate_x, const void* up_x) {
  float* h = step.h + ((i64)(work.item.first_position + row) * layer.num_shards + work.item.shard) * BLOCK;
  int i = threadIdx.x / 32;
  if (PAIRS)
    for (; i + WARPS < count; i += 2 * WARPS)
      make_hidden<PAIRS ? 2 : 1, SPREAD>(layer, work, place, gate, up, i, first, gate_x, up_x, h);
  for (; i < count; i += WARPS) make_hidden<1, SPREAD>(layer, work, place, gate, up, i, first, gate_x, up_x, h);
}

// The same for all rows; `row` is the first one's records in shared memory, or null.
DEV void multiply_up(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, const Rows& gate,
                     const Rows& up, int first, int count, const u8* staged) {
  int nb = (layer.hidden + BLOCK - 1) / BLOCK;
  if (staged) multiply_row<true>(layer, step, work, place, gate, up, first, count, 0, staged, staged);
  for (int row = staged ? 1 : 0; row < work.item.num_rows; row++) {
    int token = __ldcg(step.token_of + work.item.first_position + row);
    const void *gate_x = records_of<GateFormat>(step, token, nb), *up_x = records_of<UpFormat>(step, token, nb);
    multiply_row<false>(layer, step, work, place, gate, up, first, count, row, gate_x, up_x);
  }
}

struct UpSpans { Span gate_side, up_side, gate, up; };

// A tile of main rows, of the neurons from `first` on.
DEV void span_tile(const Layer& layer, const ShardPlace& place, UpSpans& spans, int first, int tile) {
  spans.gate = span_of(behind(spans.up_side), place.gate_main, layer.gate_stride, first, tile);
  spans.up = span_of(behind(spans.gate), place.up_main, layer.up_stride, first, tile);
}

DEV UpSpans up_spans(const Layer& layer, const ShardPlace& place, u8* shared, int first, int tile) {
  UpSpans spans;
  spans.gate_side = span_of(shared, place.gate_side, layer.gate_side_stride, first, UP_CHUNK);
  spans.up_side = span_of(behind(spans.gate_side), place.up_side, layer.up_side_stride, first, UP_CHUNK);
  span_tile(layer, place, spans, first, tile);
  return spans;
}

DEV void stage_sides(const Item& item, const UpSpans& spans) {
  stage(item, spans.gate_side);
  stage(item, spans.up_side);
}

DEV void stage_tile(const Item& item, const UpSpans& spans) {
  stage(item, spans.gate);
  stage(item, spans.up);
}

// The neurons of a tile whose rows have come; `i` is its first one in the chunk.
DEV void multiply_tile(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, const UpSpans& spans,
                       int i, int tile, const u8* row) {
  __syncthreads();
  Rows gate = {spans.gate.shared, spans.gate_side.shared + i * layer.gate_side_stride, layer.gate_stride, layer.gate_side_stride};
  Rows up = {spans.up.shared, spans.up_side.shared + i * layer.up_side_stride, layer.up_stride, layer.up_side_stride};
  multiply_up(layer, step, work, place, gate, up, work.task * UP_CHUNK + i, tile, row);
}

DEV void fill_up(const Work& work, const UpSpans& spans) {
  fill(work.item, spans.gate);
  fill(work.item, spans.up);
}

DEV void fill_sides(const Work& work, const UpSpans& spans) {
  fill(work.item, spans.gate_side);
  fill(work.item, spans.up_side);
}

// Rows too long for the shared memory: tile after tile in one buffer.
DEV void multiply_up_by_tiles(const Layer& layer, const Step& step, const Work& work, const ShardPlace& place, u8* shared,
                              int tile) {
  int first = work.task * UP_CHUNK;
  UpSpans spans = up_spans(layer, place, shared, first, tile);
  stage_sides(work.item, spans);
  for (int i = 0; i < UP_CHUNK; i += tile) {
    span_tile(layer, place, spans, first + i, tile);
    stage_tile(work.item, spans);
    copies_sent();
    copies_done<0>();
    multiply_tile(layer, step, work, place, spans, i, tile, nullptr);
    fill_up(work, spans);
    __syncthreads();
  }
  fill_sides(work, spans);
}

DEV int up_chunks_of(const ShardPlace& place) { return (place.neurons + UP_CHUNK - 1) / UP_CHUNK; }

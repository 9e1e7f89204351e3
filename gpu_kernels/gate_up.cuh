// Gate and up: the hidden values of a chunk of neurons, one warp each, eight blocks of a row at a time.
#pragma once
#include "shard.cuh"

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

DEV int up_chunks_of(const ShardPlace& place) { return (place.neurons + UP_CHUNK - 1) / UP_CHUNK; }

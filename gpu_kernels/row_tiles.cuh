// Many rows of one expert: a piece of weights is loaded once and multiplied with a tile of rows, whose activations lie in
// shared memory as the lanes of a warp take them. The bits are those of one row at a time: a row's sums do not meet.
#pragma once
#include "shard.cuh"

constexpr int TILE_QUADS = ROW_TILE / 4;
constexpr int DOWN_ROWS = 8;         // of a tile, in down
constexpr int SHARDS_AT_ONCE = 8;    // of which a tile's hidden values are in shared memory

// Which rows of which expert a block works through: `first` counts the expert's rows.
struct Part { int expert, position, count; };

// Part `blockIdx.y` of a batch of experts; false if the batch or the expert has fewer. The last one has all that is left:
// a row may name an expert more than once.
DEV bool find_part(const Prefill& prefill, int batch, int splits, int span, Part& part) {
  int index = prefill.batch[batch] + blockIdx.y / splits, split = (int)(blockIdx.y % splits), first = split * span;
  if (index >= prefill.batch[batch + 1]) return false;
  part.expert = prefill.order[index];
  part.position = prefill.first[part.expert] + first;
  part.count = prefill.rows[part.expert] - first;
  if (split < splits - 1) part.count = min(span, part.count);
  return part.count > 0;
}

DEV const u8* shard_bytes(const Layer& layer, const Prefill& prefill, int expert, int shard) {
  return (const u8*)prefill.source[(i64)expert * layer.num_shards + shard];
}

DEV u8* hidden_of(const Layer& layer, const Prefill& prefill, int position, int shard) {
  return prefill.hidden + ((i64)position * layer.num_shards + shard) * (4 * BLOCK);
}

// --------------------------------------------------------------------------------- activations in shared memory
// What lanes multiply with, as 16-byte words `stride` apart, so that the lanes of a warp read without conflicts.
constexpr int MOST_X_WORDS = 6;  // of any format: launches ask for so much shared memory

template <class F> union XWords {
  typename F::X x;
  uint4 word[(sizeof(typename F::X) + 15) / 16];
};

template <class F> constexpr int X_WORDS = F::INT8 ? (int)(sizeof(typename F::X) / 16) : 0;
static_assert(X_WORDS<GateFormat> <= MOST_X_WORDS && X_WORDS<UpFormat> <= MOST_X_WORDS && X_WORDS<DownFormat> <= MOST_X_WORDS, "");

template <class F> DEV void put_x(uint4* at, int stride, const typename F::X& x) {
  XWords<F> words;
  words.x = x;
#pragma unroll
  for (int i = 0; i < X_WORDS<F>; i++) at[i * stride] = words.word[i];
}

template <class F> DEV typename F::X get_x(const uint4* at, int stride) {
  XWords<F> words;
#pragma unroll
  for (int i = 0; i < X_WORDS<F>; i++) words.word[i] = at[i * stride];
  return words.x;
}

// ------------------------------------------------------------------------------------------------ gate and up
// Eight blocks of each row of a tile, from block `first` on: one lane of a group each, as dot_rows has them.
template <class F> DEV void stage_rows(const Step& step, const int* tokens, int count, int first, int columns, uint4* shared) {
  int nb = (columns + BLOCK - 1) / BLOCK, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  int block = first + g < nb ? first + g : 0;
  for (int row = threadIdx.x / 32; row < count; row += WARPS)
    put_x<F>(shared + row * X_WORDS<F> * 32 + lane, 32, F::load_x(records_of<F>(step, tokens[row], nb), block, t, columns));
}

template <class F> DEV typename F::X row_x(const Step& step, const int* tokens, int row, int block, int columns, const uint4* shared) {
  int nb = (columns + BLOCK - 1) / BLOCK, lane = threadIdx.x % 32;
  if constexpr (F::INT8)
    return get_x<F>(shared + row * X_WORDS<F> * 32 + lane, 32);
  else
    return F::load_x(records_of<F>(step, tokens[row], nb), block, lane & 3, columns);
}

// N rows of weights by one warp times the rows of a tile. `out[j][q]` of lane t of four is row 4 q + t.
template <class F, int N>
DEV void dot_tile(const Step& step, const int* tokens, int count, const Rows weights[N], int i, int columns, uint4* shared,
                  float out[N][TILE_QUADS]) {
  int nb = (columns + BLOCK - 1) / BLOCK, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int q = 0; q < TILE_QUADS; q++) out[j][q] = 0;
  for (int first = 0; first < nb; first += 8) {
    bool live = first + g < nb;
    int block = live ? first + g : 0;
    if (F::INT8) {
      __syncthreads();  // what is there has been read
      stage_rows<F>(step, tokens, count, first, columns, shared);
      __syncthreads();
    }
    typename F::Piece piece[N];
#pragma unroll
    for (int j = 0; j < N; j++) piece[j] = F::load(main_row(weights[j], i), side_row(weights[j], i), block, t, columns);
#pragma unroll
    for (int q = 0; q < TILE_QUADS; q++) {
      for (int k = 0; k < 4 && 4 * q + k < count; k++) {
        typename F::X x = row_x<F>(step, tokens, 4 * q + k, block, columns, shared);
#pragma unroll
        for (int j = 0; j < N; j++) {
          float v = F::value(piece[j], x, t);
          if (live && k == t) out[j][q] += v;
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int q = 0; q < TILE_QUADS; q++)
      for (int half = 16; half >= 4; half /= 2) out[j][q] += __shfl_xor_sync(FULL, out[j][q], half);
}

// Gate and up of a neuron for the rows of a tile, at once where both matrices have one format.
DEV void dot_neuron_tile(const Step& step, const int* tokens, int count, const Rows weights[2], int i, int columns,
                         uint4* shared, float out[2][TILE_QUADS]) {
  if constexpr (Same<GateFormat, UpFormat>::value) {
    dot_tile<UpFormat, 2>(step, tokens, count, weights, i, columns, shared, out);
  } else {
    dot_tile<UpFormat, 1>(step, tokens, count, weights + 1, i, columns, shared, out + 1);
    if (HAS_GATE) dot_tile<GateFormat, 1>(step, tokens, count, weights, i, columns, shared, out);
  }
}

// Of a value for each row of a tile, that of row `lane`; lanes past the tile get any.
DEV float of_own_row(const float values[TILE_QUADS], int lane) {
  float value = values[0];
#pragma unroll
  for (int q = 1; q < TILE_QUADS; q++) value = lane >> 2 == q ? values[q] : value;
  return value;
}

// ------------------------------------------------------------------------------------------------------- down
// Hidden values of `count` rows from a position on, of the shards from `first` on: words of the four lanes of a block.
DEV void stage_hidden(const Layer& layer, const Prefill& prefill, int position, int count, int first, uint4* shared) {
  constexpr int WORDS = X_WORDS<DownFormat>;
  for (int i = threadIdx.x; i < count * SHARDS_AT_ONCE * 4; i += blockDim.x) {
    int t = i & 3, shard = first + (i >> 2) % SHARDS_AT_ONCE, row = i / (4 * SHARDS_AT_ONCE);
    if (shard >= layer.num_shards) continue;
    const u8* hidden = hidden_of(layer, prefill, position + row, shard);
    put_x<DownFormat>(shared + (i >> 2) * WORDS * 4 + t, 4, DownFormat::load_x(hidden, 0, t, place_of(layer, shard).neurons));
  }
}

DEV DownFormat::X hidden_x(const Layer& layer, const Prefill& prefill, int position, int row, int shard, const uint4* shared) {
  int t = threadIdx.x & 3;
  if constexpr (DownFormat::INT8)
    return get_x<DownFormat>(shared + (row * SHARDS_AT_ONCE + shard % SHARDS_AT_ONCE) * X_WORDS<DownFormat> * 4 + t, 4);
  else
    return DownFormat::load_x(hidden_of(layer, prefill, position + row, shard), 0, t, place_of(layer, shard).neurons);
}

// A shard's values of one column: shard b goes to accumulator b mod 8, which lane b mod 4 of four has in `low` or `high`.
DEV void add_shard(const Layer& layer, const Prefill& prefill, const Part& part, int row, int count, int shard, int column,
                   const uint4* shared, float low[DOWN_ROWS], float high[DOWN_ROWS]) {
  const ShardPlace& place = place_of(layer, shard);
  const u8* bytes = shard_bytes(layer, prefill, part.expert, shard);
  Rows down = {bytes + place.down_main, bytes + place.down_side, place.down_stride, place.down_side_stride};
  int t = threadIdx.x & 3, position = part.position + row;
  DownFormat::Piece piece = DownFormat::load(main_row(down, column), side_row(down, column), 0, t, place.neurons);
  bool mine = (shard & 3) == t, upper = shard & 4;
#pragma unroll
  for (int r = 0; r < DOWN_ROWS; r++) {
    if (r >= count) continue;
    float v = DownFormat::value(piece, hidden_x(layer, prefill, position, r, shard, shared), t) + 0.0f;
    if (prefill.hidden_bad[(i64)(position + r) * layer.num_shards + shard]) v = canonical_nan();
    if (mine && !upper) low[r] += v;
    if (mine && upper) high[r] += v;
  }
}

// What a block has in hand: an item of a work list, the formats of its matrices, and their rows' way to shared memory.
//
// GATE_FORMAT, UP_FORMAT and DOWN_FORMAT are defined when this is compiled; GATE_FORMAT may be `none`.
#pragma once
#include "dot_float.cuh"
#include "dot_q4_k.cuh"
#include "dot_q6_k.cuh"
#include "dot_sub_blocks.cuh"
#include "waits.cuh"

struct none : q4_k {};  // no gate matrix
typedef GATE_FORMAT GateFormat;
typedef UP_FORMAT UpFormat;
typedef DOWN_FORMAT DownFormat;
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
constexpr bool HAS_GATE = !Same<GateFormat, none>::value;
constexpr int WARPS = 8;

struct alignas(16) Work {
  Item item;  // read and written sixteen bytes at a time
  int task;  // which chunk of the item
  u32 clock;  // the number by which its flags are known
};

DEV const ShardPlace& place_of(const Layer& layer, int shard) { return layer.place[shard == layer.num_shards - 1]; }

struct Rows {  // planes of a matrix, from the row that the caller counts from 0
  const u8 *main, *side;
  int stride, side_stride;
};

DEV const u8* main_row(const Rows& rows, int i) { return rows.main + i * rows.stride; }
DEV const u8* side_row(const Rows& rows, int i) { return rows.side + i * rows.side_stride; }

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

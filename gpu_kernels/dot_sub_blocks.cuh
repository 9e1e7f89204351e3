// Formats with sub-blocks of 32 and a scale each, times int8 records: Q8_0 and MXFP4. Lane t of four has the
// sub-blocks t and t + 4, so the tree (0+4, ...), (0+2, 1+3), (0+1) is one add here and two shuffles.
// A sub-block past the end of a row contributes +0 and is not read.
#pragma once
#include "exact.cuh"

struct SubBlockX { uint4 a[4]; float d; };

template <bool SPREAD> DEV SubBlockX load_sub_block_x(const void* row, int block, int t) {
  const u8* record = record_at<SPREAD>(row, block);
  const uint4* first = (const uint4*)(record + 32 * t);
  const uint4* second = (const uint4*)(record + spread<SPREAD>(128 + 32 * t));
  return {{first[0], first[1], second[0], second[1]}, *(const float*)(record + spread<SPREAD>(SCALE))};
}

DEV float sum_sub_blocks(float p, float q, float d) {
  float sum = p + q;
  sum += __shfl_xor_sync(FULL, sum, 2);
  sum += __shfl_xor_sync(FULL, sum, 1);
  return sum * d;
}

DEV int dot16(const uint4& w, const uint4& x, int sum) {
  sum = __dp4a((int)w.x, (int)x.x, sum);
  sum = __dp4a((int)w.y, (int)x.y, sum);
  sum = __dp4a((int)w.z, (int)x.z, sum);
  return __dp4a((int)w.w, (int)x.w, sum);
}

struct q8_0 {
  static constexpr bool INT8 = true;
  struct Piece { uint4 w[4]; u16 d[2]; bool has[2]; };
  typedef SubBlockX X;

  static __device__ __forceinline__ Piece load(const u8* main, const u8* side, int block, int t, int columns) {
    Piece k = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int j = 8 * block + t + 4 * half;
      k.has[half] = 32 * j < columns;
      if (!k.has[half]) continue;
      const uint4* w = (const uint4*)(main + 32 * j);
      k.w[2 * half] = w[0];
      k.w[2 * half + 1] = w[1];
      k.d[half] = ((const u16*)side)[j];
    }
    return k;
  }

  template <bool SPREAD = false> static __device__ __forceinline__ X load_x(const void* row, int block, int t, int) {
    return load_sub_block_x<SPREAD>(row, block, t);
  }

  static __device__ __forceinline__ float value(const Piece& k, const X& x, int) {
    int i = dot16(k.w[1], x.a[1], dot16(k.w[0], x.a[0], 0)), j = dot16(k.w[3], x.a[3], dot16(k.w[2], x.a[2], 0));
    float p = k.has[0] ? half_to_float(k.d[0]) * (float)i : 0.0f, q = k.has[1] ? half_to_float(k.d[1]) * (float)j : 0.0f;
    return sum_sub_blocks(p, q, x.d);
  }
};

struct mxfp4 {
  static constexpr bool INT8 = true;
  struct Piece { uint4 w[2]; u8 e[2]; bool has[2]; };
  typedef SubBlockX X;

  static __device__ __forceinline__ Piece load(const u8* main, const u8* side, int block, int t, int columns) {
    Piece k = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int j = 8 * block + t + 4 * half;
      k.has[half] = 32 * j < columns;
      if (!k.has[half]) continue;
      const uint4* w = (const uint4*)(main + 16 * j);
      k.w[half] = w[0];
      k.e[half] = side[j];
    }
    return k;
  }

  template <bool SPREAD = false> static __device__ __forceinline__ X load_x(const void* row, int block, int t, int) {
    return load_sub_block_x<SPREAD>(row, block, t);
  }

  // Four nibbles (the low 16 bits) as four doubled values: magnitudes and their negatives by byte permutation.
  static __device__ __forceinline__ u32 doubled(u32 nibbles) {
    u32 magnitude = nibbles & 0x7777u, negative = (nibbles >> 3) & 0x1111u;
    u32 plus = __byte_perm(0x03020100u, 0x0c080604u, magnitude), minus = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, magnitude);
    u32 mask = __byte_perm(0x0000ff00u, 0, negative);
    return (plus & ~mask) | (minus & mask);
  }

  // Bytes of two nibbles, weight i low and i + 16 high: two words of four weights each.
  static __device__ __forceinline__ void dot_word(u32 w, u32 xa, u32 xb, int& sum) {
    u32 front = doubled(w & 0xffffu), back = doubled(w >> 16);
    sum = __dp4a((int)__byte_perm(front, back, 0x6420), (int)xa, sum);
    sum = __dp4a((int)__byte_perm(front, back, 0x7531), (int)xb, sum);
  }

  static __device__ __forceinline__ int dot32(const uint4& w, const uint4& xa, const uint4& xb) {
    int sum = 0;
    dot_word(w.x, xa.x, xb.x, sum);
    dot_word(w.y, xa.y, xb.y, sum);
    dot_word(w.z, xa.z, xb.z, sum);
    dot_word(w.w, xa.w, xb.w, sum);
    return sum;
  }

  static __device__ __forceinline__ float power(u8 e) {  // 2^(e - 128), denormal for 0 and 1
    return __uint_as_float(e < 2 ? 0x00200000u << e : ((u32)e - 1u) << 23);
  }

  static __device__ __forceinline__ float value(const Piece& k, const X& x, int) {
    float p = k.has[0] ? power(k.e[0]) * (float)dot32(k.w[0], x.a[0], x.a[1]) : 0.0f;
    float q = k.has[1] ? power(k.e[1]) * (float)dot32(k.w[1], x.a[2], x.a[3]) : 0.0f;
    return sum_sub_blocks(p, q, x.d);
  }
};

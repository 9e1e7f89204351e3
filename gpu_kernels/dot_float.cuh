// Float weights times float32 activations. A block has 32 accumulators, element k in k mod 32; lane t of four
// holds 8 t to 8 t + 7, k ascending, then the halves are added 16, 8, 4, 2, 1 apart. Past the end of a row
// weights are zeros and are not read.
#pragma once
#include "exact.cuh"

struct FloatX { const float* x; };  // the lane's first element; there are too many to keep

template <class Weights> struct FloatFormat {
  static constexpr bool INT8 = false;
  struct Piece { const u8* w; int steps; };
  typedef FloatX X;

  static __device__ __forceinline__ Piece load(const u8* main, const u8*, int block, int t, int columns) {
    int left = columns - BLOCK * block;
    return {main + (BLOCK * block + 8 * t) * Weights::NBYTES, left < BLOCK ? left / 32 : 8};
  }

  template <bool SPREAD = false> static __device__ __forceinline__ X load_x(const void* row, int block, int t, int) {
    return {(const float*)row + BLOCK * block + 8 * t};
  }

  static __device__ __forceinline__ float value(const Piece& k, const X& x, int) {
    float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int step = 0; step < 8; step++) {
      float w[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (step < k.steps) Weights::load8(k.w + step * 32 * Weights::NBYTES, w);
      const float4* at = (const float4*)(x.x + 32 * step);
      float4 a = at[0], b = at[1];
      acc[0] = __fmaf_rn(w[0], a.x, acc[0]);
      acc[1] = __fmaf_rn(w[1], a.y, acc[1]);
      acc[2] = __fmaf_rn(w[2], a.z, acc[2]);
      acc[3] = __fmaf_rn(w[3], a.w, acc[3]);
      acc[4] = __fmaf_rn(w[4], b.x, acc[4]);
      acc[5] = __fmaf_rn(w[5], b.y, acc[5]);
      acc[6] = __fmaf_rn(w[6], b.z, acc[6]);
      acc[7] = __fmaf_rn(w[7], b.w, acc[7]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      acc[i] += __shfl_xor_sync(FULL, acc[i], 2);
      acc[i] += __shfl_xor_sync(FULL, acc[i], 1);
    }
    return ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]));
  }
};

DEV void split_word(u32 word, u16& low, u16& high) {
  low = (u16)(word & 0xffffu);
  high = (u16)(word >> 16);
}

struct F32Weights {
  static constexpr int NBYTES = 4;
  static __device__ __forceinline__ void load8(const u8* at, float w[8]) {
    float4 a = ((const float4*)at)[0], b = ((const float4*)at)[1];
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  }
};

template <class Widen> struct ShortWeights {
  static constexpr int NBYTES = 2;
  static __device__ __forceinline__ void load8(const u8* at, float w[8]) {
    uint4 words = *(const uint4*)at;
    u32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u16 low, high;
      split_word(four[i], low, high);
      w[2 * i] = Widen::widen(low);
      w[2 * i + 1] = Widen::widen(high);
    }
  }
};

struct WidenF16 { static __device__ __forceinline__ float widen(u16 bits) { return half_to_float(bits); } };
struct WidenBF16 { static __device__ __forceinline__ float widen(u16 bits) { return __uint_as_float((u32)bits << 16); } };

typedef FloatFormat<F32Weights> f32;
typedef FloatFormat<ShortWeights<WidenF16>> f16;
typedef FloatFormat<ShortWeights<WidenBF16>> bf16;

// Q6_K blocks (main plane 208 bytes: 128 of low nibbles, 64 of bit pairs, 16 scales; side plane: f16 d) times
// int8 records. Lane t of four has 16 weights of each quarter of the block's half t / 2. Integers are exact.
#pragma once
#include "exact.cuh"

struct q6_k {
  static constexpr bool INT8 = true;
  struct Piece { uint4 low, high, pairs, scales; u16 d; };
  struct X { uint4 a[4]; int sums[4]; float d; };

  static __device__ __forceinline__ Piece load(const u8* main, const u8* side, int block, int t, int) {
    const uint4* w = (const uint4*)(main + block * 208);
    int at = 4 * (t >> 1) + (t & 1), pairs = 8 + 2 * (t >> 1) + (t & 1);
    u16 d = ((const u16*)side)[block];
    return {w[at], w[at + 2], w[pairs], w[12], d};
  }

  template <bool SPREAD = false> static __device__ __forceinline__ X load_x(const void* row, int block, int t, int) {
    const u8* record = record_at<SPREAD>(row, block);
    const uint4* q = (const uint4*)(record + spread<SPREAD>(128 * (t >> 1)) + 16 * (t & 1));
    const i16* sums = (const i16*)(record + spread<SPREAD>(BS16)) + 8 * (t >> 1) + (t & 1);
    float d = *(const float*)(record + spread<SPREAD>(SCALE));
    return {{q[0], q[2], q[4], q[6]}, {sums[0], sums[2], sums[4], sums[6]}, d};
  }

  // Four weights of each quarter r: nibbles from low (r 0, 2 as lower and upper ones) and high (r 1, 3).
  static __device__ __forceinline__ void dot_word(u32 low, u32 high, u32 pairs, const u32 x[4], int dots[4]) {
    u32 q0 = (low & 0x0f0f0f0fu) | ((pairs << 4) & 0x30303030u);
    u32 q1 = (high & 0x0f0f0f0fu) | ((pairs << 2) & 0x30303030u);
    u32 q2 = ((low >> 4) & 0x0f0f0f0fu) | (pairs & 0x30303030u);
    u32 q3 = ((high >> 4) & 0x0f0f0f0fu) | ((pairs >> 2) & 0x30303030u);
    dots[0] = __dp4a((int)q0, (int)x[0], dots[0]);
    dots[1] = __dp4a((int)q1, (int)x[1], dots[1]);
    dots[2] = __dp4a((int)q2, (int)x[2], dots[2]);
    dots[3] = __dp4a((int)q3, (int)x[3], dots[3]);
  }

  static __device__ __forceinline__ float value(const Piece& k, const X& x, int t) {
    int dots[4] = {0, 0, 0, 0};
    const u32 x0[4] = {x.a[0].x, x.a[1].x, x.a[2].x, x.a[3].x}, x1[4] = {x.a[0].y, x.a[1].y, x.a[2].y, x.a[3].y};
    const u32 x2[4] = {x.a[0].z, x.a[1].z, x.a[2].z, x.a[3].z}, x3[4] = {x.a[0].w, x.a[1].w, x.a[2].w, x.a[3].w};
    dot_word(k.low.x, k.high.x, k.pairs.x, x0, dots);
    dot_word(k.low.y, k.high.y, k.pairs.y, x1, dots);
    dot_word(k.low.z, k.high.z, k.pairs.z, x2, dots);
    dot_word(k.low.w, k.high.w, k.pairs.w, x3, dots);
    // Scale of quarter r: byte 8 * (t / 2) + 2 * r + t % 2.
    u32 low = t < 2 ? k.scales.x : k.scales.z, high = t < 2 ? k.scales.y : k.scales.w;
    int shift = 8 * (t & 1), i = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int scale = (int)(i8)((r < 2 ? low : high) >> (16 * (r & 1) + shift));
      i += scale * (dots[r] - 32 * x.sums[r]);
    }
    i += __shfl_xor_sync(FULL, i, 1);
    i += __shfl_xor_sync(FULL, i, 2);
    return (half_to_float(k.d) * x.d) * (float)i;
  }
};

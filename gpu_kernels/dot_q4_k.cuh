// Q4_K blocks (144 bytes: d, dmin, 12 scale bytes, 128 bytes of nibbles) times int8 records.
// Four lanes share a block: lane t has the sub-blocks 2 t and 2 t + 1. Integers are exact in any order.
#pragma once
#include "exact.cuh"

struct q4_k {
  static constexpr bool INT8 = true;
  struct Piece { uint4 head, low, high; };
  struct X { uint4 a[4]; int sums; float d; };

  static __device__ __forceinline__ Piece load(const u8* main, const u8*, int block, int t, int) {
    const uint4* w = (const uint4*)(main + block * 144);
    return {w[0], w[1 + 2 * t], w[2 + 2 * t]};
  }

  template <bool SPREAD = false> static __device__ __forceinline__ X load_x(const void* row, int block, int t, int) {
    const u8* record = record_at<SPREAD>(row, block);
    const uint4* q = (const uint4*)(record + spread<SPREAD>(64 * t));
    int sums = *(const int*)(record + spread<SPREAD>(BS32) + 4 * t);
    return {{q[0], q[1], q[2], q[3]}, sums, *(const float*)(record + spread<SPREAD>(SCALE))};
  }

  // sc (low byte, next byte) and m of the two sub-blocks of lane t, from the twelve packed bytes.
  static __device__ __forceinline__ void scales(const uint4& head, int t, u32& sc, u32& m) {
    int shift = 16 * (t & 1);
    u32 a = (head.y >> shift) & 0xffffu, b = (head.z >> shift) & 0xffffu, c = (head.w >> shift) & 0xffffu;
    sc = t < 2 ? a & 0x3f3fu : (c & 0x0f0fu) | ((a >> 2) & 0x3030u);
    m = t < 2 ? b & 0x3f3fu : ((c >> 4) & 0x0f0fu) | ((b >> 2) & 0x3030u);
  }

  static __device__ __forceinline__ void dot_word(u32 w, u32 xa, u32 xb, int& a, int& b) {
    a = __dp4a((int)(w & 0x0f0f0f0fu), (int)xa, a);
    b = __dp4a((int)((w >> 4) & 0x0f0f0f0fu), (int)xb, b);
  }

  static __device__ __forceinline__ float value(const Piece& k, const X& x, int t) {
    u32 sc, m;
    scales(k.head, t, sc, m);
    int a = 0, b = 0;
    dot_word(k.low.x, x.a[0].x, x.a[2].x, a, b);
    dot_word(k.low.y, x.a[0].y, x.a[2].y, a, b);
    dot_word(k.low.z, x.a[0].z, x.a[2].z, a, b);
    dot_word(k.low.w, x.a[0].w, x.a[2].w, a, b);
    dot_word(k.high.x, x.a[1].x, x.a[3].x, a, b);
    dot_word(k.high.y, x.a[1].y, x.a[3].y, a, b);
    dot_word(k.high.z, x.a[1].z, x.a[3].z, a, b);
    dot_word(k.high.w, x.a[1].w, x.a[3].w, a, b);
    int i1 = (int)(sc & 255u) * a + (int)(sc >> 8) * b;
    int i2 = (int)(m & 255u) * (int)(i16)(x.sums & 0xffff) + (int)(m >> 8) * (x.sums >> 16);
    i1 += __shfl_xor_sync(FULL, i1, 1);
    i2 += __shfl_xor_sync(FULL, i2, 1);
    i1 += __shfl_xor_sync(FULL, i1, 2);
    i2 += __shfl_xor_sync(FULL, i2, 2);
    float d = half_to_float((u16)(k.head.x & 0xffffu)), dmin = half_to_float((u16)(k.head.x >> 16));
    float offset = (dmin * x.d) * (float)i2;
    return __fmaf_rn(d * x.d, (float)i1, -offset);
  }
};

// Float arithmetic in the written order of docs/numerics.md: exp, the gates, activation records, NaN.
// Compiled without contraction and without flush-to-zero; only the fma that are written are fused.
#pragma once
#include "ptx.cuh"
#include "words.cuh"

#define FULL 0xffffffffu
constexpr int BLOCK = 256, RECORD = 320, SPREAD_RECORD = 352, BS32 = 256, BS16 = 272, SCALE = 304, BAD = 308;
constexpr u32 NAN_BITS = 0x7fc00000u, INFINITY_BITS = 0x7f800000u, TINY_BITS = 27u << 23;
enum GateKind { SILU_GLU, GELU_TANH_GLU, SILU_GLU_CLAMPED, SWIGLU_OAI, RELU2 };
enum Element { ELEMENT_F32, ELEMENT_F16, ELEMENT_BF16 };

DEV float canonical_nan() { return __uint_as_float(NAN_BITS); }

DEV float our_exp(float x) {
  x = x > -87.0f ? x : -87.0f;
  x = x < 88.0f ? x : 88.0f;
  float n = rintf(x * 1.44269504088896341f);
  float r = __fmaf_rn(n, 2.12194440e-4f, __fmaf_rn(n, -0.693359375f, x));
  float p = __fmaf_rn(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fmaf_rn(p, r * r, r) + 1.0f;
  return p * __uint_as_float((u32)((int)n + 127) << 23);
}

DEV float over_one_plus_exp(float g, float negated) { return g / (1.0f + our_exp(negated)); }

DEV float clamp_low(float x, float low) { return x < low ? low : x; }    // a NaN stays
DEV float clamp_high(float x, float high) { return x > high ? high : x; }

DEV float activate(int kind, float alpha, float limit, float g, float u) {
  if (kind == RELU2) {
    float r = clamp_low(u, 0.0f);
    return r * r;
  }
  if (kind == SILU_GLU_CLAMPED || kind == SWIGLU_OAI) {
    g = clamp_high(g, limit);
    u = clamp_high(clamp_low(u, -limit), limit);
  }
  if (kind == SWIGLU_OAI) return (u + 1.0f) * over_one_plus_exp(g, -(alpha * g));
  float z = g;
  if (kind == GELU_TANH_GLU) z = g * __fmaf_rn(0.0713548162726f, g * g, 1.5957691216057308f);
  return over_one_plus_exp(g, -z) * u;
}

DEV bool not_finite(const float v[8]) {
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 8; i++) bad |= (__float_as_uint(v[i]) & 0x7fffffffu) >= INFINITY_BITS;
  return bad;
}

DEV void store8(float* at, const float v[8]) {
  ((float4*)at)[0] = make_float4(v[0], v[1], v[2], v[3]);
  ((float4*)at)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// Where a byte of a record is. In shared memory sixteen bytes are left free behind each 128, so that the lanes that
// read a piece each meet in no bank.
template <bool SPREAD> DEV int spread(int at) { return SPREAD ? at + at / 128 * 16 : at; }
template <bool SPREAD> DEV const u8* record_at(const void* row, int block) {
  return (const u8*)row + block * (SPREAD ? SPREAD_RECORD : RECORD);
}

// One warp turns 256 floats, eight in each lane, into a 320-byte record. Whether one of them was not finite. Where `told` is
// given, each lane leaves there all that the record follows from, in one store: its eight elements, scale and `mark`.
template <bool SPREAD = false>
DEV bool write_record(const float v[8], u8* record, int lane, uint4* told = nullptr, u32 mark = 0) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
  for (int half = 16; half; half >>= 1) largest = max(largest, __shfl_xor_sync(FULL, largest, half));
  bool bad = largest >= INFINITY_BITS, dead = bad || largest < TINY_BITS;
  float amax = dead ? 1.0f : __uint_as_float(largest);
  float inverse = 127.0f / amax;
  int sum = 0;
  u32 packed[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int q = dead ? 0 : (int)rintf(v[i] * inverse);
    sum += q;
    packed[i >> 2] |= (u32)(q & 255) << (8 * (i & 3));
  }
  if (told) store16(told + lane, make_uint4(packed[0], packed[1], bad ? TOLD_BAD : dead ? 0u : __float_as_uint(amax / 127.0f), mark));
  if (!record) return bad;
  *(uint2*)(record + spread<SPREAD>(8 * lane)) = make_uint2(packed[0], packed[1]);
  sum += __shfl_xor_sync(FULL, sum, 1);
  if ((lane & 1) == 0) ((i16*)(record + spread<SPREAD>(BS16)))[lane >> 1] = (i16)sum;
  sum += __shfl_xor_sync(FULL, sum, 2);
  if ((lane & 3) == 0) ((i16*)(record + spread<SPREAD>(BS32)))[lane >> 2] = (i16)sum;
  if (lane == 0) *(float*)(record + spread<SPREAD>(SCALE)) = dead ? 0.0f : amax / 127.0f;
  if (lane == 1) *(u32*)(record + spread<SPREAD>(BAD)) = bad;
  if (lane == 2) *(uint2*)(record + spread<SPREAD>(BAD) + 4) = make_uint2(0, 0);
  return bad;
}

DEV u16 float_to_bf16(float y) {
  u32 bits = __float_as_uint(y);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// One result, NaN made canonical, in the caller's element type.
DEV void store_element(void* row, int element, int column, float y) {
  bool nan = (__float_as_uint(y) & 0x7fffffffu) > INFINITY_BITS;
  if (element == ELEMENT_F32)
    ((u32*)row)[column] = nan ? NAN_BITS : __float_as_uint(y);
  else if (element == ELEMENT_F16)
    ((u16*)row)[column] = nan ? (u16)0x7e00 : float_to_half(y);
  else
    ((u16*)row)[column] = nan ? (u16)0x7fc0 : float_to_bf16(y);
}

DEV float load_element(const void* row, int element, int column) {
  if (element == ELEMENT_F32) return __ldcg((const float*)row + column);
  u16 bits = __ldcg((const u16*)row + column);
  return element == ELEMENT_F16 ? half_to_float(bits) : __uint_as_float((u32)bits << 16);
}

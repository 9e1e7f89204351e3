// Eight elements of a caller's row, whatever its type; past its end they are zeros. Not from L1: a kernel that started early
// may find there what an earlier step has read.
#pragma once
#include "exact.cuh"
#include "words.cuh"

DEV void load8(const Step& step, const u8* x, int first, int hidden, float v[8]) {
  int nbytes = step.x_element == ELEMENT_F32 ? 4 : 2;
  const u8* at = x + (i64)first * nbytes;
  bool vectors = first + 8 <= hidden && ((u64)at & 15) == 0;
  if (vectors && step.x_element == ELEMENT_F32) {
    float4 a = __ldcg((const float4*)at), b = __ldcg((const float4*)at + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    return;
  }
  if (vectors) {
    uint4 words = __ldcg((const uint4*)at);
    u32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u16 bits = (u16)(four[i / 2] >> (16 * (i & 1)));
      v[i] = step.x_element == ELEMENT_F16 ? half_to_float(bits) : __uint_as_float((u32)bits << 16);
    }
    return;
  }
  for (int i = 0; i < 8; i++) v[i] = first + i < hidden ? load_element(x, step.x_element, first + i) : 0.0f;
}

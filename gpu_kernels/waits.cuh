// Waiting inside a kernel, and saying that a step failed. No wait outlives the abort word.
#pragma once
#include "exact.cuh"
#include "words.cuh"

DEV void fail(const Step& step, u32 clock, int error) {
  step.state->failed = clock;
  if (step.error) *(volatile u32*)(step.error + error) = clock;
}

// One warp: until `count` words, `stride` apart, that thread blocks write have the value, or `gives_up`.
template <class GivesUp>
DEV void wait_for_blocks(const u32* words, int count, int stride, u32 value, const GivesUp& gives_up) {
  int lane = threadIdx.x % 32;
  for (int first = 0; first < count; first += 32) {
    bool mine = first + lane < count;
    while (!__all_sync(FULL, !mine || load_acquire_gpu(words + (i64)(first + lane) * stride) == value)) {
      if (gives_up()) return;
      rest();
    }
  }
}

// The same for blocks that certainly write.
DEV void wait_for_blocks(const u32* words, int count, int stride, u32 value) {
  wait_for_blocks(words, count, stride, value, [] { return false; });
}

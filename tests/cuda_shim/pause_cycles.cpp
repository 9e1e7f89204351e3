// The pausing kernel as a shared library for ctypes; a cycle is a nanosecond.
#include <chrono>

#include "cuda_shim.h"

static long long clock64() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#include "pause.cu"

extern "C" int run_pause_cycles(u32, u32, u32, long long cycles) {
  pause_cycles(cycles);  // one thread, which is no warp
  return 0;
}

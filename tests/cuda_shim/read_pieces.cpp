// The reading kernel as a shared library for ctypes.
#include "cuda_shim.h"

#include "read_pieces.cu"

static __attribute__((section("shim_shared"), used)) int has_a_section;  // the kernel has no shared variables

extern "C" int run_read_pieces(u32 x, u32 y, u32 threads, const unsigned long long* pieces, unsigned long long nbytes,
                               int blocks, unsigned* sums) {
  return shim::launch(x, y, threads, [=] { read_pieces(pieces, nbytes, blocks, sums); });
}

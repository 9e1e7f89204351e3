// Reads pieces of pinned host memory over the link and does nothing else: the curve that reads in place are held
// against. A program of its own; no step launches it.

// `blocks` blocks read each piece of `nbytes` bytes, a multiple of 16, four loads of a thread in flight. Each thread
// leaves the exclusive or of its words in `sums`, so that no load can be left out and the host can check the bytes.
extern "C" __global__ void read_pieces(const unsigned long long* pieces, unsigned long long nbytes, int blocks,
                                       unsigned* sums) {
  const uint4* from = reinterpret_cast<const uint4*>(pieces[blockIdx.x / blocks]);
  const unsigned long long count = nbytes / 16, step = 1ull * blocks * blockDim.x;
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (unsigned long long i = (blockIdx.x % blocks) * blockDim.x + threadIdx.x; i < count; i += 4 * step) {
    uint4 part[4];
#pragma unroll
    for (int k = 0; k < 4; k++) part[k] = i + k * step < count ? from[i + k * step] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 4; k++) sum.x ^= part[k].x, sum.y ^= part[k].y, sum.z ^= part[k].z, sum.w ^= part[k].w;
  }
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum.x ^ sum.y ^ sum.z ^ sum.w;
}

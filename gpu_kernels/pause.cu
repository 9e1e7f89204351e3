// A pause between layers, for measurements: what the rest of a model takes, in which link and host have nothing to do. A
// program of its own; no step launches it.

// One thread: so many cycles of its multiprocessor.
extern "C" __global__ void pause_cycles(long long cycles) {
  for (long long begin = clock64(); clock64() - begin < cycles;) {
  }
}

// CUDA on a processor, for tests: enough of the language that the product's .cu files compile as C++ and run with
// the bits of a GPU. The threads of a block are fibers, switched at barriers and warp operations only. Blocks start
// in the order of their index, a few at a time; when one cannot move it gives way to the next, and its shared
// variables (a section of this library) are put aside. When none can move it is an error, not a hang. Only full
// warps and full masks: whatever else a kernel does is refused.
//
// Kernels run one after the other, or as a chain, in which each may start when the one before lets it (programmatic
// launches): blocks of several kernels take turns at random then, each for a random while, and a host of the test's is
// asked in between. All memory is seen at once by all, so what fences are for is not tested.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
// Not in templates: GCC ignores the section there.
#define __shared__ static __attribute__((section("shim_shared")))
#define __launch_bounds__(...)
#define __grid_constant__
#define DEV static inline
#define DYNAMIC_SHARED(name) u8* name = shim::block->dynamic_shared

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern "C" char __start_shim_shared[], __stop_shim_shared[];

namespace shim {
struct Index { u32 x, y, z; };
constexpr int MAX_THREADS = 512, STACK = 64 << 10, SHARED = 100 << 10, WINDOW = 40, MAX_GRIDS = 64;
constexpr int PATIENCE = 200;  // rounds
enum Wait { NOTHING, FOR_WARP, FOR_BLOCK, FOR_OTHERS, FINISHED };

struct Fiber {
  jmp_buf state;
  char* stack;
  Index index;
  Wait wait;
  u64 operations, generation;
};

struct Warp { u64 values[2][32], arrived; };

struct Grid {
  void (*body)(const void*);
  const void* argument;
  Index block_dim, grid_dim;
  int num_threads;
  u32 total, next, ended, letting;  // blocks: all, started, ended, and those that let the next kernel start
  bool is_over() const { return ended == total; }
  bool lets_next() const { return next == total && letting == total; }
};

struct Block {
  Grid* grid;
  const Grid* earlier;  // the kernel before, in a chain
  bool lets;
  Fiber fibers[MAX_THREADS];
  Warp warps[MAX_THREADS / 32];
  Index index;
  u64 generation;
  int at_barrier, finished;
  bool running;
  char* shared;  // its shared variables while another block runs
  alignas(256) u8 dynamic_shared[SHARED];
};

static Block* blocks[WINDOW];
static Block* block;  // the one whose shared variables are in place
static Fiber* self;
static jmp_buf scheduler;
static u64 moves;
static Grid chain[MAX_GRIDS];
static int chained;
static bool is_chaining;

static inline void yield(Wait wait) {
  self->wait = wait;
  if (!_setjmp(self->state)) _longjmp(scheduler, 1);
}

static void open_barrier_if_full() {
  if (block->at_barrier + block->finished < block->grid->num_threads || block->at_barrier == 0) return;
  block->at_barrier = 0;
  block->generation++;
}

static void block_barrier() {
  self->generation = block->generation;
  block->at_barrier++, moves++;
  open_barrier_if_full();
  while (self->generation == block->generation) yield(FOR_BLOCK);
}

// Every lane's value, once all 32 have come. Two buffers are enough: nobody is two operations ahead.
static u64* exchange(u32 mask, u64 value) {
  if (mask != 0xffffffffu) { fprintf(stderr, "shim: a partial warp mask\n"); abort(); }
  Warp& warp = block->warps[self->index.x / 32];
  u64 operation = self->operations++;
  u64* values = warp.values[operation & 1];
  values[self->index.x % 32] = value;
  warp.arrived++, moves++;
  while (warp.arrived < 32 * (operation + 1)) yield(FOR_WARP);
  return values;
}

static inline bool can_run(const Fiber& fiber) {
  if (fiber.wait == FOR_WARP) return block->warps[fiber.index.x / 32].arrived >= 32 * fiber.operations;
  if (fiber.wait == FOR_BLOCK) return fiber.generation != block->generation;
  return fiber.wait == NOTHING;
}

static void fiber_main() {
  for (;;) {
    block->grid->body(block->grid->argument);
    block->finished++, moves++;
    open_barrier_if_full();
    yield(FINISHED);
  }
}

static void resume(Fiber& fiber) {
  self = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.stack) _longjmp(fiber.state, 1);
  static ucontext_t context, back;
  getcontext(&context);
  fiber.stack = (char*)malloc(STACK);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  swapcontext(&back, &context);
}

static void let_next(Block& b) {
  if (!b.lets) b.grid->letting++;
  b.lets = true;
}

static void start(Block& b, Grid& grid, const Grid* earlier) {
  u32 at = grid.next++;
  b.grid = &grid, b.earlier = earlier, b.lets = false, b.index = {at % grid.grid_dim.x, at / grid.grid_dim.x, 0};
  b.generation = 0, b.at_barrier = b.finished = 0, b.running = true;
  memset(b.dynamic_shared, 0xff, sizeof b.dynamic_shared);
  memset(b.shared, 0xff, __stop_shim_shared - __start_shim_shared);
  for (int i = 0; i < grid.num_threads; i++) {
    b.fibers[i].index = {(u32)i, 0, 0}, b.fibers[i].wait = NOTHING, b.fibers[i].operations = 0;
    b.warps[i / 32].arrived = 0;
  }
}

// Until the block is done or only waits for others, or fibers have been resumed `budget` times.
static void run(Block& b, i64 budget) {
  block = &b;
  int num_threads = b.grid->num_threads;
  for (int i = 0; i < num_threads; i++)
    if (b.fibers[i].wait == FOR_OTHERS) b.fibers[i].wait = NOTHING;
  memcpy(__start_shim_shared, b.shared, __stop_shim_shared - __start_shim_shared);
  for (u64 before = moves - 1; before != moves && b.finished < num_threads && budget > 0;) {
    before = moves;
    for (int first = 0; first < num_threads; first += 32) {
      u64 seen;
      do {
        seen = moves;
        for (int i = first; i < first + 32 && budget > 0; i++)
          if (can_run(b.fibers[i])) resume(b.fibers[i]), budget--;
      } while (moves != seen && budget > 0);
    }
  }
  if (b.finished == num_threads) {
    b.running = false, b.grid->ended++, moves++;
    let_next(b);
  }
  memcpy(b.shared, __start_shim_shared, __stop_shim_shared - __start_shim_shared);
}

static Block* make_block() {
  Block* b = (Block*)aligned_alloc(256, (sizeof(Block) + 255) / 256 * 256);
  memset(b, 0, sizeof(Block));
  b->shared = (char*)malloc(__stop_shim_shared - __start_shim_shared + 1);
  return b;
}

static void forget(Block*& b) {
  for (auto& fiber : b->fibers) free(fiber.stack);
  free(b->shared);
  free(b);
  b = nullptr;
}

// Blocks of these kernels that may start, as far as there is room; each kernel once the one before lets it.
static void start_blocks(Grid* grids, int num_grids, int window) {
  int place = 0;
  for (int g = 0; g < num_grids; g++) {
    if (g > 0 && !grids[g - 1].lets_next()) return;
    for (; grids[g].next < grids[g].total; place++) {
      if (place == window) return;
      Block*& b = blocks[place];
      if (!b) b = make_block();
      if (!b->running) start(*b, grids[g], g > 0 ? &grids[g - 1] : nullptr), moves++;
    }
  }
}

static int stuck_block() {
  u32 stuck = ~0u;
  for (auto& b : blocks) {
    if (!b) continue;
    u32 at = b->index.y * b->grid->grid_dim.x + b->index.x;
    if (b->running && at < stuck) stuck = at;
    forget(b);
  }
  return (int)stuck + 1;
}

// A kernel's blocks in turn; the linear index plus one of the first that got stuck, or 0.
static int run_alone(Grid& grid) {
  for (int idle = 0; !grid.is_over();) {
    u32 ended = grid.ended, started = grid.next;
    start_blocks(&grid, 1, 24);
    for (auto& b : blocks)
      if (b && b->running) run(*b, 1ll << 60);
    idle = grid.ended == ended && grid.next == started ? idle + 1 : 0;
    if (idle > PATIENCE) return stuck_block();
  }
  return 0;
}

static u64 draw(u64& seed, u64 below) {  // xorshift
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return seed % below;
}

// The kernels of the chain, overlapping, with `window` blocks at most at a time; `host` is called in between.
static int run_chain(u64 seed, int window, void (*host)()) {
  int result = 0, left = chained;
  for (i64 idle = 0; left && !result;) {
    u64 before = moves;
    start_blocks(chain, chained, window);
    int running[WINDOW], count = 0;
    for (int i = 0; i < WINDOW; i++)
      if (blocks[i] && blocks[i]->running) running[count++] = i;
    if (!count) return -2;
    Block& b = *blocks[running[draw(seed, (u64)count)]];
    run(b, draw(seed, 3) ? 1ll << 60 : (i64)(1 + draw(seed, 2ull * (u64)b.grid->num_threads)));
    if (draw(seed, 8) == 0) host();
    idle = moves == before ? idle + 1 : 0;
    if (idle > 400 * PATIENCE) result = stuck_block();
    left = 0;
    for (int g = 0; g < chained; g++) left += !chain[g].is_over();
  }
  for (int g = 0; g < chained; g++) free((void*)chain[g].argument);
  chained = 0;
  return result;
}

// Run a kernel, or add it to the chain.
template <class F> static int launch(u32 grid_x, u32 grid_y, u32 threads, const F& kernel) {
  if (threads % 32 || threads > MAX_THREADS || chained == MAX_GRIDS) return -1;
  Grid grid = {[](const void* f) { (*(const F*)f)(); }, &kernel, {threads, 1, 1}, {grid_x, grid_y, 1}, (int)threads,
               grid_x * grid_y, 0, 0, 0};
  if (!is_chaining) return run_alone(grid);
  F* kept = (F*)malloc(sizeof(F));
  memcpy((void*)kept, (const void*)&kernel, sizeof(F));
  grid.argument = kept;
  chain[chained++] = grid;
  return 0;
}
}  // namespace shim

#define threadIdx (shim::self->index)
#define blockIdx (shim::block->index)
#define blockDim (shim::block->grid->block_dim)
#define gridDim (shim::block->grid->grid_dim)

// ------------------------------------------------------------------------------------------ arithmetic
template <class To, class From> static inline To same_bits(From from) {
  static_assert(sizeof(To) <= sizeof(u64) && sizeof(From) <= sizeof(u64), "");
  To to{};
  memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}
static inline float __uint_as_float(u32 bits) { return same_bits<float>(bits); }
static inline u32 __float_as_uint(float value) { return same_bits<u32>(value); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
static inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

static inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += (int)(i8)((u32)a >> (8 * i)) * (int)(i8)((u32)b >> (8 * i));
  return sum;
}

static inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  u64 bytes = ((u64)high << 32) | low;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    u32 pick = (selector >> (4 * i)) & 15;
    u8 byte = (u8)(bytes >> (8 * (pick & 7)));
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= (u32)byte << (8 * i);
  }
  return out;
}

static inline float half_to_float(u16 bits) {
  u32 sign = (u32)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)mantissa * 0x1p-24f));
  return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline u16 float_to_half(float value) {  // rounded to nearest even; no NaN comes here
  u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  u16 sign = (u16)((bits >> 16) & 0x8000);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;
  if (magnitude < 0x38800000u) return sign | (u16)(__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
  return sign | (u16)((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}

// ------------------------------------------------------------------------------- memory, threads, warps
template <class T> static inline T __ldcs(const T* at) { return *at; }
template <class T> static inline T __ldcg(const T* at) { return *at; }
static inline u32 load_acquire_gpu(const u32* word) { return *(const volatile u32*)word; }
static inline u32 load_acquire_system(const u32* word) { return *(const volatile u32*)word; }
static inline void store16(volatile uint4* at, const uint4& v) { memcpy((void*)at, &v, 16); }
static inline uint4 load16(const void* at) { uint4 v; memcpy(&v, at, 16); return v; }
static inline void store_release_gpu(u32* word, u32 value) { *(volatile u32*)word = value; }
static inline void store_release_system(u32* word, u32 value) { *(volatile u32*)word = value; }
static inline void __threadfence() {}
static inline void __threadfence_system() {}
static inline void copy16(void* shared, const void* from) { memcpy(shared, from, 16); }
static inline void copies_sent() {}
template <int LATER> static inline void copies_done() {}
constexpr bool STARTS_EARLY = true;  // what such kernels do is run, also one after the other
static inline void wait_for_earlier() {
  while (shim::block->earlier && !shim::block->earlier->is_over()) shim::yield(shim::FOR_OTHERS);
}
static inline void let_next_start() { shim::let_next(*shim::block); }
static inline void rest() { shim::yield(shim::FOR_OTHERS); }
static inline u32 atomicAdd(u32* at, u32 value) { u32 old = *at; *at += value; return old; }
static inline u64 atomicOr(u64* at, u64 value) { u64 old = *at; *at |= value; return old; }

static inline void __syncthreads() { shim::block_barrier(); }
static inline void __syncwarp() { shim::exchange(0xffffffffu, 0); }

template <class T> static inline T __shfl_sync(u32 mask, T value, int lane) {
  return same_bits<T>(shim::exchange(mask, same_bits<u64>(value))[lane & 31]);
}
template <class T> static inline T __shfl_xor_sync(u32 mask, T value, int lanes) {
  int lane = (int)(threadIdx.x % 32);
  return same_bits<T>(shim::exchange(mask, same_bits<u64>(value))[lane ^ lanes]);
}
template <class T> static inline T __shfl_up_sync(u32 mask, T value, int lanes) {
  int lane = (int)(threadIdx.x % 32);
  return same_bits<T>(shim::exchange(mask, same_bits<u64>(value))[lane >= lanes ? lane - lanes : lane]);
}
static inline u32 __ballot_sync(u32 mask, bool value) {
  u64* values = shim::exchange(mask, value);
  u32 ballot = 0;
  for (int i = 0; i < 32; i++) ballot |= (u32)(values[i] != 0) << i;
  return ballot;
}
static inline int __any_sync(u32 mask, bool value) { return __ballot_sync(mask, value) != 0; }
static inline int __all_sync(u32 mask, bool value) { return __ballot_sync(mask, value) == mask; }
static inline u32 __match_any_sync(u32 mask, int value) {
  u64* values = shim::exchange(mask, same_bits<u64>(value));
  u32 peers = 0;
  for (int i = 0; i < 32; i++) peers |= (u32)(same_bits<int>(values[i]) == value) << i;
  return peers;
}

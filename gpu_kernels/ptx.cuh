// What needs machine instructions by name: memory order, half precision. The only file with inline PTX.
// Outside of CUDA's compiler the same names come from whoever includes these files (the tests' C++ shim).
#pragma once
#ifdef __CUDACC__
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;

#if __CUDA_ARCH__ >= 900
constexpr bool STARTS_EARLY = true;  // whether a kernel may start while the one before it still runs
#else
constexpr bool STARTS_EARLY = false;
#endif

#define DEV static __device__ __forceinline__
// Aligned as lines of memory are: a copy whose two ends are not aligned alike takes twice the requests, and reads of host
// memory half the rate.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

DEV float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

DEV u16 float_to_half(float value) {  // rounded to nearest even
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

DEV u32 load_acquire_gpu(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

DEV u32 load_acquire_system(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

DEV uint4 load16(const void* at) {  // in one piece, and not from a cache
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

DEV void store16(volatile uint4* at, const uint4& v) {  // in one piece
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEV void store_release_gpu(u32* word, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

DEV void store_release_system(u32* word, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// 16 bytes from global to shared memory, without registers where the architecture can; settled by copies_done.
DEV void copy16(void* shared, const void* from) {
#if __CUDA_ARCH__ >= 800
  u32 to = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  *(uint4*)shared = __ldcs((const uint4*)from);
#endif
}

DEV void copies_sent() {  // ends a group of copies
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int LATER> DEV void copies_done() {  // this thread's groups but the last LATER
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}

// In a kernel that started early: nothing of what came before may be relied on until this returns; at once where kernels
// do not overlap.
DEV void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEV void let_next_start() {  // once every block has said so, or has ended
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEV void rest() { __nanosleep(20); }  // between two looks at a word
#endif

// The part of CUDA that our kernels use.
#pragma once
#include "threads.h"

#define __device__
#define __global__
#define __align__(n) __attribute__((aligned(n)))
// Static, because one block runs at a time; in its own section, which is filled with NaN before each block.
#define __shared__ static __attribute__((section("block_memory")))

#define threadIdx kernel_thread
#define blockIdx kernel_block
#define blockDim kernel_block_size
#define gridDim kernel_blocks

using __nv_bfloat16 = BFloat16;
using __half = Float16;
struct alignas(4) __half2 { __half x, y; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __low2float(__half2 pair) { return float(pair.x); }
inline float __high2float(__half2 pair) { return float(pair.y); }
inline __half __float2half(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline __half __ushort_as_half(uint16_t bits) { return bits_as<__half>(bits); }
inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
inline float __int_as_float(uint32_t bits) { return bits_as<float>(bits); }

extern "C" {
float exp2f(float), fmaf(float, float, float), expf(float), sqrtf(float), fabsf(float), rintf(float), fmaxf(float, float), fminf(float, float);
void sincosf(float, float*, float*);
}
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

template <typename X> inline X __ldg(const X* x) { return *x; }
template <typename X> inline X __ldcg(const X* x) { return *x; }
template <typename X> inline X __ldcs(const X* x) { return *x; }

// Bytes 0 to 3 are those of x, 4 to 7 those of y.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selected) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) out |= uint32_t(both >> (selected >> (4 * i) & 7) * 8 & 255) << (8 * i);
  return out;
}

inline int atomicAdd(int* at, int x) {
  const int before = *at;
  *at += x;
  return before;
}
inline void __threadfence() {}

// All lanes take part, whatever the mask.
inline void __syncthreads(int line = __builtin_LINE()) { kernel_barrier("__syncthreads", line); }
inline void __syncwarp(unsigned = ~0u, int line = __builtin_LINE()) { exchange(0, "__syncwarp", line); }
template <typename X> inline X __shfl_sync(unsigned, X x, int from, int line = __builtin_LINE()) {
  return lane_value<X>(exchange(x, "__shfl_sync", line)[from & 31]);
}
template <typename X> inline X __shfl_xor_sync(unsigned, X x, int other, int line = __builtin_LINE()) {
  return lane_value<X>(exchange(x, "__shfl_xor_sync", line)[(kernel_thread.x ^ other) & 31]);
}
inline bool __any_sync(unsigned, bool x, int line = __builtin_LINE()) {
  const uint64_t* all = exchange(x, "__any_sync", line);
  bool any = false;
  for (int lane = 0; lane < 32; lane++) any |= all[lane] != 0;
  return any;
}
inline int __reduce_max_sync(unsigned, int x, int line = __builtin_LINE()) {
  const uint64_t* all = exchange(x, "__reduce_max_sync", line);
  for (int lane = 0; lane < 32; lane++) x = max(x, lane_value<int>(all[lane]));
  return x;
}
inline int __reduce_min_sync(unsigned, int x, int line = __builtin_LINE()) {
  const uint64_t* all = exchange(x, "__reduce_min_sync", line);
  for (int lane = 0; lane < 32; lane++) x = min(x, lane_value<int>(all[lane]));
  return x;
}

// Replaces mma.cu, which is written in PTX. What is copied may be there at once, or not before it is waited for.
struct Copies {
  static const int MOST = 256;
  void* to[MOST];
  const void* from[MOST];
  int group[MOST], count, groups;
};
inline Copies& own_copies() {
  static Copies all[1024];
  return all[kernel_thread.x];
}
inline void copy_ahead(void* to, const void* from) {
  static uint32_t random = 1;
  random = random * 1664525 + 1013904223;
  if (random >> 31) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    return;
  }
  Copies& own = own_copies();
  if (own.count == Copies::MOST) __builtin_trap();
  own.to[own.count] = to;
  own.from[own.count] = from;
  own.group[own.count++] = own.groups;
}
inline void end_copies() { own_copies().groups++; }
template <int LEFT> inline void wait_for_copies() {
  Copies& own = own_copies();
  int left = 0;
  for (int i = 0; i < own.count; i++) {
    if (own.group[i] < own.groups - LEFT) {
      *static_cast<uint4*>(own.to[i]) = *static_cast<const uint4*>(own.from[i]);
    } else {
      own.to[left] = own.to[i];
      own.from[left] = own.from[i];
      own.group[left++] = own.group[i];
    }
  }
  own.count = left;
}
template <typename X> inline void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);
template <> inline void mma<__nv_bfloat16>(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  kernel_mma(c, a, b0, b1, true);
}
template <> inline void mma<__half>(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  kernel_mma(c, a, b0, b1, false);
}
// The 16 bytes of which each lane gives the address are a row of 8 numbers, eight lanes' rows a matrix.
inline uint16_t matrix_number(const uint64_t* rows, int matrix, int row, int column) {
  const uint4 numbers = *lane_value<const uint4*>(rows[matrix * 8 + row]);
  return reinterpret_cast<const uint16_t*>(&numbers)[column];
}
inline void load_matrices(uint32_t* to, const void* row, int line = __builtin_LINE()) {
  const uint64_t* rows = exchange(row, "load_matrices", line);
  const int g = kernel_thread.x / 4 % 8, t = kernel_thread.x % 4;
  for (int m = 0; m < 4; m++)
    to[m] = matrix_number(rows, m, g, 2 * t) | uint32_t(matrix_number(rows, m, g, 2 * t + 1)) << 16;
}
inline void load_transposed(uint32_t* to, const void* row, int line = __builtin_LINE()) {
  const uint64_t* rows = exchange(row, "load_transposed", line);
  const int g = kernel_thread.x / 4 % 8, t = kernel_thread.x % 4;
  for (int m = 0; m < 4; m++)
    to[m] = matrix_number(rows, m, 2 * t, g) | uint32_t(matrix_number(rows, m, 2 * t + 1, g)) << 16;
}
inline float exp2_approx(float x) { return exp2f(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
template <typename X> inline uint32_t pack(float x, float y) { return X(x).bits | uint32_t(X(y).bits) << 16; }

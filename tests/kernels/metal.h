// The part of Metal, and of the header that MLX puts before every kernel, that our kernels use.
#pragma once
#include "threads.h"

using uint = unsigned;
using ushort = unsigned short;
using half = Float16;
using float16_t = Float16;
using bfloat16_t = BFloat16;
struct alignas(4) half2 { half x, y; };
struct alignas(8) uint2 { uint x, y; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
template <typename To, typename From> inline To as_type(From from) { return bits_as<To>(from); }

extern "C" float exp2f(float), fmaxf(float, float);

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
namespace fast {
inline float exp2(float x) { return exp2f(x); }
}
inline float max(float a, float b) { return fmaxf(a, b); }

inline void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) { kernel_barrier("threadgroup_barrier", line); }
inline void simdgroup_barrier(mem_flags, int line = __builtin_LINE()) { exchange(0, "simdgroup_barrier", line); }
inline float simd_shuffle_xor(float x, ushort other, int line = __builtin_LINE()) {
  return lane_value<float>(exchange(x, "simd_shuffle_xor", line)[(kernel_thread.x ^ other) & 31]);
}
inline bool simd_any(bool x, int line = __builtin_LINE()) {
  const uint64_t* all = exchange(x, "simd_any", line);
  bool any = false;
  for (int lane = 0; lane < 32; lane++) any |= all[lane] != 0;
  return any;
}
inline int simd_max(int x, int line = __builtin_LINE()) {
  const uint64_t* all = exchange(x, "simd_max", line);
  for (int lane = 0; lane < 32; lane++) x = x > lane_value<int>(all[lane]) ? x : lane_value<int>(all[lane]);
  return x;
}
inline int simd_min(int x, int line = __builtin_LINE()) {
  const uint64_t* all = exchange(x, "simd_min", line);
  for (int lane = 0; lane < 32; lane++) x = x < lane_value<int>(all[lane]) ? x : lane_value<int>(all[lane]);
  return x;
}

}  // namespace metal

// Address spaces mean nothing here; lint.h checks them.
#define device
#define constant
#define thread
#define threadgroup
// Metal has no double.
#define double no_double

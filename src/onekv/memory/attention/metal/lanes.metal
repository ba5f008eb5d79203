// What the bodies use, in Metal. MLX puts its own header before this one.
#define FUNCTION inline
#define CONSTANT constant constexpr
#define DEVICE device
#define PRIVATE thread
// Shared memory: a variable, and what a pointer points to.
#define SHARED threadgroup
#define SHARED_AT threadgroup

FUNCTION float word_as_float(uint32_t word) { return as_type<float>(word); }
FUNCTION float low_half(uint32_t word) { return float(as_type<half2>(word).x); }
FUNCTION float high_half(uint32_t word) { return float(as_type<half2>(word).y); }
FUNCTION float power_of_2(float x) { return metal::fast::exp2(x); }
FUNCTION float larger(float a, float b) { return metal::max(a, b); }

FUNCTION float shuffle_xor(float x, int lanes) { return metal::simd_shuffle_xor(x, ushort(lanes)); }
FUNCTION bool any_lane(bool x) { return metal::simd_any(x); }
FUNCTION int largest_of_lanes(int x) { return metal::simd_max(x); }
FUNCTION int smallest_of_lanes(int x) { return metal::simd_min(x); }
FUNCTION void lanes_barrier() { metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup); }
FUNCTION void block_barrier() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

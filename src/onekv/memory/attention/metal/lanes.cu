// What the bodies use, in CUDA, so that they can be compiled and tested where there is no Metal.
#define FUNCTION __device__ inline
#define CONSTANT constexpr
#define DEVICE
#define PRIVATE
#define SHARED __shared__
#define SHARED_AT

FUNCTION float word_as_float(uint32_t word) { return __uint_as_float(word); }
FUNCTION float low_half(uint32_t word) { return __half2float(__ushort_as_half(word & 0xffff)); }
FUNCTION float high_half(uint32_t word) { return __half2float(__ushort_as_half(word >> 16)); }
FUNCTION float power_of_2(float x) { return exp2f(x); }
FUNCTION float larger(float a, float b) { return fmaxf(a, b); }

FUNCTION float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
FUNCTION bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
FUNCTION int largest_of_lanes(int x) { return __reduce_max_sync(0xffffffffu, x); }
FUNCTION int smallest_of_lanes(int x) { return __reduce_min_sync(0xffffffffu, x); }
FUNCTION void lanes_barrier() { __syncwarp(); }
FUNCTION void block_barrier() { __syncthreads(); }

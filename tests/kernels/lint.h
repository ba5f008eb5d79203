// The part of Metal that our kernels use, for clang, which checks address spaces as Metal's compiler does. Never run.
using int64_t = long;
using int32_t = int;
using uint32_t = unsigned;
using uint = unsigned;
using ushort = unsigned short;
using half = __fp16;
using float16_t = __fp16;
using bfloat16_t = __bf16;
typedef half half2 __attribute__((ext_vector_type(2)));
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
template <typename To, typename From> To as_type(From from) { return __builtin_bit_cast(To, from); }

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
namespace fast {
float exp2(float);
}
float max(float, float);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_shuffle_xor(float, ushort);
bool simd_any(bool);
int simd_max(int);
int simd_min(int);
}  // namespace metal

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define double no_double

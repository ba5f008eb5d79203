// What kernels on the CPU need of threads.cpp, whichever language they are written in.
#pragma once
#include <stdint.h>

struct uint3 { unsigned x, y, z; };

extern "C" {
// Of the current thread.
extern uint3 kernel_thread, kernel_block, kernel_block_size, kernel_blocks;

// These return once all threads of the block, or all lanes of the warp, have made the same call.
void kernel_barrier(const char* what, int line);
// The values of all lanes; valid until the lane's next call but one.
const uint64_t* kernel_exchange(uint64_t value, const char* what, int line);
// D = A B + C of mma.m16n8k16, this lane's part of each; of bfloat16, or else of float16.
void kernel_mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, bool brain);
}

template <typename To, typename From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename X> inline X lane_value(uint64_t bits) {
  X x;
  __builtin_memcpy(&x, &bits, sizeof(X));
  return x;
}

template <typename X> inline const uint64_t* exchange(X x, const char* what, int line) {
  uint64_t bits = 0;
  static_assert(sizeof(X) <= 8, "");
  __builtin_memcpy(&bits, &x, sizeof(X));
  return kernel_exchange(bits, what, line);
}

// 16-bit floats, rounded to nearest, ties to even.
inline float bfloat16_to_float(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if (x != x) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float16_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = uint32_t(bits & 0x7fff) << 13;
  // The multiplication rebiases the exponent, also of subnormal numbers.
  const uint32_t finite = bits_as<uint32_t>(bits_as<float>(rest) * 0x1p112f);
  return bits_as<float>(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
}

inline uint16_t float_to_float16(float x) {
  const uint32_t sign = bits_as<uint32_t>(x) & 0x80000000, rest = bits_as<uint32_t>(x) ^ sign;
  uint32_t half;
  if (rest >= 0x47800000)
    half = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
  else if (rest < 0x38800000)
    // Subnormal: the addition shifts and rounds.
    half = bits_as<uint32_t>(bits_as<float>(rest) + 0.5f) - 0x3f000000;
  else
    half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  return uint16_t(sign >> 16 | half);
}

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  BFloat16(float x) : bits(float_to_bfloat16(x)) {}
  operator float() const { return bfloat16_to_float(bits); }
};

struct Float16 {
  uint16_t bits;
  Float16() = default;
  Float16(float x) : bits(float_to_float16(x)) {}
  operator float() const { return float16_to_float(bits); }
};

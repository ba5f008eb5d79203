struct Codes { const uint8_t* codes; const __half* scale; const __half* bias; };

// Four bytes, each with a pair of codes in its low bits: the numbers [first, first + 8) of a row.
template <int BITS> __device__ inline uint32_t pairs_of(const uint8_t* row, int first) {
  const int pair = first / 2;
  if (BITS == 4) return *reinterpret_cast<const uint32_t*>(row + pair);
  if (BITS == 2) return *reinterpret_cast<const uint32_t*>(row + pair % 32) >> (pair < 32 ? 0 : 4);
  if (pair < 48) return *reinterpret_cast<const uint32_t*>(row + pair);
  const uint32_t* at = reinterpret_cast<const uint32_t*>(row + pair - 48);
  return ((at[0] >> 6) & 0x03030303u) | (((at[4] >> 6) & 0x03030303u) << 2) | (((at[8] >> 6) & 0x03030303u) << 4);
}

// Bits of a code in the upper plane, where there is one; else anything that can be divided by.
__device__ constexpr int upper(int bits) { return bits == 6 ? 2 : 1; }

// Four codes of 5 or 6 bits, from `first` on, of both planes (`formats.packing`): a byte each.
template <int BITS> __device__ inline uint32_t joined(uint32_t low, uint32_t above, int first) {
  above = above >> (first / (16 * upper(BITS)) * upper(BITS)) & (BITS == 5 ? 0x01010101u : 0x03030303u);
  return (low >> (first < 64 ? 0 : 4) & 0x0f0f0f0fu) | above << 4;
}

// Four codes of a byte each as numbers around 0, two in a word.
template <int BITS> __device__ inline uint2 around_zero(uint32_t codes) {
  constexpr int CENTRE_OF = 1 << (BITS - 1);
  return make_uint2(
      pack<T>(float(int(codes & 255) - CENTRE_OF), float(int(codes >> 8 & 255) - CENTRE_OF)),
      pack<T>(float(int(codes >> 16 & 255) - CENTRE_OF), float(int(codes >> 24) - CENTRE_OF)));
}

// The numbers [first, first + 8) of a row, two in a word.
template <int BITS> __device__ inline uint4 numbers(const uint8_t* row, int first, const uint32_t* table) {
  uint4 out;
  if (BITS == 8) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(row + first);
    const uint32_t a = bytes.x ^ 0x80808080u, b = bytes.y ^ 0x80808080u;
    out.x = pack<T>(float(int8_t(a)), float(int8_t(a >> 8)));
    out.y = pack<T>(float(int8_t(a >> 16)), float(int8_t(a >> 24)));
    out.z = pack<T>(float(int8_t(b)), float(int8_t(b >> 8)));
    out.w = pack<T>(float(int8_t(b >> 16)), float(int8_t(b >> 24)));
  } else if (BITS > 4) {
    const uint2 low = *reinterpret_cast<const uint2*>(row + first % 64);
    const uint2 above = *reinterpret_cast<const uint2*>(row + 64 + first % (16 * upper(BITS)));
    const uint2 a = around_zero<BITS>(joined<BITS>(low.x, above.x, first));
    const uint2 b = around_zero<BITS>(joined<BITS>(low.y, above.y, first));
    out = make_uint4(a.x, a.y, b.x, b.y);
  } else {
    const uint32_t codes = pairs_of<BITS>(row, first);
    out.x = table[codes & 255];
    out.y = table[(codes >> 8) & 255];
    out.z = table[(codes >> 16) & 255];
    out.w = table[codes >> 24];
  }
  return out;
}

// The two tokens at `slot`: what numbers are multiplied with, and what is added.
template <int BITS, bool AFFINE>
__device__ inline void factors(const Codes& side, int64_t slot, float* scale, float* bias) {
  const __half2 s = *reinterpret_cast<const __half2*>(side.scale + slot);
  scale[0] = __low2float(s);
  scale[1] = __high2float(s);
  if (AFFINE) {
    const __half2 b = *reinterpret_cast<const __half2*>(side.bias + slot);
    const float centre = 1 << (BITS - 1);
    bias[0] = __low2float(b) + centre * scale[0];
    bias[1] = __high2float(b) + centre * scale[1];
  } else {
    bias[0] = bias[1] = 0;
  }
}

__device__ inline float reduce_max(float x) {
  for (int i = 16; i; i /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

__device__ inline float reduce_sum(float x) {
  for (int i = 16; i; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Factors of a cosine and a sine, turned by the angle whose cosine and sine are given.
__device__ inline uint32_t turned(float a, float b, uint32_t angle) {
  const __half2 both = *reinterpret_cast<const __half2*>(&angle);
  const float cosine = __low2float(both), sine = __high2float(both);
  return pack<T>(fmaf(a, cosine, b * sine), fmaf(b, cosine, -a * sine));
}

// What is taken off a key at `position`, by a warp; `rope` has angles, and then the channels of their pairs.
__device__ inline void centre_at(float* to, int position, const float* centre, const float* rope) {
  for (int p = threadIdx.x & 31; p < 64; p += 32) {
    float sine, cosine;
    sincosf(position * rope[p], &sine, &cosine);
    const float m = centre[p], n = centre[64 + p];
    // The first token of a sequence is stored as it is.
    to[int(rope[64 + p])] = position ? fmaf(m, cosine, -n * sine) : 0.0f;
    to[int(rope[128 + p])] = position ? fmaf(m, sine, n * cosine) : 0.0f;
  }
  __syncwarp();
}

// One row of 128 numbers without its centre, four in each lane, encoded and stored by a warp.
template <int BITS, bool AFFINE>
__device__ inline void store(
    const T* row, const float* centre, const float* signs, const float* levels, const Codes& side, int64_t slot) {
  constexpr int COUNT = 1 << BITS;
  const int lane = threadIdx.x & 31;
  float x[4];
  for (int i = 0; i < 4; i++) {
    x[i] = float(row[lane * 4 + i]);
    if (centre) x[i] -= centre[lane * 4 + i];
    x[i] *= signs[lane * 4 + i];
  }
  const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
  x[0] = a + c; x[1] = b + d; x[2] = a - c; x[3] = b - d;
  for (int step = 1; step < 32; step *= 2)
    for (int i = 0; i < 4; i++) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
  for (int i = 0; i < 4; i++) x[i] *= 0.08838834764831845f;
  uint32_t code[4];
  float scale, bias = 0;
  if (AFFINE) {
    for (int i = 0; i < 4; i++) x[i] = fminf(fmaxf(x[i], -65504.0f), 65504.0f);
    const float high = reduce_max(max(max(x[0], x[1]), max(x[2], x[3])));
    const float low = -reduce_max(-min(min(x[0], x[1]), min(x[2], x[3])));
    const bool negative = fabsf(low) > fabsf(high);
    scale = fmaxf((high - low) / (COUNT - 1), 1e-7f);
    scale = negative ? scale : -scale;
    const float edge = negative ? low : high, zero = rintf(edge / scale);
    if (zero != 0) scale = edge / zero;
    bias = zero != 0 ? edge : 0.0f;
    for (int i = 0; i < 4; i++) code[i] = uint32_t(fminf(fmaxf(rintf((x[i] - bias) / scale), 0.0f), COUNT - 1.0f));
  } else {
    float squares = 0;
    for (int i = 0; i < 4; i++) squares = fmaf(x[i], x[i], squares);
    const float norm = sqrtf(reduce_sum(squares));
    const float unit = 11.313708498984761f / fmaxf(norm, 1e-30f);
    float length = 0;
    for (int i = 0; i < 4; i++) {
      uint32_t index = 0;
      for (int e = 0; e < COUNT - 1; e++) index += (levels[e] + levels[e + 1]) / 2 < x[i] * unit;
      code[i] = index;
      length += levels[index] * levels[index];
    }
    scale = fminf(norm / sqrtf(reduce_sum(length)), 65504.0f);
  }
  uint8_t* to = const_cast<uint8_t*>(side.codes) + slot * (16 * BITS);
  if (BITS == 8) {
    reinterpret_cast<uint32_t*>(to)[lane] = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
  } else if (BITS > 4) {
    // A part of the upper plane has the codes of LANES lanes.
    constexpr int MORE = upper(BITS), LANES = 4 * MORE;
    const uint32_t four = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24, low = four & 0x0f0f0f0fu;
    const uint32_t other = __shfl_sync(0xffffffffu, low, lane % 16 + 16);
    if (lane < 16) reinterpret_cast<uint32_t*>(to)[lane] = low | other << 4;
    uint32_t above = 0;
    for (int part = 0; part < 8 / MORE; part++)
      above |= (__shfl_sync(0xffffffffu, four, part * LANES + lane % LANES) >> 4 & 0x0f0f0f0fu) << (part * MORE);
    if (lane < LANES) reinterpret_cast<uint32_t*>(to)[16 + lane] = above;
  } else {
    uint32_t two = (code[0] | code[1] << BITS) | (code[2] | code[3] << BITS) << 8;
    if (BITS == 4) reinterpret_cast<uint16_t*>(to)[lane] = two;
    if (BITS == 2) {
      const uint32_t above = __shfl_sync(0xffffffffu, two, lane % 16 + 16);
      if (lane < 16) reinterpret_cast<uint16_t*>(to)[lane] = two | above << 4;
    }
    if (BITS == 3) {
      const uint32_t last = __shfl_sync(0xffffffffu, two, 24 + lane % 8);
      if (lane < 24) reinterpret_cast<uint16_t*>(to)[lane] = two | ((last >> (2 * (lane / 8))) & 0x0303u) << 6;
    }
  }
  if (lane == 0) {
    const_cast<__half*>(side.scale)[slot] = __float2half(scale);
    if (AFFINE) const_cast<__half*>(side.bias)[slot] = __float2half(bias);
  }
}

// `count` rows of 128 in shared memory, by all threads: the transform without signs.
__device__ inline void transform(float* rows, int count) {
  for (int step = 1; step < 128; step *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < count * 64; i += 128) {
      const int at = (i / step) * 2 * step + i % step;
      const float a = rows[at], b = rows[at + step];
      rows[at] = a + b;
      rows[at + step] = a - b;
    }
  }
  __syncthreads();
}

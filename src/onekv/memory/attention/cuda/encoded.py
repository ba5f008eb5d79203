"""Decode attention over encoded blocks as a CUDA kernel: the bytes are read once, where they lie, and never unpacked to
memory.

Like `plain` (read that first): one thread block per (row, KV head, split), four warps, 16 tokens at a time through the
tensor cores. What is different:

    queries    are rotated first, by every thread block for itself
    keys       a lane turns the codes it loads into numbers in its registers; what they must be multiplied with and
               moved by is one pair per token, so it is applied to the scores: <q, c * scale + bias> = scale * <q, c> +
               bias * sum(q)
    values     the same: weights are multiplied with the scale, and the sum of weight * bias is added at the end
    new token  is rotated, encoded and stored by the warp that reads its tile, like `Codec.encode` does it
    centres    (`formats.centre`) of 16 tokens are one more product: with a, b the factors of a pair's cosine and sine,
               S its angle at the first of the tokens and s that from there on,
               a cos(S + s) + b sin(S + s) = (a cos S + b sin S) cos s + (b cos S - a sin S) sin s
               the factors are turned by S, which a table has for every 16th position; that of s is the same for all
    output     is unrotated by the thread block that joins the splits

Codes of up to 4 bits become numbers by a table of pairs in shared memory, those of 8 bits by conversion. Affine codes
are centred (8 or 128 is taken off and added to the bias), so that rounding weights to T costs as little as it can.
For head dim 128, which is that of nearly all models this is for.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...formats import Codec
from ...formats.affine import Affine
from ...formats.centre import Rope
from ...formats.rotation import rotation
from ...formats.turbo import Turbo, codebook
from ...layout import KVLayer
from ...pool import LayerArrays
from ..pairs import Grid
from .plain import HEADER, LAST, LEAST, PLACE, THREAD_BLOCKS, THREADS, Constants, define, kernel_name, zero_counters

DIM = 128

HELPERS = """
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
    const float centre = BITS == 8 ? 128.0f : 8.0f;
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
  return pack<T>(a * cosine + b * sine, b * cosine - a * sine);
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
    const float norm = sqrtf(reduce_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]));
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
"""

SOURCE = """
  constexpr int TILES = BS / 16;
  const float none = __int_as_float(0xff800000), norm = 0.08838834764831845f;
"""
SOURCE += (
    PLACE
    + """\
  const Codes keys = {reinterpret_cast<const uint8_t*>(k), k_scale, k_bias};
  const Codes values = {reinterpret_cast<const uint8_t*>(v), v_scale, v_bias};
  const int first = part * per, tiles = min(per, n - first) * TILES;
  const int query = lengths[row];
  float* parts = scratch;
  float* tops = parts + (int64_t)rows * H * G * splits * 128;
  float* sums = tops + (int64_t)rows * H * G * splits;
  float* moves = sums + (int64_t)rows * H * G * splits;
  const float factor = SCALE * 1.4426950408889634f;

  __shared__ float shared_acc[4][G][128], shared_top[4][G], shared_sum[4][G], shared_move[4][G], query_sum[G];
  __shared__ uint32_t k_words[256], v_words[256];
  __shared__ __align__(16) T rotated[G * 128];
  // Of centres: the factors of two pairs, cosines and sines of four pairs 0 to 15 positions on, the new token's own.
  __shared__ __align__(16) float4 pair_factors[CENTRE ? 8 : 1][32];
  __shared__ __align__(16) uint4 steps[CENTRE ? 8 : 1][32];
  __shared__ float own_centre[128];
  const float* signs = constants;
  const float* k_levels = constants + 128;
  const float* v_levels = k_levels + 16;
  const float* k_table = v_levels + 16;
  const float* v_table = k_table + 512;
  for (int i = threadIdx.x; i < 256; i += 128) {
    k_words[i] = pack<T>(k_table[2 * i], k_table[2 * i + 1]);
    v_words[i] = pack<T>(v_table[2 * i], v_table[2 * i + 1]);
  }
  const float* angles = rope;
  const float* channels = rope + 64;
  if (CENTRE) {
    for (int i = threadIdx.x; i < 8 * 32; i += 128) {
      const int lane_of = i % 32, pair_of = lane_of % 4 * 16 + i / 32 * 2;
      float both[4] = {0, 0, 0, 0};
      if (lane_of / 4 < G)
        for (int p = 0; p < 2; p++) {
          const T* own = q + ((int64_t)(row * H + head) * G + lane_of / 4) * 128;
          const float x = float(own[int(channels[pair_of + p])]), y = float(own[int(channels[64 + pair_of + p])]);
          const float m = centre[head * 128 + pair_of + p], n = centre[head * 128 + 64 + pair_of + p];
          both[2 * p] = x * m + y * n;
          both[2 * p + 1] = y * m - x * n;
        }
      pair_factors[i / 32][lane_of] = make_float4(both[0], both[1], both[2], both[3]);
      const int token = i / 128 * 8 + lane_of / 4;
      const float* from = rope + 192 + (token * 64 + lane_of % 4 * 16 + i / 32 % 4 * 4) * 2;
      steps[i / 32][lane_of] = make_uint4(
          pack<T>(from[0], from[1]), pack<T>(from[2], from[3]), pack<T>(from[4], from[5]), pack<T>(from[6], from[7]));
    }
  }
  float* space = &shared_acc[0][0][0];
  for (int i = threadIdx.x; i < G * 128; i += 128)
    space[i] = float(q[(int64_t)(row * H + head) * G * 128 + i]) * signs[i % 128];
  transform(space, G);
  for (int i = threadIdx.x; i < G * 128; i += 128) rotated[i] = T(space[i] * norm);
  __syncthreads();
  for (int h = warp; h < G; h += 4) {
    float total = 0;
    for (int i = lane; i < 128; i += 32) total += float(rotated[h * 128 + i]);
    total = reduce_sum(total);
    if (lane == 0) query_sum[h] = total;
  }
  __syncthreads();

  // Lane t has the dimensions [32 t, 32 t + 32) of a row: those of chunk c are 8 of them.
  uint32_t qa[4][2][4];
  float total_of[2] = {0, 0};
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    if (g + 8 * high < G) total_of[high] = query_sum[g + 8 * high];
    #pragma unroll
    for (int c = 0; c < 4; c++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (g + 8 * high < G) x = *reinterpret_cast<const uint4*>(rotated + (g + 8 * high) * 128 + t * 32 + c * 8);
      qa[c][0][high] = x.x;
      qa[c][0][high + 2] = x.y;
      qa[c][1][high] = x.z;
      qa[c][1][high + 2] = x.w;
    }
  }

  float acc[2][8][4], top[2] = {none, none}, sum[2] = {0, 0}, move[2] = {0, 0};
  #pragma unroll
  for (int h = 0; h < 2; h++)
    #pragma unroll
    for (int j = 0; j < 8; j++)
      #pragma unroll
      for (int i = 0; i < 4; i++) acc[h][j][i] = 0;

  for (int tile = warp; tile < tiles; tile += 4) {
    const int pair = first + tile / TILES;
    const int start = base[pair] + tile % TILES * 16;
    if (start > query || (start + 15 <= query - window && start >= keep)) continue;
    const int64_t slot = (int64_t)head * SLOTS + (int64_t)ids[pair] * BS + tile % TILES * 16;

    if (NEW && query < start + 16) {
      const int64_t own = slot + query - start;
      if (CENTRE) {
        for (int p = lane; p < 64; p += 32) {
          float sine, cosine;
          sincosf(query * angles[p], &sine, &cosine);
          const float m = centre[head * 128 + p], n = centre[head * 128 + 64 + p];
          own_centre[int(channels[p])] = query ? m * cosine - n * sine : 0.0f;
          own_centre[int(channels[64 + p])] = query ? m * sine + n * cosine : 0.0f;
        }
        __syncwarp();
      }
      const int64_t from = (int64_t)(row * H + head) * 128;
      store<KBITS, KAFFINE>(new_k + from, CENTRE ? own_centre : nullptr, signs, k_levels, keys, own);
      store<VBITS, VAFFINE>(new_v + from, nullptr, signs, v_levels, values, own);
      __syncwarp();
    }

    float centred[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (CENTRE) {
      const uint4* turn = reinterpret_cast<const uint4*>(turns) + (int64_t)start + t * 4;
      #pragma unroll
      for (int c = 0; c < 4; c++) {
        const uint4 angle = __ldg(turn + c);
        const float4 x = pair_factors[2 * c][lane], y = pair_factors[2 * c + 1][lane];
        const uint32_t one[4] = {turned(x.x, x.y, angle.x), 0, turned(x.z, x.w, angle.y), 0};
        const uint32_t two[4] = {turned(y.x, y.y, angle.z), 0, turned(y.z, y.w, angle.w), 0};
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint4 step = steps[j * 4 + c][lane];
          mma<T>(centred[j], one, step.x, step.y);
          mma<T>(centred[j], two, step.z, step.w);
        }
      }
    }

    float s[2][4], v_scales[2][2], v_moves[2][2];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint8_t* from = keys.codes + (slot + j * 8 + g) * (16 * KBITS);
      float k_scales[2], k_moves[2];
      factors<KBITS, KAFFINE>(keys, slot + j * 8 + 2 * t, k_scales, k_moves);
      factors<VBITS, VAFFINE>(values, slot + j * 8 + 2 * t, v_scales[j], v_moves[j]);
      #pragma unroll
      for (int i = 0; i < 4; i++) s[j][i] = 0;
      #pragma unroll
      for (int c = 0; c < 4; c++) {
        const uint4 key = numbers<KBITS>(from, t * 32 + c * 8, k_words);
        mma<T>(s[j], qa[c][0], key.x, key.y);
        mma<T>(s[j], qa[c][1], key.z, key.w);
      }
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = start + j * 8 + 2 * t + (i & 1);
        const bool seen = position <= query && (position > query - window || position < keep);
        float score = s[j][i] * k_scales[i & 1] + total_of[i >> 1] * k_moves[i & 1];
        if (CENTRE && position) score += centred[j][i];
        s[j][i] = seen ? score * factor : none;
      }
    }

    float shrink[2];
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      float highest = max(max(s[0][2 * high], s[0][2 * high + 1]), max(s[1][2 * high], s[1][2 * high + 1]));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      highest = max(highest, top[high]);
      shrink[high] = top[high] == none ? 0.0f : exp2f(top[high] - highest);
      top[high] = highest;
      sum[high] *= shrink[high];
      move[high] *= shrink[high];
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int i = 2 * high; i < 2 * high + 2; i++) {
          const float weight = s[j][i] == none ? 0.0f : exp2f(s[j][i] - highest);
          sum[high] += weight;
          // What lies in slots that are not read may be anything.
          s[j][i] = weight == 0.0f ? 0.0f : weight * v_scales[j][i & 1];
          move[high] += weight == 0.0f ? 0.0f : weight * v_moves[j][i & 1];
        }
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
      #pragma unroll
      for (int h = 0; h < 2; h++)
        #pragma unroll
        for (int j = 0; j < 8; j++)
          #pragma unroll
          for (int i = 0; i < 4; i++) acc[h][j][i] *= shrink[i >> 1];
    }

    const uint32_t w[4] = {
        pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]), pack<T>(s[1][0], s[1][1]), pack<T>(s[1][2], s[1][3])};
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      uint4 value[4];
      #pragma unroll
      for (int r = 0; r < 4; r++) {
        const int64_t token = slot + 2 * t + (r & 1) + (r >> 1) * 8;
        value[r] = numbers<VBITS>(values.codes + token * (16 * VBITS), g * 16 + h * 8, v_words);
      }
      const uint32_t* v0 = reinterpret_cast<const uint32_t*>(&value[0]);
      const uint32_t* v1 = reinterpret_cast<const uint32_t*>(&value[1]);
      const uint32_t* v2 = reinterpret_cast<const uint32_t*>(&value[2]);
      const uint32_t* v3 = reinterpret_cast<const uint32_t*>(&value[3]);
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        const unsigned halves = j % 2 ? 0x7632 : 0x5410;
        mma<T>(acc[h][j], w, __byte_perm(v0[j / 2], v1[j / 2], halves), __byte_perm(v2[j / 2], v3[j / 2], halves));
      }
    }
  }

  __syncthreads();
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    const int head_of = g + 8 * high;
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 1);
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 2);
    move[high] += __shfl_xor_sync(0xffffffffu, move[high], 1);
    move[high] += __shfl_xor_sync(0xffffffffu, move[high], 2);
    if (head_of < G) {
      if (t == 0) {
        shared_top[warp][head_of] = top[high];
        shared_sum[warp][head_of] = sum[high];
        shared_move[warp][head_of] = move[high];
      }
      #pragma unroll
      for (int h = 0; h < 2; h++)
        #pragma unroll
        for (int j = 0; j < 8; j++)
          #pragma unroll
          for (int i = 0; i < 2; i++)
            shared_acc[warp][head_of][(2 * t + i) * 16 + h * 8 + j] = acc[h][j][2 * high + i];
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < G * 128; index += 128) {
    const int head_of = index / 128, d = index % 128;
    float highest = none, total = 0, moved = 0, joined = 0;
    for (int w = 0; w < 4; w++) highest = max(highest, shared_top[w][head_of]);
    for (int w = 0; w < 4; w++) {
      const float shrink = shared_top[w][head_of] == none ? 0.0f : exp2f(shared_top[w][head_of] - highest);
      total += shared_sum[w][head_of] * shrink;
      moved += shared_move[w][head_of] * shrink;
      joined += shared_acc[w][head_of][d] * shrink;
    }
    const int64_t place = ((int64_t)(row * H + head) * G + head_of) * splits + part;
    parts[place * 128 + d] = joined;
    if (d == 0) {
      tops[place] = highest;
      sums[place] = total;
      moves[place] = moved;
    }
  }

"""
)
SOURCE += (
    LAST
    + """\
  for (int index = threadIdx.x; index < G * 32; index += 128) {
    const int head_of = index / 32, d = index % 32 * 4, query_head = head * G + head_of;
    const int64_t place = ((int64_t)row * H * G + query_head) * splits;
    const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : none;
    float highest = sink;
    for (int s = 0; s < splits; s++) highest = max(highest, __ldcg(tops + place + s));
    float total = SINKS ? exp2f(sink - highest) : 0.0f, moved = 0;
    float4 result = make_float4(0, 0, 0, 0);
    #pragma unroll 4
    for (int s = 0; s < splits; s++) {
      const float top_of = __ldcg(tops + place + s);
      const float shrink = top_of == none ? 0.0f : exp2f(top_of - highest);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(parts + (place + s) * 128 + d));
      total += __ldcg(sums + place + s) * shrink;
      moved += __ldcg(moves + place + s) * shrink;
      result.x += x.x * shrink;
      result.y += x.y * shrink;
      result.z += x.z * shrink;
      result.w += x.w * shrink;
    }
    space[head_of * 128 + d] = (result.x + moved) / total;
    space[head_of * 128 + d + 1] = (result.y + moved) / total;
    space[head_of * 128 + d + 2] = (result.z + moved) / total;
    space[head_of * 128 + d + 3] = (result.w + moved) / total;
  }
  transform(space, G);
  for (int i = threadIdx.x; i < G * 128; i += 128)
    out[((int64_t)row * H + head) * G * 128 + i] = T(space[i] * norm * signs[i % 128]);
"""
)


@cache
def _kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    names = ["q", "k", "k_scale", "k_bias", "v", "v_scale", "v_bias", "new_k", "new_v"]
    return mx.fast.cuda_kernel(
        name=f"onekv_encoded_{kernel_name(dtype, constants)}",
        input_names=[*names, "blocks", "lengths", "counters", "sinks", "constants", "centre", "rope", "turns"],
        output_names=["out", "scratch"],
        header=HEADER + define(dtype, constants) + HELPERS,
        source=SOURCE,
    )


def most_queries(stored: KVLayer) -> int:
    """How many query heads may share a KV head: rows of a tile, and with centres what fits shared memory."""
    return 16 if stored.centre is None else 8


def supported(stored: KVLayer, block_size: int) -> bool:
    """Whether the kernel can read a layer stored like this."""
    fits = stored.k_dim == stored.v_dim == DIM and block_size % 16 == 0 and stored.dtype in (mx.bfloat16, mx.float16)
    known = all(isinstance(codec, Affine | Turbo) for codec in (stored.keys, stored.values))
    return mx.cuda.is_available() and fits and known


@cache
def _constants(keys: Codec, values: Codec) -> mx.array:
    """Signs, codebooks and tables of pairs, one after the other."""
    signs = np.array(rotation(DIM).signs)
    numbers = [*(_levels(codec) for codec in (keys, values)), *(_table(codec) for codec in (keys, values))]
    constants = mx.array(np.concatenate([signs, *numbers]).astype(np.float32))
    mx.eval(constants)
    return constants


def _levels(codec: Codec) -> "np.ndarray[Any, Any]":
    """What a code stands for when a row is encoded; 16 numbers."""
    if isinstance(codec, Turbo):
        return np.resize(codebook(DIM, codec.bits)[0], 16)
    return np.zeros(16)


def _table(codec: Codec) -> "np.ndarray[Any, Any]":
    """The two numbers of each byte's pair of codes, [256 * 2]."""
    if isinstance(codec, Turbo):
        return np.array(codec.read_table).view(np.float32)
    octets = np.arange(256)
    return np.stack([octets % 16 - 8, octets // 16 - 8], axis=-1).reshape(-1)


@cache
def _rope(rope: Rope) -> mx.array:
    """Angles, channels of pairs, and cosines and sines of all pairs 0 to 15 positions on."""
    angles = rope.angles(DIM)
    turned = np.arange(16)[:, None] * angles
    steps = np.stack([np.cos(turned), np.sin(turned)], axis=-1).reshape(-1)
    numbers = mx.array(np.concatenate([angles, *rope.all_pairs(DIM), steps]).astype(np.float32))
    mx.eval(numbers)
    return numbers


def encoded_decode(
    queries: mx.array,
    arrays: LayerArrays,
    stored: KVLayer,
    new: tuple[mx.array, mx.array] | None,
    grid: Grid,
    lengths: mx.array,
    reach: tuple[int, int],
    scale: float,
    sinks: mx.array | None,
    turns: mx.array | None = None,
) -> mx.array:
    """Like `plain.cuda_decode`, over encoded keys and values; `new` ones are encoded and stored.

    A centred layer needs the `turns.starts` of all positions.
    """
    keys, values = stored.keys, stored.values
    assert isinstance(keys, Affine | Turbo) and isinstance(values, Affine | Turbo)
    heads, slots = arrays.all[0].shape[:2]
    rows, query_heads = queries.shape[:2]
    blocks, splits = grid.split(heads, reach, THREAD_BLOCKS, LEAST)
    kernel = _kernel(
        stored.dtype,
        (
            ("H", heads),
            ("G", query_heads // heads),
            ("KBITS", keys.bits),
            ("VBITS", values.bits),
            ("KAFFINE", isinstance(keys, Affine)),
            ("VAFFINE", isinstance(values, Affine)),
            ("BS", grid.block_size),
            ("SLOTS", slots),
            ("SCALE", float(scale)),
            ("NEW", new is not None),
            ("SINKS", sinks is not None),
            ("CENTRE", stored.centre is not None),
        ),
    )
    new_k, new_v = new if new is not None else (queries, queries)
    counters = zero_counters(rows * heads)
    k, v = arrays.keys, arrays.values
    numbers = _constants(keys, values)
    centred = (numbers, numbers, numbers)
    if stored.centre is not None:
        assert turns is not None
        centred = (stored.centre.paired, _rope(stored.centre.rope), turns)
    out: mx.array = kernel(
        inputs=[
            queries.astype(stored.dtype),
            # A codebook has no bias: its scale stands in for it.
            *(k[0], k[1], k[-1]),
            *(v[0], v[1], v[-1]),
            new_k.astype(stored.dtype),
            new_v.astype(stored.dtype),
            blocks,
            lengths,
            counters,
            counters if sinks is None else sinks,
            numbers,
            *centred,
        ],
        grid=(splits * THREADS, heads, rows),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, query_heads, 1, DIM), (rows * query_heads * splits * (DIM + 3),)],
        output_dtypes=[stored.dtype, mx.float32],
    )[0]
    return out.astype(queries.dtype)

"""Decode attention over the pool as two CUDA kernels: each block of a sequence is read once, where it lies.

    split   one thread block per (row, KV head, split); a split is a range of the row's blocks
    merge   one thread per output element; joins the splits of a row, and the sink

In `split`, eight lanes hold one token's key, so 128 threads work on 16 tokens at a time, two deep; up to four query
heads that share the KV head are done together. Each group of lanes keeps a running maximum and sum; groups are joined
by shuffles inside a warp, warps through shared memory. It does what `attention.paged_decode` does, faster (figures in
benchmarks/), for the shapes that `supported` names.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from .pairs import Grid
from .pool import LayerArrays

# Thread blocks to start at least: four for each of the 132 multiprocessors of the chip this was measured on.
THREAD_BLOCKS = 528
THREADS = 128

SPLIT = """
  constexpr int VEC = 16 / sizeof(T);
  constexpr int J = D / (8 * VEC), JV = DV / (8 * VEC);
  constexpr int TILES = G / GT;
  const int lane = threadIdx.x & 7, group = threadIdx.x >> 3;
  const unsigned mask = 0xffu << (threadIdx.x & 24);
  const int head = blockIdx.y / TILES, tile = blockIdx.y % TILES, row = blockIdx.z, part = blockIdx.x;
  const int slots = sizes[0], n = sizes[1], per = sizes[2], splits = sizes[3];
  const int first = part * per;
  const int tokens = max(0, min(first + per, counts[row]) - first) * BS;
  const int query = (row * H + head) * G + tile * GT;
  const float none = __int_as_float(0xff800000);

  float q_reg[GT][J * VEC], acc[GT][JV * VEC], top[GT], sum[GT];
  #pragma unroll
  for (int g = 0; g < GT; g++) {
    top[g] = none;
    sum[g] = 0;
    #pragma unroll
    for (int j = 0; j < J; j++)
      #pragma unroll
      for (int i = 0; i < VEC; i++)
        q_reg[g][j * VEC + i] = float(q[(query + g) * D + (j * 8 + lane) * VEC + i]) * scale[0];
    #pragma unroll
    for (int i = 0; i < JV * VEC; i++) acc[g][i] = 0;
  }

  for (int t = group; t < tokens; t += 32) {
    uint4 key[2][J], value[2][JV];
    float shift[2];
    #pragma unroll
    for (int u = 0; u < 2; u++) {
      const bool there = t + u * 16 < tokens;
      const int token = there ? t + u * 16 : t;
      const int pair = row * n + first + token / BS;
      shift[u] = there ? bias[pair * BS + token % BS] : none;
      const int64_t slot = (int64_t)head * slots + (int64_t)ids[pair] * BS + token % BS;
      const uint4* k_row = reinterpret_cast<const uint4*>(k + slot * D);
      const uint4* v_row = reinterpret_cast<const uint4*>(v + slot * DV);
      #pragma unroll
      for (int j = 0; j < J; j++) key[u][j] = k_row[j * 8 + lane];
      #pragma unroll
      for (int j = 0; j < JV; j++) value[u][j] = v_row[j * 8 + lane];
    }
    #pragma unroll
    for (int u = 0; u < 2; u++) {
      float score[GT];
      #pragma unroll
      for (int g = 0; g < GT; g++) score[g] = 0;
      #pragma unroll
      for (int j = 0; j < J; j++) {
        const T* elements = reinterpret_cast<const T*>(&key[u][j]);
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
          const float x = float(elements[i]);
          #pragma unroll
          for (int g = 0; g < GT; g++) score[g] += q_reg[g][j * VEC + i] * x;
        }
      }
      #pragma unroll
      for (int g = 0; g < GT; g++)
        #pragma unroll
        for (int step = 4; step > 0; step /= 2) score[g] += __shfl_xor_sync(mask, score[g], step);
      #pragma unroll
      for (int g = 0; g < GT; g++) {
        const float x = score[g] + shift[u];
        if (x == none) break;
        if (x > top[g]) {
          const float shrink = __expf(top[g] - x);
          sum[g] *= shrink;
          #pragma unroll
          for (int i = 0; i < JV * VEC; i++) acc[g][i] *= shrink;
          top[g] = x;
        }
        const float w = __expf(x - top[g]);
        sum[g] += w;
        #pragma unroll
        for (int j = 0; j < JV; j++) {
          const T* elements = reinterpret_cast<const T*>(&value[u][j]);
          #pragma unroll
          for (int i = 0; i < VEC; i++) acc[g][j * VEC + i] += w * float(elements[i]);
        }
      }
    }
  }

  __shared__ float shared_acc[4][GT][DV], shared_top[4][GT], shared_sum[4][GT];
  const int warp = threadIdx.x >> 5;
  #pragma unroll
  for (int g = 0; g < GT; g++) {
    float highest = top[g];
    #pragma unroll
    for (int step = 8; step < 32; step *= 2)
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, step));
    const float shrink = top[g] == none ? 0.0f : __expf(top[g] - highest);
    sum[g] *= shrink;
    #pragma unroll
    for (int i = 0; i < JV * VEC; i++) acc[g][i] *= shrink;
    #pragma unroll
    for (int step = 8; step < 32; step *= 2) {
      sum[g] += __shfl_xor_sync(0xffffffffu, sum[g], step);
      #pragma unroll
      for (int i = 0; i < JV * VEC; i++) acc[g][i] += __shfl_xor_sync(0xffffffffu, acc[g][i], step);
    }
    if ((threadIdx.x & 31) < 8) {
      #pragma unroll
      for (int j = 0; j < JV; j++)
        #pragma unroll
        for (int i = 0; i < VEC; i++) shared_acc[warp][g][(j * 8 + lane) * VEC + i] = acc[g][j * VEC + i];
      if (lane == 0) {
        shared_top[warp][g] = highest;
        shared_sum[warp][g] = sum[g];
      }
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < GT * DV; index += 128) {
    const int g = index / DV, d = index % DV;
    float highest = none, total = 0, out = 0;
    for (int w = 0; w < 4; w++) highest = max(highest, shared_top[w][g]);
    for (int w = 0; w < 4; w++) {
      const float shrink = shared_top[w][g] == none ? 0.0f : __expf(shared_top[w][g] - highest);
      total += shared_sum[w][g] * shrink;
      out += shared_acc[w][g][d] * shrink;
    }
    const int64_t place = (int64_t)(query + g) * splits + part;
    parts[place * DV + d] = out;
    if (d == 0) {
      tops[place] = highest;
      sums[place] = total;
    }
  }
"""

MERGE = """
  const int d = threadIdx.x, query = blockIdx.y, splits = sizes[3];
  const float none = __int_as_float(0xff800000);
  float highest = SINKS ? float(sinks[query % (H * G)]) : none;
  for (int s = 0; s < splits; s++) highest = max(highest, tops[query * splits + s]);
  float total = SINKS ? __expf(float(sinks[query % (H * G)]) - highest) : 0.0f, result = 0;
  for (int s = 0; s < splits; s++) {
    const int64_t place = (int64_t)query * splits + s;
    const float shrink = tops[place] == none ? 0.0f : __expf(tops[place] - highest);
    total += sums[place] * shrink;
    result += parts[place * DV + d] * shrink;
  }
  out[(int64_t)query * DV + d] = T(result / total);
"""


@cache
def _kernels() -> tuple[Any, Any]:
    split = mx.fast.cuda_kernel(
        name="onekv_split",
        input_names=["q", "k", "v", "ids", "counts", "bias", "sizes", "scale"],
        output_names=["parts", "tops", "sums"],
        source=SPLIT,
    )
    merge = mx.fast.cuda_kernel(
        name="onekv_merge",
        input_names=["parts", "tops", "sums", "sizes", "sinks"],
        output_names=["out"],
        source=MERGE,
    )
    return split, merge


@cache
def _scalar(value: float) -> mx.array:
    """One array per value: a new one for every call would be a new allocation on the device."""
    return mx.array([value], mx.float32)


def supported(arrays: LayerArrays) -> bool:
    """Whether the kernels can read these arrays: eight lanes with 16 bytes each must divide a token's row."""
    lanes = 8 * 16 // arrays.k.dtype.size
    dims = (arrays.k.shape[2], arrays.v.shape[2])
    return mx.cuda.is_available() and all(0 < dim <= 256 and dim % lanes == 0 for dim in dims)


def cuda_decode(
    queries: mx.array,
    arrays: LayerArrays,
    grid: Grid,
    bias: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim]; `bias` is float32, [rows, 1, n, 1, block_size]."""
    heads, _, k_dim = arrays.k.shape
    v_dim, size = arrays.v.shape[2], bias.shape[-1]
    rows, query_heads = queries.shape[:2]
    shared = query_heads // heads
    # What a lane keeps of queries and output must fit its registers.
    widest = 4 if max(k_dim, v_dim) <= 128 else 2
    tile = max(width for width in range(1, widest + 1) if shared % width == 0)
    across = heads * (shared // tile)
    sizes, splits = grid.splits(rows * across, THREAD_BLOCKS)
    shape = [("T", arrays.k.dtype), ("H", heads), ("G", shared), ("DV", v_dim)]

    split, merge = _kernels()
    parts, tops, sums = split(
        inputs=[
            queries.astype(arrays.k.dtype),
            arrays.k,
            arrays.v,
            grid.ids,
            grid.counts,
            bias,
            sizes,
            _scalar(scale),
        ],
        template=[*shape, ("GT", tile), ("D", k_dim), ("BS", size)],
        grid=(splits * THREADS, across, rows),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, query_heads, splits, v_dim), (rows, query_heads, splits), (rows, query_heads, splits)],
        output_dtypes=[mx.float32] * 3,
    )
    out: mx.array = merge(
        inputs=[parts, tops, sums, sizes, tops if sinks is None else sinks],
        template=[("T", queries.dtype), *shape[1:], ("SINKS", sinks is not None)],
        grid=(v_dim, rows * query_heads, 1),
        threadgroup=(v_dim, 1, 1),
        output_shapes=[(rows, query_heads, 1, v_dim)],
        output_dtypes=[queries.dtype],
    )[0]
    return out

"""Decode attention over the pool as a CUDA kernel: each block of a sequence is read once, where it lies.

One thread block per (row, KV head, split); a split is a range of the row's blocks. The one that ends last of a row and
head joins the splits, and the sink. `counters` tells which that is: zeros, which the last one leaves as it found them;
all calls share it, because on the one stream there is they run one after the other.

It does what `paged.paged_decode` does, for the shapes that `supported` names, in fewer operations for the host to
start and close to the speed of memory (figures in benchmarks/). Each of four warps takes 16 tokens at a time
through the tensor cores: scores = Q K^T with the query heads that share the KV head as the 16 rows of a tile, then
weights * V, with a running maximum and sum per query head. How a dimension maps to a lane is free as long as both sides
of a product agree, so every lane loads 16 adjacent bytes. The warp that comes to the query's own token stores it first:
the kernel writes into the pool, an input, which MLX does not know (see `layers.PagedLayer`). Only that warp reads or
writes that slot, and blocks that are written are never shared.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from ...pool import LayerArrays
from ..pairs import Grid

THREADS = 128
# Thread blocks to start: three for each of the 132 multiprocessors of the chip this was measured on.
THREAD_BLOCKS = 396
# A split is of at least so many tokens.
LEAST = 256

HEADER = """
template <typename T> __device__ inline void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);

template <> __device__ inline void mma<__nv_bfloat16>(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> __device__ inline void mma<__half>(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T> __device__ inline uint32_t pack(float x, float y);

template <> __device__ inline uint32_t pack<__nv_bfloat16>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}

template <> __device__ inline uint32_t pack<__half>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
"""

# Who a thread is, and what its thread block reads.
PLACE = """\
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int head = blockIdx.y, row = blockIdx.z, part = blockIdx.x;
  const int n = blocks[0], per = blocks[1], splits = blocks[2], window = blocks[3], keep = blocks[4];
  const int rows = blocks[5];
  const int* ids = blocks + 6 + row * n;
  const int* base = ids + rows * n;
"""

# What follows is done by the thread block that ends last of its row and head.
LAST = """\
  __threadfence();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) {
    int* counter = const_cast<int*>(counters) + row * H + head;
    last = atomicAdd(counter, 1) == splits - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
"""

SOURCE = """
  constexpr int C = D / 32, HV = DV / 64, TILES = BS / 16;
  const float none = __int_as_float(0xff800000);
"""
SOURCE += (
    PLACE
    + """\
  T* keys = const_cast<T*>(k);
  T* values = const_cast<T*>(v);
  const int first = part * per, tiles = min(per, n - first) * TILES;
  const int query = lengths[row];
  float* parts = scratch;
  float* tops = parts + (int64_t)rows * H * G * splits * DV;
  float* sums = tops + (int64_t)rows * H * G * splits;
  const float factor = SCALE * 1.4426950408889634f;

  // Query heads g and g + 8; words 2s and 2s + 1 of a chunk of 32 dimensions are this lane's part of product s.
  uint32_t qa[C][2][4];
  #pragma unroll
  for (int c = 0; c < C; c++)
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (g + 8 * high < G)
        x = *reinterpret_cast<const uint4*>(q + ((int64_t)(row * H + head) * G + g + 8 * high) * D + c * 32 + t * 8);
      qa[c][0][high] = x.x;
      qa[c][0][high + 2] = x.y;
      qa[c][1][high] = x.z;
      qa[c][1][high + 2] = x.w;
    }

  float acc[HV][8][4], top[2] = {none, none}, sum[2] = {0, 0};
  #pragma unroll
  for (int h = 0; h < HV; h++)
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
      if (lane < D / 8)
        reinterpret_cast<uint4*>(keys + own * D)[lane] =
            reinterpret_cast<const uint4*>(new_k + (int64_t)(row * H + head) * D)[lane];
      if (lane < DV / 8)
        reinterpret_cast<uint4*>(values + own * DV)[lane] =
            reinterpret_cast<const uint4*>(new_v + (int64_t)(row * H + head) * DV)[lane];
      __syncwarp();
    }

    uint4 key[2][C], value[HV][4];
    #pragma unroll
    for (int j = 0; j < 2; j++)
      #pragma unroll
      for (int c = 0; c < C; c++)
        key[j][c] = *reinterpret_cast<const uint4*>(keys + (slot + j * 8 + g) * D + c * 32 + t * 8);
    #pragma unroll
    for (int h = 0; h < HV; h++)
      #pragma unroll
      for (int r = 0; r < 4; r++) {
        const int64_t token = slot + 2 * t + (r & 1) + (r >> 1) * 8;
        value[h][r] = *reinterpret_cast<const uint4*>(values + token * DV + h * 64 + g * 8);
      }

    float s[2][4];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      #pragma unroll
      for (int i = 0; i < 4; i++) s[j][i] = 0;
      #pragma unroll
      for (int c = 0; c < C; c++) {
        mma<T>(s[j], qa[c][0], key[j][c].x, key[j][c].y);
        mma<T>(s[j], qa[c][1], key[j][c].z, key[j][c].w);
      }
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = start + j * 8 + 2 * t + (i & 1);
        const bool seen = position <= query && (position > query - window || position < keep);
        s[j][i] = seen ? s[j][i] * factor : none;
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
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int i = 2 * high; i < 2 * high + 2; i++) {
          s[j][i] = s[j][i] == none ? 0.0f : exp2f(s[j][i] - highest);
          sum[high] += s[j][i];
        }
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
      #pragma unroll
      for (int h = 0; h < HV; h++)
        #pragma unroll
        for (int j = 0; j < 8; j++)
          #pragma unroll
          for (int i = 0; i < 4; i++) acc[h][j][i] *= shrink[i >> 1];
    }

    const uint32_t w[4] = {
        pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]), pack<T>(s[1][0], s[1][1]), pack<T>(s[1][2], s[1][3])};
    #pragma unroll
    for (int h = 0; h < HV; h++) {
      const uint32_t* v0 = reinterpret_cast<const uint32_t*>(&value[h][0]);
      const uint32_t* v1 = reinterpret_cast<const uint32_t*>(&value[h][1]);
      const uint32_t* v2 = reinterpret_cast<const uint32_t*>(&value[h][2]);
      const uint32_t* v3 = reinterpret_cast<const uint32_t*>(&value[h][3]);
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        const unsigned halves = j % 2 ? 0x7632 : 0x5410;
        mma<T>(acc[h][j], w, __byte_perm(v0[j / 2], v1[j / 2], halves), __byte_perm(v2[j / 2], v3[j / 2], halves));
      }
    }
  }

  __shared__ float shared_acc[4][G][DV], shared_top[4][G], shared_sum[4][G];
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    const int head_of = g + 8 * high;
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 1);
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 2);
    if (head_of < G) {
      if (t == 0) {
        shared_top[warp][head_of] = top[high];
        shared_sum[warp][head_of] = sum[high];
      }
      #pragma unroll
      for (int h = 0; h < HV; h++)
        #pragma unroll
        for (int j = 0; j < 8; j++)
          #pragma unroll
          for (int i = 0; i < 2; i++)
            shared_acc[warp][head_of][h * 64 + (2 * t + i) * 8 + j] = acc[h][j][2 * high + i];
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < G * DV; index += 128) {
    const int head_of = index / DV, d = index % DV;
    float highest = none, total = 0, joined = 0;
    for (int w = 0; w < 4; w++) highest = max(highest, shared_top[w][head_of]);
    for (int w = 0; w < 4; w++) {
      const float shrink = shared_top[w][head_of] == none ? 0.0f : exp2f(shared_top[w][head_of] - highest);
      total += shared_sum[w][head_of] * shrink;
      joined += shared_acc[w][head_of][d] * shrink;
    }
    const int64_t place = ((int64_t)(row * H + head) * G + head_of) * splits + part;
    parts[place * DV + d] = joined;
    if (d == 0) {
      tops[place] = highest;
      sums[place] = total;
    }
  }

"""
)
SOURCE += (
    LAST
    + """\
  for (int index = threadIdx.x; index < G * DV / 4; index += 128) {
    const int head_of = index / (DV / 4), d = index % (DV / 4) * 4, query_head = head * G + head_of;
    const int64_t place = ((int64_t)row * H * G + query_head) * splits;
    const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : none;
    float highest = sink;
    for (int s = 0; s < splits; s++) highest = max(highest, __ldcg(tops + place + s));
    float total = SINKS ? exp2f(sink - highest) : 0.0f;
    float4 result = make_float4(0, 0, 0, 0);
    #pragma unroll 4
    for (int s = 0; s < splits; s++) {
      const float top_of = __ldcg(tops + place + s);
      const float shrink = top_of == none ? 0.0f : exp2f(top_of - highest);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(parts + (place + s) * DV + d));
      total += __ldcg(sums + place + s) * shrink;
      result.x += x.x * shrink;
      result.y += x.y * shrink;
      result.z += x.z * shrink;
      result.w += x.w * shrink;
    }
    T* to = out + ((int64_t)row * H * G + query_head) * DV + d;
    to[0] = T(result.x / total);
    to[1] = T(result.y / total);
    to[2] = T(result.z / total);
    to[3] = T(result.w / total);
  }
"""
)

NAMES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
Constants = tuple[tuple[str, int | float | bool], ...]


@cache
def _kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    """One for every shape: with MLX's template arguments the whole source would be made anew for every call."""
    return mx.fast.cuda_kernel(
        name=f"onekv_decode_{kernel_name(dtype, constants)}",
        input_names=["q", "k", "v", "new_k", "new_v", "blocks", "lengths", "counters", "sinks"],
        output_names=["out", "scratch"],
        header=HEADER + define(dtype, constants),
        source=SOURCE,
    )


@cache
def zero_counters(count: int) -> mx.array:
    counters = mx.zeros(count, mx.int32)
    mx.eval(counters)
    return counters


def kernel_name(dtype: mx.Dtype, constants: Constants) -> str:
    values = "_".join(f"{value:.9g}" if isinstance(value, float) else str(int(value)) for _, value in constants)
    return f"{NAMES[dtype]}_{values}".replace(".", "p").replace("-", "m").replace("+", "")


def define(dtype: mx.Dtype, constants: Constants) -> str:
    kinds = {bool: "bool", int: "int64_t", float: "float"}
    lines = [f"constexpr {kinds[type(value)]} {name} = {str(value).lower()};" for name, value in constants]
    return "\n".join((f"using T = {NAMES[dtype]};", *lines, ""))


def supported(arrays: LayerArrays, block_size: int) -> bool:
    """Whether the kernels can read these arrays."""
    k_dim, v_dim = arrays.k.shape[2], arrays.v.shape[2]
    fits = 0 < k_dim <= 256 and k_dim % 32 == 0 and 0 < v_dim <= 256 and v_dim % 64 == 0 and block_size % 16 == 0
    return mx.cuda.is_available() and fits and arrays.k.dtype in (mx.bfloat16, mx.float16)


def cuda_decode(
    queries: mx.array,
    arrays: LayerArrays,
    new: tuple[mx.array, mx.array] | None,
    grid: Grid,
    lengths: mx.array,
    reach: tuple[int, int],
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim] at positions `lengths`; `reach` is (window, kept tokens).

    `new` are the keys and values [rows, heads, 1, dim] of those positions, to be stored; None if they are.
    """
    heads, slots, k_dim = arrays.k.shape
    v_dim, dtype = arrays.v.shape[2], arrays.k.dtype
    rows, query_heads = queries.shape[:2]
    shared = query_heads // heads
    blocks, splits = grid.split(heads, reach, THREAD_BLOCKS, LEAST)
    kernel = _kernel(
        dtype,
        (
            ("H", heads),
            ("G", shared),
            ("D", k_dim),
            ("DV", v_dim),
            ("BS", grid.block_size),
            ("SLOTS", slots),
            ("SCALE", float(scale)),
            ("NEW", new is not None),
            ("SINKS", sinks is not None),
        ),
    )
    new_k, new_v = new if new is not None else (queries, queries)
    counters = zero_counters(rows * heads)
    out: mx.array = kernel(
        inputs=[
            queries.astype(dtype),
            arrays.k,
            arrays.v,
            new_k.astype(dtype),
            new_v.astype(dtype),
            blocks,
            lengths,
            counters,
            counters if sinks is None else sinks,
        ],
        grid=(splits * THREADS, heads, rows),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, query_heads, 1, v_dim), (rows * query_heads * splits * (v_dim + 2),)],
        output_dtypes=[dtype, mx.float32],
    )[0]
    return out.astype(queries.dtype)

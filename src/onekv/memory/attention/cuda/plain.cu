  constexpr int C = D / 32, HV = DV / 64, TILES = BS / 16;
  const float none = __int_as_float(0xff800000);
#include "place.cu"
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

#include "last.cu"
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

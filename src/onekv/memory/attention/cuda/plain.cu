  constexpr int C = D / 32, HV = DV / 64, TILES = BS / 16;
  // Rows whose queries fit one tile; a piece has at most four such tiles.
  constexpr int FIT = 16 / G, MOST = 4 * FIT;
  const float none = __int_as_float(0xff800000);
#include "place.cu"
  T* keys = const_cast<T*>(k);
  T* values = const_cast<T*>(v);
  const int tiles = count * TILES;
  float* parts = scratch;
  float* tops = parts + (int64_t)all_parts * H * G * DV;
  float* sums = tops + (int64_t)all_parts * H * G;
  const float factor = SCALE * 1.4426950408889634f;

  // Warps that have the same queries share the tokens, those that have others read the same.
  const int query_tiles = many > 2 * FIT ? 4 : many > FIT ? 2 : 1;
  const int query_tile = warp % query_tiles, lanes = 4 / query_tiles;
  int64_t own_query[2];
  int query[2], latest = -1, earliest = 1 << 30;
  bool there[2];
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    const int index = g + 8 * high, member = query_tile * FIT + index / G;
    there[high] = index < FIT * G && member < many;
    const int row = there[high] ? rows[member] : 0;
    own_query[high] = ((int64_t)row * H + head) * G + index % G;
    query[high] = lengths[row];
    if (there[high]) {
      latest = max(latest, query[high]);
      earliest = min(earliest, query[high]);
    }
  }
  latest = __reduce_max_sync(0xffffffffu, latest);
  earliest = __reduce_min_sync(0xffffffffu, earliest);
  // Queries that are not there see what the others see, so that their sums need no care.
  for (int high = 0; high < 2; high++)
    if (!there[high]) query[high] = latest;

  // Queries g and g + 8; words 2s and 2s + 1 of a chunk of 32 dimensions are this lane's part of product s.
  uint32_t qa[C][2][4];
  #pragma unroll
  for (int c = 0; c < C; c++)
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (there[high]) x = *reinterpret_cast<const uint4*>(q + own_query[high] * D + c * 32 + t * 8);
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

  for (int tile = warp / query_tiles; tile < tiles; tile += lanes) {
    const int start = base[tile / TILES] + tile % TILES * 16;
    if (start > latest || (start + 15 <= earliest - WINDOW && start >= KEEP)) continue;
    const int64_t slot = (int64_t)head * SLOTS + (int64_t)ids[tile / TILES] * BS + tile % TILES * 16;

    // What is written is read by its own row alone.
    if (NEW && many == 1 && latest < start + 16) {
      const int64_t own = slot + latest - start, from = (int64_t)rows[0] * H + head;
      if (lane < D / 8)
        reinterpret_cast<uint4*>(keys + own * D)[lane] =
            reinterpret_cast<const uint4*>(new_k + from * D)[lane];
      if (lane < DV / 8)
        reinterpret_cast<uint4*>(values + own * DV)[lane] =
            reinterpret_cast<const uint4*>(new_v + from * DV)[lane];
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
        const bool seen = position <= query[i >> 1] && (position > query[i >> 1] - WINDOW || position < KEEP);
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

  // Rows of an odd length: no two lanes write to the same bank.
  __shared__ float shared_acc[4][16][65], shared_top[4][16], shared_sum[4][16];
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 1);
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 2);
    if (t == 0) {
      shared_top[warp][g + 8 * high] = top[high];
      shared_sum[warp][g + 8 * high] = sum[high];
    }
  }
  #pragma unroll
  for (int h = 0; h < HV; h++) {
    __syncthreads();
    #pragma unroll
    for (int high = 0; high < 2; high++)
      #pragma unroll
      for (int j = 0; j < 8; j++)
        #pragma unroll
        for (int i = 0; i < 2; i++) shared_acc[warp][g + 8 * high][(2 * t + i) * 8 + j] = acc[h][j][2 * high + i];
    __syncthreads();
    for (int index = threadIdx.x; index < many * G * 64; index += 128) {
      const int d = index % 64, member = index / 64 / G, tile_of = member / FIT;
      const int place_of = member % FIT * G + index / 64 % G;
      float highest = none, total = 0, joined = 0;
      for (int w = tile_of; w < 4; w += query_tiles) highest = max(highest, shared_top[w][place_of]);
      for (int w = tile_of; w < 4; w += query_tiles) {
        const float shrink = shared_top[w][place_of] == none ? 0.0f : exp2f(shared_top[w][place_of] - highest);
        total += shared_sum[w][place_of] * shrink;
        joined += shared_acc[w][place_of][d] * shrink;
      }
      const int64_t place = ((int64_t)(first_part + member) * H + head) * G + index / 64 % G;
      parts[place * DV + h * 64 + d] = joined;
      if (h == 0 && d == 0) {
        tops[place] = highest;
        sums[place] = total;
      }
    }
  }

#include "last.cu"
  for (int index = threadIdx.x; index < many * G * (DV / 4); index += 128) {
    const int member = index / (DV / 4) / G, d = index % (DV / 4) * 4, query_head = head * G + index / (DV / 4) % G;
    if (!last[member]) continue;
    const int* range = work + work[4] + rows[member];
    const int* order = work + work[5];
    const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : none;
    float highest = sink;
    for (int i = range[0]; i < range[1]; i++)
      highest = max(highest, __ldcg(tops + (int64_t)order[i] * H * G + query_head));
    float total = SINKS ? exp2f(sink - highest) : 0.0f;
    float4 result = make_float4(0, 0, 0, 0);
    #pragma unroll 4
    for (int i = range[0]; i < range[1]; i++) {
      const int64_t place = (int64_t)order[i] * H * G + query_head;
      const float top_of = __ldcg(tops + place);
      const float shrink = top_of == none ? 0.0f : exp2f(top_of - highest);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(parts + place * DV + d));
      total += __ldcg(sums + place) * shrink;
      result.x += x.x * shrink;
      result.y += x.y * shrink;
      result.z += x.z * shrink;
      result.w += x.w * shrink;
    }
    T* to = out + ((int64_t)rows[member] * H * G + query_head) * DV + d;
    to[0] = T(result.x / total);
    to[1] = T(result.y / total);
    to[2] = T(result.z / total);
    to[3] = T(result.w / total);
  }

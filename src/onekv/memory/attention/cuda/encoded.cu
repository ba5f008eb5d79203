  constexpr int TILES = BS / 16, QUERIES = CENTRE ? 8 : 16, SETS = TOGETHER ? 4 : 1;
  // Rows whose queries fit one tile; a piece has at most four such tiles.
  constexpr int FIT = QUERIES / G, MOST = TOGETHER ? 4 * FIT : SEVERAL ? FIT : 1;
  const float none = __int_as_float(0xff800000), norm = 0.08838834764831845f;
#include "place.cu"
  const Codes keys = {reinterpret_cast<const uint8_t*>(k), k_scale, k_bias};
  const Codes values = {reinterpret_cast<const uint8_t*>(v), v_scale, v_bias};
  const int tiles = count * TILES;
  float* parts = scratch;
  float* tops = parts + (int64_t)all_parts * H * G * 128;
  float* sums = tops + (int64_t)all_parts * H * G;
  float* moves = sums + (int64_t)all_parts * H * G;
  const float factor = SCALE * 1.4426950408889634f;
#include "queries.cu"

  // Rows of an odd length: no two lanes write to the same bank.
  __shared__ float shared_acc[4][QUERIES][65], shared_top[4][QUERIES], shared_sum[4][QUERIES], shared_move[4][QUERIES];
  __shared__ float query_sum[SETS * QUERIES];
  __shared__ uint32_t k_words[256], v_words[256];
  __shared__ __align__(16) T rotated[SETS * QUERIES * 128];
  // Of centres: the factors of two pairs, cosines and sines of four pairs 0 to 15 positions on, the new token's own.
  __shared__ __align__(16) float4 pair_factors[CENTRE ? SETS : 1][CENTRE ? 8 : 1][32];
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
  if (CENTRE) {
    const float* channels = rope + 64;
    for (int i = threadIdx.x; i < query_tiles * 256; i += 128) {
      const int lane_of = i % 32, chunk = i / 32 % 8, pair_of = lane_of % 4 * 16 + chunk * 2;
      const int index = lane_of / 4, member = i / 256 * FIT + index / G;
      float both[4] = {0, 0, 0, 0};
      if (index < FIT * G && member < many)
        for (int p = 0; p < 2; p++) {
          const T* own = q + (((int64_t)rows[member] * H + head) * G + index % G) * 128;
          const float x = float(own[int(channels[pair_of + p])]), y = float(own[int(channels[64 + pair_of + p])]);
          const float m = centre[head * 128 + pair_of + p], n = centre[head * 128 + 64 + pair_of + p];
          both[2 * p] = fmaf(x, m, y * n);
          both[2 * p + 1] = fmaf(y, m, -x * n);
        }
      pair_factors[i / 256][chunk][lane_of] = make_float4(both[0], both[1], both[2], both[3]);
      if (i >= 256) continue;
      const int token = chunk / 4 * 8 + lane_of / 4;
      const float* from = rope + 192 + (token * 64 + lane_of % 4 * 16 + chunk % 4 * 4) * 2;
      steps[chunk][lane_of] = make_uint4(
          pack<T>(from[0], from[1]), pack<T>(from[2], from[3]), pack<T>(from[4], from[5]), pack<T>(from[6], from[7]));
    }
  }
  float* space = &shared_acc[0][0][0];
  for (int set = 0; set < query_tiles; set++) {
    const int own = max(0, min(FIT, many - set * FIT)) * G;
    for (int i = threadIdx.x; i < own * 128; i += 128) {
      const int64_t row = rows[set * FIT + i / 128 / G];
      space[i] = float(q[((row * H + head) * G + i / 128 % G) * 128 + i % 128]) * signs[i % 128];
    }
    transform(space, own);
    for (int i = threadIdx.x; i < own * 128; i += 128) rotated[set * QUERIES * 128 + i] = T(space[i] * norm);
    __syncthreads();
  }
  for (int i = warp; i < query_tiles * QUERIES; i += 4) {
    float total = 0;
    for (int d = lane; d < 128; d += 32) total += float(rotated[i * 128 + d]);
    total = reduce_sum(total);
    if (lane == 0) query_sum[i] = total;
  }
  __syncthreads();

  // Lane t has the dimensions [32 t, 32 t + 32) of a row: those of chunk c are 8 of them.
  uint32_t qa[4][2][4];
  float total_of[2] = {0, 0};
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    const int own = query_tile * QUERIES + g + 8 * high;
    if (there[high]) total_of[high] = query_sum[own];
    #pragma unroll
    for (int c = 0; c < 4; c++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (there[high]) x = *reinterpret_cast<const uint4*>(rotated + own * 128 + t * 32 + c * 8);
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

  for (int tile = following(warp / query_tiles - lanes); tile < tiles; tile = following(tile)) {
    const int start = start_of(tile);
    const int64_t slot = slot_of(tile);

    // What is written is read by its own row alone.
    if (NEW && many == 1 && latest < start + 16) {
      const int64_t own = slot + latest - start, from = ((int64_t)rows[0] * H + head) * 128;
      if (CENTRE) centre_at(own_centre, latest, centre + head * 128, rope);
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
        const float4 x = pair_factors[query_tile][2 * c][lane], y = pair_factors[query_tile][2 * c + 1][lane];
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
        const bool seen = position <= query[i >> 1] && (position > query[i >> 1] - WINDOW || position < KEEP);
        float score = fmaf(s[j][i], k_scales[i & 1], total_of[i >> 1] * k_moves[i & 1]);
        if (CENTRE && position) score += centred[j][i];
        s[j][i] = seen ? __fmul_rn(score, factor) : none;
      }
    }

    float shrink[2];
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      float highest = max(max(s[0][2 * high], s[0][2 * high + 1]), max(s[1][2 * high], s[1][2 * high + 1]));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      highest = max(highest, top[high]);
      shrink[high] = top[high] == none ? 0.0f : exp2_approx(top[high] - highest);
      top[high] = highest;
      float added = 0, moved = 0;
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int i = 2 * high; i < 2 * high + 2; i++) {
          const float weight = s[j][i] == none ? 0.0f : exp2_approx(s[j][i] - highest);
          added += weight;
          // What lies in slots that are not read may be anything.
          s[j][i] = weight == 0.0f ? 0.0f : weight * v_scales[j][i & 1];
          moved = weight == 0.0f ? moved : fmaf(weight, v_moves[j][i & 1], moved);
        }
      sum[high] = fmaf(sum[high], shrink[high], added);
      move[high] = fmaf(move[high], shrink[high], moved);
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

  #pragma unroll
  for (int high = 0; high < 2; high++) {
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 1);
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 2);
    move[high] += __shfl_xor_sync(0xffffffffu, move[high], 1);
    move[high] += __shfl_xor_sync(0xffffffffu, move[high], 2);
    if (t == 0 && g + 8 * high < QUERIES) {
      shared_top[warp][g + 8 * high] = top[high];
      shared_sum[warp][g + 8 * high] = sum[high];
      shared_move[warp][g + 8 * high] = move[high];
    }
  }
  // Half h has every other eight of the dimensions.
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    __syncthreads();
    #pragma unroll
    for (int high = 0; high < 2; high++)
      if (g + 8 * high < QUERIES) {
        #pragma unroll
        for (int j = 0; j < 8; j++)
          #pragma unroll
          for (int i = 0; i < 2; i++) shared_acc[warp][g + 8 * high][(2 * t + i) * 8 + j] = acc[h][j][2 * high + i];
      }
    __syncthreads();
    for (int index = threadIdx.x; index < many * G * 64; index += 128) {
      const int d = index % 64, member = index / 64 / G, tile_of = member / FIT;
      const int place_of = member % FIT * G + index / 64 % G;
      float highest = none, total = 0, moved = 0, joined = 0;
      for (int w = tile_of; w < 4; w += query_tiles) highest = max(highest, shared_top[w][place_of]);
      for (int w = tile_of; w < 4; w += query_tiles) {
        const float shrink = shared_top[w][place_of] == none ? 0.0f : exp2_approx(shared_top[w][place_of] - highest);
        total = fmaf(shared_sum[w][place_of], shrink, total);
        moved = fmaf(shared_move[w][place_of], shrink, moved);
        joined = fmaf(shared_acc[w][place_of][d], shrink, joined);
      }
      const int64_t place = ((int64_t)(first_part + member) * H + head) * G + index / 64 % G;
      parts[place * 128 + d / 8 * 16 + h * 8 + d % 8] = joined;
      if (h == 0 && d == 0) {
        tops[place] = highest;
        sums[place] = total;
        moves[place] = moved;
      }
    }
  }

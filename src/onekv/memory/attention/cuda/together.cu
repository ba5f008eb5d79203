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

#include "queries.cu"

  // What is written is read by its own row alone: it is there before anything is loaded.
  if (NEW && many == 1) {
    int block = count - 1;
    while (block > 0 && base[block] > latest) block--;
    const int at = latest - base[block];
    if (warp == 0 && at >= 0 && at < BS) {
      const int64_t own = (int64_t)head * k_shape[1] + (int64_t)ids[block] * BS + at, from = (int64_t)rows[0] * H + head;
      if (lane < D / 8)
        reinterpret_cast<uint4*>(keys + own * D)[lane] = turned(new_k + from * D, lane * 8, turns + rows[0] * ROPE);
      if (lane < DV / 8)
        reinterpret_cast<uint4*>(values + own * DV)[lane] =
            reinterpret_cast<const uint4*>(new_v + from * DV)[lane];
    }
    __syncthreads();
  }

  // All warps read the same tokens, from shared memory: N tiles of 16 at a time, a stage, while the next ones are
  // copied there. A token's row has one word of 16 bytes more than it needs, so that eight rows, from which a matrix is
  // loaded, are in different banks.
  constexpr int N = AHEAD, WIDE = D / 8, WIDE_V = DV / 8, KEY_WORDS = 16 * (WIDE + 1), VALUE_WORDS = 16 * (WIDE_V + 1);
  constexpr int WORDS = N * (KEY_WORDS + VALUE_WORDS);
  // As much as two warps hand to two others in the end.
  constexpr int HANDED = HV * 32 + 4, HANDED_WORDS = 2 * HANDED * 32 / 4;
  __shared__ __align__(16) uint4 staged[STAGES * WORDS > HANDED_WORDS ? STAGES * WORDS : HANDED_WORDS];
  const T* own_keys = keys + (int64_t)head * k_shape[1] * D + threadIdx.x * 8;
  const T* own_values = values + (int64_t)head * k_shape[1] * DV + threadIdx.x * 8;
  // A stage may begin in one block and end in another, if it is not IN_ONE. What is behind the last tile is that tile
  // again: it is not seen.
  constexpr bool IN_ONE = TILES % N == 0;
  const auto nth = [&](int stage, int n) { return unsigned(min(stage * N + n, tiles - 1)); };
  int id[N];
  const auto find = [&](int stage) {
    #pragma unroll
    for (int n = 0; n < N; n++) id[n] = n && IN_ONE ? id[0] : ids[nth(stage, n) / TILES];
  };
  const auto copy_rows = [&](uint4* to, const T* from, unsigned wide) {
    #pragma unroll
    for (unsigned first = 0; first < 16 * wide; first += 128) {
      const unsigned i = first + threadIdx.x;
      if (first + 128 <= 16 * wide || i < 16 * wide) copy_ahead(to + i + i / wide, from + first * 8);
    }
  };
  const auto copy = [&](int stage) {
    uint4* to = staged + unsigned(stage) % STAGES * WORDS;
    #pragma unroll
    for (int n = 0; n < N; n++) {
      if (stage * N >= tiles) break;
      const int64_t first = id[0] * BS + nth(stage, 0) % TILES * 16;
      const int64_t slot = IN_ONE ? first + 16 * n : id[n] * BS + nth(stage, n) % TILES * 16;
      copy_rows(to + n * KEY_WORDS, own_keys + slot * D, WIDE);
      copy_rows(to + N * KEY_WORDS + n * VALUE_WORDS, own_values + slot * DV, WIDE_V);
    }
    end_copies();
  };
  for (int stage = 0; stage < STAGES - 1; stage++) {
    find(stage);
    copy(stage);
  }
  find(STAGES - 1);

  // Queries g and g + 8 as the tensor cores want them: a lane loads words of 16 bytes, four lanes exchange parts of
  // them. In the place of a query that is not there comes one of the first row; nobody reads what it gets.
  uint32_t qa[2 * C][4];
  #pragma unroll
  for (int c = 0; c < C; c++)
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      const uint4 word = turned(q + own_query[high] * D, c * 32 + t * 8, turns + own_row[high] * ROPE);
      uint32_t x[4] = {word.x, word.y, word.z, word.w};
      #pragma unroll
      for (int step = 1; step < 4; step *= 2)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          if (i & step) continue;
          const uint32_t other = __shfl_xor_sync(0xffffffffu, t & step ? x[i] : x[i + step], step);
          if (t & step)
            x[i] = other;
          else
            x[i + step] = other;
        }
      #pragma unroll
      for (int i = 0; i < 4; i++) qa[2 * c + i / 2][high + i % 2 * 2] = x[i];
    }

  // A weight is 2 to the score less `top`, which follows the highest score only when that is ahead by more than LAG:
  // sums are seldom rescaled, and weights of up to 2^LAG are as precise as those of up to 1.
  constexpr float LAG = 8, LOWEST = -1e30f;
  float acc[HV * 8][4], top[2] = {LOWEST, LOWEST}, sum[2] = {0, 0};
  #pragma unroll
  for (int j = 0; j < HV * 8; j++)
    #pragma unroll
    for (int i = 0; i < 4; i++) acc[j][i] = 0;
  const auto shrink = [&](int high, float to) {
    const float by = exp2_approx(top[high] - to);
    top[high] = to;
    sum[high] *= by;
    #pragma unroll
    for (int j = 0; j < HV * 8; j++)
      #pragma unroll
      for (int i = 0; i < 2; i++) acc[j][2 * high + i] *= by;
  };

  // Warps with the same queries take turns, one stage each.
  const int turn = warp / query_tiles;
  const uint4* key_rows = staged + (lane / 16 * 8 + lane % 8) * (WIDE + 1) + lane / 8 % 2;
  const uint4* value_rows = staged + N * KEY_WORDS + lane % 16 * (WIDE_V + 1) + lane / 16;
  for (int stage = 0; stage * N < tiles; stage++) {
    int start[N];
    #pragma unroll
    for (int n = 0; n < N; n++) {
      const int tile = stage * N + n;
      start[n] = n && IN_ONE ? start[0] + 16 * n : tile < tiles ? start_of(tile) : 1 << 30;
    }
    const int end = start[N - 1] + 15;
    const bool any = start[0] <= latest && (end > earliest - int(WINDOW) || start[0] < KEEP);
    const bool all = end <= earliest && (start[0] > latest - int(WINDOW) || end < KEEP);
    // What this thread has copied is there, then what all have; and nobody reads the stage before any more.
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    copy(stage + STAGES - 1);
    find(stage + STAGES);
    if (!any || (stage & lanes - 1) != turn) continue;

    // Scores of 16 tokens a tile: this lane has those of two queries for four of them.
    const unsigned at = unsigned(stage) % STAGES * WORDS;
    float s[2 * N][4];
    #pragma unroll
    for (int j = 0; j < 2 * N; j++)
      #pragma unroll
      for (int i = 0; i < 4; i++) s[j][i] = 0;
    #pragma unroll
    for (int c = 0; c < 2 * C; c++)
      #pragma unroll
      for (int n = 0; n < N; n++) {
        uint32_t key[4];
        load_matrices(key, key_rows + at + n * KEY_WORDS + c * 2);
        mma<T>(s[2 * n], qa[c], key[0], key[1]);
        mma<T>(s[2 * n + 1], qa[c], key[2], key[3]);
      }
    if (!all) {
      #pragma unroll
      for (int j = 0; j < 2 * N; j++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int position = start[j / 2] + j % 2 * 8 + 2 * t + (i & 1);
          const bool seen = position <= query[i >> 1] && (position > query[i >> 1] - WINDOW || position < KEEP);
          s[j][i] = seen ? s[j][i] : none;
        }
    }

    // Scores become weights.
    float highest[2];
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      highest[high] = s[0][2 * high];
      #pragma unroll
      for (int i = 1; i < 4 * N; i++) highest[high] = max(highest[high], s[i / 2][2 * high + i % 2]);
      highest[high] *= factor;
    }
    if (__any_sync(0xffffffffu, highest[0] > top[0] + LAG || highest[1] > top[1] + LAG)) {
      #pragma unroll
      for (int high = 0; high < 2; high++) {
        highest[high] = max(highest[high], __shfl_xor_sync(0xffffffffu, highest[high], 1));
        highest[high] = max(highest[high], __shfl_xor_sync(0xffffffffu, highest[high], 2));
        shrink(high, max(highest[high], top[high]));
      }
    }
    #pragma unroll
    for (int j = 0; j < 2 * N; j++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        s[j][i] = exp2_approx(s[j][i] * factor - top[i >> 1]);
        sum[i >> 1] += s[j][i];
      }

    // Values are added with them.
    #pragma unroll
    for (int n = 0; n < N; n++) {
      const float(*x)[4] = s + 2 * n;
      const uint32_t w[4] = {
          pack<T>(x[0][0], x[0][1]), pack<T>(x[0][2], x[0][3]), pack<T>(x[1][0], x[1][1]), pack<T>(x[1][2], x[1][3])};
      #pragma unroll
      for (int j = 0; j < HV * 4; j++) {
        uint32_t value[4];
        load_transposed(value, value_rows + at + n * VALUE_WORDS + j * 2);
        mma<T>(acc[2 * j], w, value[0], value[1]);
        mma<T>(acc[2 * j + 1], w, value[2], value[3]);
      }
    }
  }

  #pragma unroll
  for (int high = 0; high < 2; high++) {
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 1);
    sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 2);
  }
  // Nothing is left in flight; what was staged is no longer needed. Half of the warps that have the same queries hand
  // what they have to the other half, until one of them has it all.
  wait_for_copies<0>();
  float* handed = reinterpret_cast<float*>(staged) + lane;
  for (int half = lanes / 2; half; half /= 2) {
    __syncthreads();
    if (turn >= half && turn < 2 * half) {
      float* to = handed + (warp - half * query_tiles) * HANDED * 32;
      #pragma unroll
      for (int high = 0; high < 2; high++) {
        to[high * 32] = top[high];
        to[(2 + high) * 32] = sum[high];
      }
      #pragma unroll
      for (int i = 0; i < HV * 32; i++) to[(4 + i) * 32] = acc[i / 4][i % 4];
    }
    __syncthreads();
    if (turn < half) {
      const float* from = handed + warp * HANDED * 32;
      #pragma unroll
      for (int high = 0; high < 2; high++) {
        const float other = from[high * 32];
        shrink(high, max(top[high], other));
        const float by = exp2_approx(other - top[high]);
        sum[high] += from[(2 + high) * 32] * by;
        #pragma unroll
        for (int j = 0; j < HV * 8; j++)
          #pragma unroll
          for (int i = 2 * high; i < 2 * high + 2; i++) acc[j][i] += from[(4 + j * 4 + i) * 32] * by;
      }
    }
  }
  if (turn > 0) return;
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    if (!there[high]) continue;
    const int index = g + 8 * high, member = query_tile * FIT + index / G;
    const int64_t place = ((int64_t)(first_part + member) * H + head) * G + index % G;
    #pragma unroll
    for (int j = 0; j < HV * 8; j++)
      *reinterpret_cast<float2*>(parts + place * DV + j * 8 + 2 * t) =
          make_float2(acc[j][2 * high], acc[j][2 * high + 1]);
    if (t == 0) {
      tops[place] = top[high];
      sums[place] = sum[high];
    }
  }

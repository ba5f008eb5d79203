  // One block per piece of work and KV head. plain.py explains how the lanes of a warp divide the work.
  constexpr int TOKENS = QUERIES == 1 ? 8 : QUERIES == 8 ? 2 : 4, TILE = 4 * TOKENS, OWN = QUERIES * TOKENS / 8;
  constexpr int SAME = 8 / QUERIES, K_VECTORS = D / VECTOR, K_ROUNDS = (K_VECTORS + 7) / 8;
  constexpr int V_FOURS = DV / 4, V_LANES = V_FOURS > 16 ? 32 : V_FOURS > 8 ? 16 : 8;
  constexpr int V_ROUNDS = (V_FOURS + V_LANES - 1) / V_LANES, WIDTH = V_ROUNDS * 4;
  // How many queries' sums fit in shared memory when they are joined.
  constexpr int FIT = SPACE / (WARPS * DV), ROUND = FIT < QUERIES ? FIT : QUERIES;
  SHARED float4 vectors[SPACE / 4];
  SHARED float weights[WARPS][TILE * QUERIES], shrinks[WARPS][QUERIES];
  SHARED float warp_tops[WARPS][QUERIES], warp_sums[WARPS][QUERIES];
  SHARED_AT float* space = (SHARED_AT float*)vectors;

  if (block_x >= work[0]) return;
  const int head = block_y;
  const DEVICE int* piece = work + 8 + block_x * 5;
  const DEVICE int* rows = work + work[1] + piece[2];
  const DEVICE int* ids = work + work[2] + piece[0];
  const DEVICE int* base = work + work[3] + piece[0];
  const int tokens = piece[1] * BS, many = TOGETHER ? piece[3] : 1, count = many * G;
  const int64_t first_slot = (int64_t)head * SLOTS, new_row = (int64_t)rows[0] * H + head;

  // Warps with the same queries split the tokens; warps with different queries read the same ones.
  const int query_tiles = count > 2 * QUERIES ? 4 : count > QUERIES ? 2 : 1;
  const int query_tile = warp % query_tiles, slices = WARPS / query_tiles;
  int latest = -1, earliest = 1 << 30;
  if (lane < many) latest = earliest = lengths[rows[lane]];
  latest = largest_of_lanes(latest);
  earliest = smallest_of_lanes(earliest);
  // The new token is read from new_k and new_v, since it may not be in the pool yet. No other row reads its block.
  const int new_at = NEW && many == 1 ? latest : -1;

  // Missing queries are zeros.
  for (int i = thread_index; i < query_tiles * QUERIES * D; i += WARPS * 32) {
    const int index = i / D;
    float x = 0;
    if (index < count) x = float(q[(((int64_t)rows[index / G] * H + head) * G + index % G) * D + i % D]);
    space[i] = x * (SCALE * 1.4426950408889634f);
  }
  block_barrier();

  const int group = lane / 8, part = lane % 8, own_query = part * OWN / TOKENS;
  const int own_index = query_tile * QUERIES + own_query;
  const int own_at = own_index < count ? lengths[rows[own_index / G]] : latest;
  const int v_lane = lane % V_LANES, v_group = lane / V_LANES;
  float top = NONE, sum = 0, acc[QUERIES][WIDTH];
  #pragma unroll
  for (int j = 0; j < QUERIES; j++)
    #pragma unroll
    for (int e = 0; e < WIDTH; e++) acc[j][e] = 0;

  for (int start = warp / query_tiles * TILE; start < tokens; start += slices * TILE) {
    // This lane's tokens: every fourth. All are loaded, so that no load waits for a branch; those that no query sees
    // are masked afterwards.
    const DEVICE T* key_rows[TOKENS];
    bool some = false;
    #pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      const int token = start + i * 4 + group, safe = token < tokens ? token : 0;
      const int position = base[safe / BS] + safe % BS;
      const int64_t slot = first_slot + (int64_t)ids[safe / BS] * BS + safe % BS;
      some = some || (token < tokens && is_read<WINDOW, KEEP>(position, earliest, latest));
      key_rows[i] = k + slot * D;
      if (position == new_at) {
        key_rows[i] = new_k + new_row * D;
        if (query_tile == 0 && token < tokens) {
          for (int n = part; n < K_VECTORS; n += 8)
            ((DEVICE uint4*)(k + slot * D))[n] = ((const DEVICE uint4*)(new_k + new_row * D))[n];
          for (int n = part; n < DV / VECTOR; n += 8)
            ((DEVICE uint4*)(v + slot * DV))[n] = ((const DEVICE uint4*)(new_v + new_row * DV))[n];
        }
      }
    }
    if (!any_lane(some)) continue;

    // An eighth of the scores of these tokens, for all queries.
    float s[QUERIES * TOKENS];
    #pragma unroll
    for (int i = 0; i < QUERIES * TOKENS; i++) s[i] = 0;
    #pragma unroll
    for (int round = 0; round < K_ROUNDS; round++) {
      const bool inside = round * 8 + part < K_VECTORS;
      const int offset = inside ? (round * 8 + part) * VECTOR : 0;
      float key[TOKENS][VECTOR];
      #pragma unroll
      for (int i = 0; i < TOKENS; i++) load_16_bytes(key_rows[i] + offset, key[i]);
      #pragma unroll
      for (int j = 0; j < QUERIES; j++)
        #pragma unroll
        for (int n = 0; n < VECTOR / 4; n++) {
          const float4 x = vectors[((query_tile * QUERIES + j) * D + offset) / 4 + n];
          #pragma unroll
          for (int i = 0; i < TOKENS; i++) {
            const float product = x.x * key[i][4 * n] + x.y * key[i][4 * n + 1] + x.z * key[i][4 * n + 2] +
                                  x.w * key[i][4 * n + 3];
            s[j * TOKENS + i] += inside ? product : 0.0f;
          }
        }
    }

    // Complete scores: each lane has those of one query, for OWN tokens.
    halve<OWN * 4>(s, lane, 4);
    halve<OWN * 2>(s, lane, 2);
    halve<OWN>(s, lane, 1);
    float highest = top;
    #pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int token = start + (part * OWN + i) % TOKENS * 4 + group, safe = token < tokens ? token : 0;
      const bool seen = token < tokens && is_read<WINDOW, KEEP>(base[safe / BS] + safe % BS, own_at, own_at);
      s[i] = seen ? s[i] : NONE;
      highest = larger(highest, s[i]);
    }
    #pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
      if (bit < SAME || bit >= 8) highest = larger(highest, shuffle_xor(highest, bit));
    const float shrink = top == NONE ? 0.0f : power_of_2(top - highest);
    const bool shrunk = any_lane(shrink != 1.0f);
    top = highest;
    sum *= shrink;
    #pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float weight = s[i] == NONE ? 0.0f : power_of_2(s[i] - highest);
      weights[warp][((part * OWN + i) % TOKENS * 4 + group) * QUERIES + own_query] = weight;
      sum += weight;
    }
    if (group == 0 && part % SAME == 0) shrinks[warp][own_query] = shrink;
    lanes_barrier();

    if (shrunk) {
      #pragma unroll
      for (int j = 0; j < QUERIES; j++) {
        const float factor = shrinks[warp][j];
        #pragma unroll
        for (int e = 0; e < WIDTH; e++) acc[j][e] *= factor;
      }
    }
    // If rows are short, several are read at a time.
    #pragma unroll 8
    for (int first = 0; first < TILE; first += 32 / V_LANES) {
      const int in_tile = first + v_group, token = start + in_tile, safe = token < tokens ? token : 0;
      const int position = base[safe / BS] + safe % BS;
      const int64_t slot = first_slot + (int64_t)ids[safe / BS] * BS + safe % BS;
      // Slots that no query sees may hold NaN, so a weight of 0 is not enough.
      const bool is_there = token < tokens && is_read<WINDOW, KEEP>(position, earliest, latest);
      const DEVICE T* row = position == new_at ? new_v + new_row * DV : v + slot * DV;
      #pragma unroll
      for (int round = 0; round < V_ROUNDS; round++) {
        const bool inside = round * V_LANES + v_lane < V_FOURS;
        float value[4];
        load_4(row + (inside ? (round * V_LANES + v_lane) * 4 : 0), value);
        #pragma unroll
        for (int e = 0; e < 4; e++) value[e] = inside && is_there ? value[e] : 0.0f;
        #pragma unroll
        for (int j = 0; j < QUERIES; j++) {
          const float weight = weights[warp][in_tile * QUERIES + j];
          #pragma unroll
          for (int e = 0; e < 4; e++) acc[j][round * 4 + e] += weight * value[e];
        }
      }
    }
    lanes_barrier();
  }

  // Sum over the lanes that have the same query, or the same dimensions.
  #pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    if (bit < SAME || bit >= 8) sum += shuffle_xor(sum, bit);
    if (bit >= V_LANES) {
      #pragma unroll
      for (int j = 0; j < QUERIES; j++)
        #pragma unroll
        for (int e = 0; e < WIDTH; e++) acc[j][e] += shuffle_xor(acc[j][e], bit);
    }
  }
  if (group == 0 && part % SAME == 0) {
    warp_tops[warp][own_query] = top;
    warp_sums[warp][own_query] = sum;
  }

  // Join the warps that have the same queries, in the shared memory that held the queries.
  DEVICE float* parts = scratch;
  DEVICE float* tops = parts + (int64_t)work[6] * H * G * DV;
  DEVICE float* sums = tops + (int64_t)work[6] * H * G;
  #pragma unroll
  for (int first = 0; first < QUERIES; first += ROUND) {
    block_barrier();
    #pragma unroll
    for (int j = first; j < first + ROUND && j < QUERIES; j++)
      #pragma unroll
      for (int e = 0; e < WIDTH; e++) {
        const int four = e / 4 * V_LANES + v_lane;
        if (v_group == 0 && four < V_FOURS) space[(warp * ROUND + j - first) * DV + four * 4 + e % 4] = acc[j][e];
      }
    block_barrier();
    for (int i = thread_index; i < query_tiles * ROUND * DV; i += WARPS * 32) {
      const int d = i % DV, tile = i / DV / ROUND, j = first + i / DV % ROUND, index = tile * QUERIES + j;
      if (j >= QUERIES || index >= count) continue;
      float highest = NONE, total = 0, joined = 0;
      for (int w = tile; w < WARPS; w += query_tiles) highest = larger(highest, warp_tops[w][j]);
      for (int w = tile; w < WARPS; w += query_tiles) {
        const float shrink = warp_tops[w][j] == NONE ? 0.0f : power_of_2(warp_tops[w][j] - highest);
        total += warp_sums[w][j] * shrink;
        joined += space[(w * ROUND + j - first) * DV + d] * shrink;
      }
      const int64_t place = ((int64_t)(piece[4] + index / G) * H + head) * G + index % G;
      parts[place * DV + d] = joined;
      if (d == 0) {
        tops[place] = highest;
        sums[place] = total;
      }
    }
  }

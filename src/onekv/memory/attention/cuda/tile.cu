  // Queries g and g + 8; words 2s and 2s + 1 of a chunk of 32 dimensions are this lane's part of product s.
  uint32_t qa[C][2][4];
  #pragma unroll
  for (int c = 0; c < C; c++)
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (there[high]) x = turned(q + own_query[high] * D, c * 32 + t * 8, turns + own_row[high] * ROPE);
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

  // What the scores of 16 tokens from position `start` on are: this lane has those of two queries for four of them.
  const auto score = [&](float (&s)[2][4], const uint4 (&key)[2][C], int start) {
    // Two sums for each score: half as many products wait for the one before.
    float other[2][4];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      #pragma unroll
      for (int i = 0; i < 4; i++) s[j][i] = other[j][i] = 0;
      #pragma unroll
      for (int c = 0; c < C; c++) {
        mma<T>(s[j], qa[c][0], key[j][c].x, key[j][c].y);
        mma<T>(other[j], qa[c][1], key[j][c].z, key[j][c].w);
      }
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = start + j * 8 + 2 * t + (i & 1);
        const bool seen = position <= query[i >> 1] && (position > query[i >> 1] - WINDOW || position < KEEP);
        s[j][i] = seen ? __fmul_rn(s[j][i] + other[j][i], factor) : none;
      }
    }
  };
  // Scores become weights, and values are added with them.
  const auto add = [&](float (&s)[2][4], const uint4 (&value)[HV][4]) {
    float shrink[2];
    #pragma unroll
    for (int high = 0; high < 2; high++) {
      float highest = max(max(s[0][2 * high], s[0][2 * high + 1]), max(s[1][2 * high], s[1][2 * high + 1]));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      highest = max(highest, top[high]);
      shrink[high] = top[high] == none ? 0.0f : exp2_approx(top[high] - highest);
      top[high] = highest;
      float added = 0;
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int i = 2 * high; i < 2 * high + 2; i++) {
          s[j][i] = s[j][i] == none ? 0.0f : exp2_approx(s[j][i] - highest);
          added += s[j][i];
        }
      sum[high] = fmaf(sum[high], shrink[high], added);
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
  };

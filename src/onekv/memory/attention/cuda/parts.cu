  // What the warps have of each query is joined, 64 dimensions at a time in `shared_acc`.
  __shared__ float shared_top[4][16], shared_sum[4][16];
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
        const float shrink = shared_top[w][place_of] == none ? 0.0f : exp2_approx(shared_top[w][place_of] - highest);
        total = fmaf(shared_sum[w][place_of], shrink, total);
        joined = fmaf(shared_acc[w][place_of][d], shrink, joined);
      }
      const int64_t place = ((int64_t)(first_part + member) * H + head) * G + index / 64 % G;
      parts[place * DV + h * 64 + d] = joined;
      if (h == 0 && d == 0) {
        tops[place] = highest;
        sums[place] = total;
      }
    }
  }

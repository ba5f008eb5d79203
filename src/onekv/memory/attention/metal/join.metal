  // One block per row and query head. The warps split the parts of the row, the lanes of a warp the dimensions.
  constexpr int PER_LANE = (DV + 31) / 32;
  SHARED float shared_acc[WARPS][DV], shared_total[WARPS];
  const int row = block_x, query_head = block_y;
  const int begin = work[work[4] + row], end = work[work[4] + row + 1];
  const DEVICE int* order = work + work[5];
  const DEVICE float* parts = scratch;
  const DEVICE float* tops = parts + (int64_t)work[6] * H * G * DV;
  const DEVICE float* sums = tops + (int64_t)work[6] * H * G;

  const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : NONE;
  float highest = sink;
  for (int i = begin + lane; i < end; i += 32)
    highest = larger(highest, tops[(int64_t)order[i] * H * G + query_head]);
  #pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) highest = larger(highest, shuffle_xor(highest, bit));

  float total = 0, acc[PER_LANE];
  #pragma unroll
  for (int n = 0; n < PER_LANE; n++) acc[n] = 0;
  for (int i = begin + warp; i < end; i += WARPS) {
    const int64_t place = (int64_t)order[i] * H * G + query_head;
    const float shrink = tops[place] == NONE ? 0.0f : power_of_2(tops[place] - highest);
    total += sums[place] * shrink;
    #pragma unroll
    for (int n = 0; n < PER_LANE; n++)
      if (n * 32 + lane < DV) acc[n] += parts[place * DV + n * 32 + lane] * shrink;
  }
  #pragma unroll
  for (int n = 0; n < PER_LANE; n++)
    if (n * 32 + lane < DV) shared_acc[warp][n * 32 + lane] = acc[n];
  if (lane == 0) shared_total[warp] = total;
  block_barrier();
  total = SINKS ? power_of_2(sink - highest) : 0.0f;
  for (int w = 0; w < WARPS; w++) total += shared_total[w];
  // A row of padding has read nothing.
  if (total == 0.0f) total = 1.0f;
  for (int d = thread_index; d < DV; d += WARPS * 32) {
    float joined = 0;
    for (int w = 0; w < WARPS; w++) joined += shared_acc[w][d];
    out[((int64_t)row * H * G + query_head) * DV + d] = T(joined / total);
  }

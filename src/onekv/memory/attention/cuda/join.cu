  // One thread block per row and query head: a warp takes every fourth part of the row, a lane two of 64 dimensions.
  constexpr int HV = DV / 64;
  const float none = __int_as_float(0xff800000);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = blockIdx.x, query_head = blockIdx.y;
  const int* range = work + work[4] + row;
  const int* order = work + work[5];
  const float* parts = scratch;
  const float* tops = parts + (int64_t)work[6] * H * G * DV;
  const float* sums = tops + (int64_t)work[6] * H * G;

  const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : none;
  float highest = sink;
  for (int i = range[0] + lane; i < range[1]; i += 32)
    highest = max(highest, tops[(int64_t)order[i] * H * G + query_head]);
  for (int i = 16; i; i /= 2) highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, i));

  float total = 0;
  float2 acc[HV];
  #pragma unroll
  for (int h = 0; h < HV; h++) acc[h] = make_float2(0, 0);
  #pragma unroll 4
  for (int i = range[0] + warp; i < range[1]; i += 4) {
    const int64_t place = (int64_t)order[i] * H * G + query_head;
    const float top = tops[place];
    const float shrink = top == none ? 0.0f : exp2f(top - highest);
    total += sums[place] * shrink;
    #pragma unroll
    for (int h = 0; h < HV; h++) {
      const float2 x = *reinterpret_cast<const float2*>(parts + place * DV + h * 64 + lane * 2);
      acc[h].x += x.x * shrink;
      acc[h].y += x.y * shrink;
    }
  }
  __shared__ float shared_acc[4][DV], shared_total[4];
  #pragma unroll
  for (int h = 0; h < HV; h++) *reinterpret_cast<float2*>(&shared_acc[warp][h * 64 + lane * 2]) = acc[h];
  if (lane == 0) shared_total[warp] = total;
  __syncthreads();
  total = shared_total[0] + shared_total[1] + shared_total[2] + shared_total[3];
  if (SINKS) total += exp2f(sink - highest);
  // A row of padding has read nothing.
  if (total == 0.0f) total = 1.0f;
  for (int d = threadIdx.x; d < DV; d += 128) {
    const float sum = shared_acc[0][d] + shared_acc[1][d] + shared_acc[2][d] + shared_acc[3][d];
    out[((int64_t)row * H * G + query_head) * DV + d] = T(sum / total);
  }

  // Sixteen outputs of all rows for each thread block, OUTS times. Its warps share the inputs, 32 at a time; a lane loads
  // 16 bytes. What comes next is loaded before what is there is multiplied, so that memory is never idle. In which order
  // a number is added up depends on K and WARPS alone: it is the same for any number of rows. Of a gated product (HALF
  // outputs of either side), eight of each side are together, and make eight outputs.
  constexpr int CHUNKS = K / 32, SIDE = HALF ? 8 : 16, APART = HALF ? HALF : 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3, rows = x_shape[0];
  const T* low = weight + (int64_t)(blockIdx.x * OUTS * SIDE + g) * K + t * 8;
  const T* high = low + APART * K;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  float acc[OUTS][TILES][4];
  #pragma unroll
  for (int out = 0; out < OUTS; out++)
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      #pragma unroll
      for (int i = 0; i < 4; i++) acc[out][tile][i] = 0;

  struct Batch {
    uint4 a[BATCH][OUTS], b[BATCH][OUTS], input[BATCH][TILES];
  };
  const auto load = [&](Batch& batch, int start) {
    #pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int at = (start + i * WARPS) * 32;
      const bool there = at < K;
      #pragma unroll
      for (int out = 0; out < OUTS; out++) {
        const int64_t from = (int64_t)out * SIDE * K + at;
        batch.a[i][out] = there ? __ldcs(reinterpret_cast<const uint4*>(low + from)) : zero;
        batch.b[i][out] = there ? __ldcs(reinterpret_cast<const uint4*>(high + from)) : zero;
      }
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const int row = tile * 8 + g;
        const bool real = there && row < rows;
        batch.input[i][tile] = real ? *reinterpret_cast<const uint4*>(x + (int64_t)row * K + at + t * 8) : zero;
      }
    }
  };
  const auto multiply = [&](const Batch& batch) {
    #pragma unroll
    for (int i = 0; i < BATCH; i++)
      #pragma unroll
      for (int out = 0; out < OUTS; out++) {
        const uint4 a = batch.a[i][out], b = batch.b[i][out];
        const uint32_t even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const uint4 input = batch.input[i][tile];
          mma<T>(acc[out][tile], even, input.x, input.y);
          mma<T>(acc[out][tile], odd, input.z, input.w);
        }
      }
  };
  constexpr int STEP = WARPS * BATCH;
  Batch one, two;
  load(one, warp);
  for (int start = warp; start < CHUNKS; start += 2 * STEP) {
    load(two, start + STEP);
    multiply(one);
    load(one, start + 2 * STEP);
    multiply(two);
  }

  // Rows of an odd length: fewer lanes write to the same bank.
  __shared__ float sums[WARPS][16][TILES * 8 + 1];
  #pragma unroll
  for (int out = 0; out < OUTS; out++) {
    if (out > 0) __syncthreads();
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      #pragma unroll
      for (int i = 0; i < 4; i++) sums[warp][g + i / 2 * 8][tile * 8 + 2 * t + i % 2] = acc[out][tile][i];
    __syncthreads();
    const int first = (blockIdx.x * OUTS + out) * SIDE;
    const auto total = [&](int n, int row) {
      float sum = BIAS ? float(bias[first + (n < 8 ? n : APART + n - 8)]) : 0.0f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) sum += sums[w][n][row];
      return T(sum);
    };
    const Place place = place_of(first);
    for (int index = threadIdx.x; index < SIDE * rows; index += WARPS * 32) {
      const int n = index % SIDE, row = index / SIDE;
      T value = total(n, row);
      if (HALF) {
        const float other = float(total(n + 8, row)), gate = SECOND ? other : float(value);
        value = T(gate / (1.0f + expf(-gate)) * (SECOND ? float(value) : other));
      }
      place.to[(int64_t)row * place.width + place.column + n] = value;
    }
  }

  // Sixteen outputs of all rows for each thread block. Its warps share the inputs, 32 at a time; a lane loads 16 bytes.
  // What comes next is loaded before what is there is multiplied, so that memory is never idle.
  constexpr int CHUNKS = K / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3, first = blockIdx.x * 16, rows = x_shape[0];
  const T* low = weight + (int64_t)(first + g) * K + t * 8;
  const T* high = low + 8 * K;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  float acc[TILES][4];
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    #pragma unroll
    for (int i = 0; i < 4; i++) acc[tile][i] = 0;

  struct Batch {
    uint4 a[BATCH], b[BATCH], input[BATCH][TILES];
  };
  const auto load = [&](Batch& batch, int start) {
    #pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int at = (start + i * WARPS) * 32;
      const bool there = at < K;
      batch.a[i] = there ? __ldcs(reinterpret_cast<const uint4*>(low + at)) : zero;
      batch.b[i] = there ? __ldcs(reinterpret_cast<const uint4*>(high + at)) : zero;
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
    for (int i = 0; i < BATCH; i++) {
      const uint4 a = batch.a[i], b = batch.b[i];
      const uint32_t even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const uint4 input = batch.input[i][tile];
        mma<T>(acc[tile], even, input.x, input.y);
        mma<T>(acc[tile], odd, input.z, input.w);
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
  for (int tile = 0; tile < TILES; tile++)
    #pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][g + i / 2 * 8][tile * 8 + 2 * t + i % 2] = acc[tile][i];
  __syncthreads();
  for (int index = threadIdx.x; index < 16 * rows; index += WARPS * 32) {
    const int n = index % 16, row = index / 16;
    float sum = BIAS ? float(bias[first + n]) : 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w][n][row];
    to[(int64_t)row * width + column + n] = T(sum);
  }

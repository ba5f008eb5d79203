  // One thread block per row and query head, one thread for each dimension.
  const float none = __int_as_float(0xff800000), norm = 0.08838834764831845f;
  const int row = blockIdx.x, query_head = blockIdx.y, d = threadIdx.x;
  const int* range = work + work[4] + row;
  const int* order = work + work[5];
  const float* parts = scratch;
  const float* tops = parts + (int64_t)work[6] * H * G * 128;
  const float* sums = tops + (int64_t)work[6] * H * G;
  const float* moves = sums + (int64_t)work[6] * H * G;

  const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : none;
  float highest = sink;
  for (int i = range[0] + d % 32; i < range[1]; i += 32)
    highest = max(highest, tops[(int64_t)order[i] * H * G + query_head]);
  highest = reduce_max(highest);
  float total = SINKS ? exp2f(sink - highest) : 0.0f, moved = 0, result = 0;
  #pragma unroll 4
  for (int i = range[0]; i < range[1]; i++) {
    const int64_t place = (int64_t)order[i] * H * G + query_head;
    const float top = tops[place];
    const float shrink = top == none ? 0.0f : exp2f(top - highest);
    total += sums[place] * shrink;
    moved += moves[place] * shrink;
    result += parts[place * 128 + d] * shrink;
  }
  // A row of padding has read nothing.
  if (total == 0.0f) total = 1.0f;
  __shared__ float space[128];
  space[d] = (result + moved) / total;
  transform(space, 1);
  out[((int64_t)row * H * G + query_head) * 128 + d] = T(space[d] * norm * constants[d]);

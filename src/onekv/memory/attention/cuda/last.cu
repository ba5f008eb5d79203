  __threadfence();
  __syncthreads();
  __shared__ bool last[MOST];
  if (threadIdx.x < many) {
    const int row = rows[threadIdx.x];
    const int* range = work + work[4] + row;
    int* counter = const_cast<int*>(counters) + row * H + head;
    last[threadIdx.x] = atomicAdd(counter, 1) == range[1] - range[0] - 1;
    if (last[threadIdx.x]) *counter = 0;
  }
  __syncthreads();
  __threadfence();

  // What follows is done by the thread block that ends last of its row and head. Several rows of a piece have the same
  // pieces, all of them: the first one counts for all.
  const int row = rows[0];
  __threadfence();
  __syncthreads();
  __shared__ bool last;
  const int* range = work + work[4] + row;
  const int* order = work + work[5];
  if (threadIdx.x == 0) {
    int* counter = const_cast<int*>(counters) + row * H + head;
    last = atomicAdd(counter, 1) == range[1] - range[0] - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int head = blockIdx.y, row = blockIdx.z, part = blockIdx.x;
  const int n = blocks[0], per = blocks[1], splits = blocks[2], window = blocks[3], keep = blocks[4];
  const int rows = blocks[5];
  const int* ids = blocks + 6 + row * n;
  const int* base = ids + rows * n;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  // Thread blocks start in the order of pieces, of all heads: the longest ones first.
  const int head = blockIdx.x;
  if (blockIdx.y >= work[0]) return;
  const int* piece = work + 8 + blockIdx.y * 5;
  const int* rows = work + work[1] + piece[2];
  const int* ids = work + work[2] + piece[0];
  const int* base = work + work[3] + piece[0];
  const int count = piece[1], many = MOST == 1 ? 1 : piece[3], first_part = piece[4], all_parts = work[6];

  // One warp per row and head copies its key and value to their slot; rows without a slot are padding. The positions are
  // an output, so that the kernel that takes them as input runs after this one.
  const int row = block_x, head = block_y;
  if (head == 0 && lane == 0) stored[row] = lengths[row];
  if (slots[row] < 0) return;
  const int64_t from = (int64_t)row * H + head, to = (int64_t)head * SLOTS + slots[row];
  for (int i = lane; i < D / VECTOR; i += 32)
    ((DEVICE uint4*)(k + to * D))[i] = ((const DEVICE uint4*)(new_k + from * D))[i];
  for (int i = lane; i < DV / VECTOR; i += 32)
    ((DEVICE uint4*)(v + to * DV))[i] = ((const DEVICE uint4*)(new_v + from * DV))[i];

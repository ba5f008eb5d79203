  // One warp per row and head: its key and value go to their slot; rows without one are padding. What is given back are
  // the positions, so that whoever takes them from here reads what is stored.
  const int row = blockIdx.x, head = blockIdx.y;
  if (head == 0 && threadIdx.x == 0) stored[row] = lengths[row];
  if (slots[row] < 0) return;
  const int64_t from = (int64_t)row * H + head, to = (int64_t)head * k_shape[1] + slots[row];
  uint4* key = reinterpret_cast<uint4*>(const_cast<T*>(k) + to * D);
  uint4* value = reinterpret_cast<uint4*>(const_cast<T*>(v) + to * DV);
  for (int i = threadIdx.x; i < D / 8; i += 32) key[i] = turned(new_k + from * D, i * 8, turns + row * ROPE);
  for (int i = threadIdx.x; i < DV / 8; i += 32) value[i] = reinterpret_cast<const uint4*>(new_v + from * DV)[i];

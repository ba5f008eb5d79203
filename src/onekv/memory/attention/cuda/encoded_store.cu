  // One warp per row and head: its key and value are encoded and go to their slot; rows without one are padding. What is
  // given back are the positions, so that whoever takes them from here reads what is stored.
  const int row = blockIdx.x, head = blockIdx.y;
  if (head == 0 && threadIdx.x == 0) stored[row] = lengths[row];
  if (slots[row] < 0) return;
  const Codes keys = {reinterpret_cast<const uint8_t*>(k), k_scale, k_bias};
  const Codes values = {reinterpret_cast<const uint8_t*>(v), v_scale, v_bias};
  const int64_t from = ((int64_t)row * H + head) * 128, own = (int64_t)head * k_shape[1] + slots[row];
  __shared__ float own_centre[128];
  if (CENTRE) centre_at(own_centre, lengths[row], centre + head * 128, rope);
  store<KBITS, KAFFINE>(new_k + from, CENTRE ? own_centre : nullptr, constants, constants + 128, keys, own);
  store<VBITS, VAFFINE>(new_v + from, nullptr, constants, constants + 144, values, own);

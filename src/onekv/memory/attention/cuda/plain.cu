  constexpr int C = D / 32, HV = DV / 64, TILES = BS / 16;
  constexpr int FIT = 16 / G, MOST = SEVERAL ? FIT : 1;
  const float none = __int_as_float(0xff800000);
#include "place.cu"
  T* keys = const_cast<T*>(k);
  T* values = const_cast<T*>(v);
  const int tiles = count * TILES;
  float* parts = scratch;
  float* tops = parts + (int64_t)all_parts * H * G * DV;
  float* sums = tops + (int64_t)all_parts * H * G;
  const float factor = SCALE * 1.4426950408889634f;

#include "queries.cu"

#include "tile.cu"

  uint4 key[2][C], value[HV][4];
  const auto load_keys = [&](int tile) {
    const int start = start_of(tile);
    const int64_t slot = slot_of(tile);
    if (NEW && latest < start + 16) {
      const int64_t own = slot + latest - start, from = (int64_t)rows[0] * H + head;
      if (lane < D / 8)
        reinterpret_cast<uint4*>(keys + own * D)[lane] = turned(new_k + from * D, lane * 8, turns + rows[0] * ROPE);
      if (lane < DV / 8)
        reinterpret_cast<uint4*>(values + own * DV)[lane] =
            reinterpret_cast<const uint4*>(new_v + from * DV)[lane];
      __syncwarp();
    }
    #pragma unroll
    for (int j = 0; j < 2; j++)
      #pragma unroll
      for (int c = 0; c < C; c++)
        key[j][c] = *reinterpret_cast<const uint4*>(keys + (slot + j * 8 + g) * D + c * 32 + t * 8);
  };

  int tile = following(warp / query_tiles - lanes);
  if (tile < tiles) load_keys(tile);
  while (tile < tiles) {
    const int start = start_of(tile);
    const int64_t slot = slot_of(tile);
    #pragma unroll
    for (int h = 0; h < HV; h++)
      #pragma unroll
      for (int r = 0; r < 4; r++) {
        const int64_t token = slot + 2 * t + (r & 1) + (r >> 1) * 8;
        value[h][r] = *reinterpret_cast<const uint4*>(values + token * DV + h * 64 + g * 8);
      }

    float s[2][4];
    score(s, key, start);
    // The next keys come while these scores are made into weights.
    tile = following(tile);
    if (tile < tiles) load_keys(tile);
    add(s, value);
  }

  // Rows of an odd length: no two lanes write to the same bank.
  __shared__ float shared_acc[4][16][65];
#include "parts.cu"

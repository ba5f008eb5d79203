  constexpr int C = D / 32, HV = DV / 64, TILES = BS / 16;
  // Rows whose queries fit one tile; a piece has at most four such tiles.
  constexpr int FIT = 16 / G, MOST = 4 * FIT;
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

  // What is written is read by its own row alone: it is there before anything is loaded.
  if (NEW && many == 1) {
    for (int block = 0; block < count; block++) {
      const int at = latest - base[block];
      if (warp > 0 || at < 0 || at >= BS) continue;
      const int64_t own = (int64_t)head * SLOTS + (int64_t)ids[block] * BS + at, from = (int64_t)rows[0] * H + head;
      if (lane < D / 8)
        reinterpret_cast<uint4*>(keys + own * D)[lane] = turned(new_k + from * D, lane * 8, turns + rows[0] * ROPE);
      if (lane < DV / 8)
        reinterpret_cast<uint4*>(values + own * DV)[lane] =
            reinterpret_cast<const uint4*>(new_v + from * DV)[lane];
    }
    __syncthreads();
  }

#include "tile.cu"

  // All warps read the same tokens, from shared memory: AHEAD tiles at a time, while the next ones are copied there. Words
  // of 16 bytes change places so that lanes that load at the same time find them in different banks.
  constexpr int WIDE = D / 8, WIDE_V = DV / 8, KEY_WORDS = AHEAD * 16 * WIDE, WORDS = KEY_WORDS + AHEAD * 16 * WIDE_V;
  // As much as is needed to join the warps' results in the end.
  constexpr int JOINED = 4 * 16 * 65 / 4;
  __shared__ __align__(16) uint4 staged[STAGES * WORDS > JOINED ? STAGES * WORDS : JOINED];
  const auto key_word = [&](int token, int word) { return token * WIDE + (D % 64 ? word : word ^ (token & 1) << 2); };
  const auto value_word = [&](int token, int word) {
    return KEY_WORDS + token * WIDE_V + (word ^ (token >> 1 & 3) << 1);
  };
  const auto copy = [&](int stage) {
    uint4* words = staged + stage % STAGES * WORDS;
    #pragma unroll
    for (int i = threadIdx.x; i < KEY_WORDS; i += 128) {
      const int token = i / WIDE, tile = stage * AHEAD + token / 16;
      if (tile < tiles)
        copy_ahead(words + key_word(token, i % WIDE), keys + (slot_of(tile) + token % 16) * D + i % WIDE * 8);
    }
    #pragma unroll
    for (int i = threadIdx.x; i < WORDS - KEY_WORDS; i += 128) {
      const int token = i / WIDE_V, tile = stage * AHEAD + token / 16;
      if (tile < tiles)
        copy_ahead(
            words + value_word(token, i % WIDE_V), values + (slot_of(tile) + token % 16) * DV + i % WIDE_V * 8);
    }
    end_copies();
  };

  for (int stage = 0; stage < STAGES - 1; stage++) copy(stage);
  for (int stage = 0; stage * AHEAD < tiles; stage++) {
    // What this thread has copied is there, then what all have; and nobody reads the stage before any more.
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    copy(stage + STAGES - 1);
    for (int own = warp / query_tiles; own < AHEAD; own += lanes) {
      const int tile = stage * AHEAD + own;
      if (tile >= tiles) break;
      const int start = start_of(tile);
      if (start > latest || (start + 15 <= earliest - WINDOW && start >= KEEP)) continue;
      const uint4* words = staged + stage % STAGES * WORDS;
      uint4 key[2][C], value[HV][4];
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int c = 0; c < C; c++) key[j][c] = words[key_word(own * 16 + j * 8 + g, c * 4 + t)];
      float s[2][4];
      score(s, key, start);
      #pragma unroll
      for (int h = 0; h < HV; h++)
        #pragma unroll
        for (int r = 0; r < 4; r++)
          value[h][r] = words[value_word(own * 16 + 2 * t + (r & 1) + (r >> 1) * 8, h * 8 + g)];
      add(s, value);
    }
  }

  // Nothing is left in flight; what was staged is no longer needed. Rows of an odd length: no two lanes write to the same
  // bank.
  wait_for_copies<0>();
  __syncthreads();
  float(*shared_acc)[16][65] = reinterpret_cast<float(*)[16][65]>(staged);
#include "parts.cu"

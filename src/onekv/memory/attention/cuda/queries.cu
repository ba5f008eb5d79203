  // A piece's rows are in tiles of FIT rows. Warps that have the same tile of queries share the tokens, those that have
  // others read the same. Queries g and g + 8 of its tile are this lane's.
  const int query_tiles = MOST <= FIT ? 1 : many > 2 * FIT ? 4 : many > FIT ? 2 : 1;
  const int query_tile = warp % query_tiles, lanes = 4 / query_tiles;
  int64_t own_query[2];
  int own_row[2], query[2], latest = -1, earliest = 1 << 30;
  bool there[2];
  #pragma unroll
  for (int high = 0; high < 2; high++) {
    const int index = g + 8 * high, member = query_tile * FIT + index / G;
    there[high] = index < FIT * G && member < many;
    const int row = there[high] ? rows[member] : 0;
    own_row[high] = row;
    own_query[high] = ((int64_t)row * H + head) * G + index % G;
    query[high] = lengths[row];
    if (there[high]) {
      latest = max(latest, query[high]);
      earliest = min(earliest, query[high]);
    }
  }
  latest = __reduce_max_sync(0xffffffffu, latest);
  earliest = __reduce_min_sync(0xffffffffu, earliest);
  // Queries that are not there see what the others see, so that their sums need no care.
  for (int high = 0; high < 2; high++)
    if (!there[high]) query[high] = latest;

  // Tiles of 16 tokens that any of them reads.
  const auto start_of = [&](unsigned tile) { return base[tile / TILES] + tile % TILES * 16; };
  const auto slot_of = [&](unsigned tile) {
    return (int64_t)head * k_shape[1] + (int64_t)ids[tile / TILES] * BS + tile % TILES * 16;
  };
  const auto following = [&](int tile) {
    for (tile += lanes; tile < tiles; tile += lanes) {
      const int start = start_of(tile);
      if (start <= latest && (start + 15 > earliest - WINDOW || start < KEEP)) break;
    }
    return tile;
  };

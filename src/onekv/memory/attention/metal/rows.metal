// Helpers of the bodies. Numbers per 16 bytes, which is what a lane loads of a key:
CONSTANT int VECTOR = 16 / sizeof(T);
// Less than any score. Not -inf, which fast math might not preserve.
CONSTANT float NONE = -3.0e38f;

// The one or two numbers in a word.
FUNCTION void unpack(uint32_t word, PRIVATE float* to) {
  if (KIND == 0) {
    to[0] = word_as_float(word);
  } else if (KIND == 1) {
    to[0] = word_as_float(word << 16);
    to[1] = word_as_float(word & 0xffff0000u);
  } else {
    to[0] = low_half(word);
    to[1] = high_half(word);
  }
}

// 16 bytes of numbers.
FUNCTION void load_16_bytes(const DEVICE T* from, PRIVATE float* to) {
  const uint4 words = *(const DEVICE uint4*)from;
  unpack(words.x, to);
  unpack(words.y, to + VECTOR / 4);
  unpack(words.z, to + VECTOR / 4 * 2);
  unpack(words.w, to + VECTOR / 4 * 3);
}

// Four numbers.
FUNCTION void load_4(const DEVICE T* from, PRIVATE float* to) {
  if (KIND == 0) {
    load_16_bytes(from, to);
  } else {
    const uint2 words = *(const DEVICE uint2*)from;
    unpack(words.x, to);
    unpack(words.y, to + 2);
  }
}

// Adds up 2 * WIDTH sums of two lanes whose numbers differ in one bit; each lane keeps the half chosen by its bit.
template <int WIDTH> FUNCTION void halve(PRIVATE float* sums, int lane, int bit) {
  const bool high = (lane & bit) != 0;
  #pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const float mine = high ? sums[i + WIDTH] : sums[i], other = high ? sums[i] : sums[i + WIDTH];
    sums[i] = mine + shuffle_xor(other, bit);
  }
}

// Whether any query between positions `first` and `at` reads a position.
template <int REACH, int KEPT> FUNCTION bool is_read(int position, int first, int at) {
  return position <= at && (position > first - REACH || position < KEPT);
}

// Eight numbers of a row from `d` on, turned by its angles: for halves their cosines and then their sines, for
// neighbours (TRADITIONAL) the cosine and sine of each pair. Numbers behind the first ROPE are as they were.
__device__ inline uint4 turned(const T* row, int d, const float* angles) {
  uint4 own = *reinterpret_cast<const uint4*>(row + d);
  if (d >= ROPE) return own;
  T* numbers = reinterpret_cast<T*>(&own);
  constexpr int HALF = ROPE / 2;
  const bool second = d >= HALF;
  const int pair = TRADITIONAL ? d : second ? d - HALF : d;
  float4 wide[4];
  wide[0] = *reinterpret_cast<const float4*>(angles + pair);
  wide[1] = *reinterpret_cast<const float4*>(angles + pair + 4);
  if (TRADITIONAL) {
    const float* both = reinterpret_cast<const float*>(wide);
    #pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float x = float(numbers[i]), y = float(numbers[i + 1]);
      numbers[i] = T(fmaf(x, both[i], -y * both[i + 1]));
      numbers[i + 1] = T(fmaf(x, both[i + 1], y * both[i]));
    }
    return own;
  }
  wide[2] = *reinterpret_cast<const float4*>(angles + HALF + pair);
  wide[3] = *reinterpret_cast<const float4*>(angles + HALF + pair + 4);
  const float* cosines = reinterpret_cast<const float*>(wide);
  const float* sines = cosines + 8;
  const uint4 partner = *reinterpret_cast<const uint4*>(row + (second ? pair : d + HALF));
  const T* others = reinterpret_cast<const T*>(&partner);
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    const float sine = second ? sines[i] : -sines[i];
    numbers[i] = T(fmaf(float(numbers[i]), cosines[i], float(others[i]) * sine));
  }
  return own;
}

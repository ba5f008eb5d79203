// In kernels that must agree to the last bit, what is added to a product is written as fmaf(), and a product that nothing
// may be added to as __fmul_rn(): else the compiler chooses, for each kernel anew.

template <typename T> __device__ inline void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);

template <> __device__ inline void mma<__nv_bfloat16>(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> __device__ inline void mma<__half>(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T> __device__ inline uint32_t pack(float x, float y);

template <> __device__ inline uint32_t pack<__nv_bfloat16>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}

template <> __device__ inline uint32_t pack<__half>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}

// Sixteen bytes from the device's memory to shared memory, while the thread goes on.
__device__ inline void copy_ahead(void* to, const void* from) {
  const uint32_t shared = uint32_t(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// Copies that were begun since the last call are a group.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups of this thread but the last so many are there.
template <int LEFT> __device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory. Lane i gives the address of row i % 8 of matrix i / 8 and
// gets two neighbours of row i / 4 of each matrix: numbers 2 * (i % 4) and the next.
__device__ inline void load_matrices(uint32_t* to, const void* row) {
  const uint32_t shared = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared)
               : "memory");
}

// The same, transposed: lane i gets two neighbours of column i / 4.
__device__ inline void load_transposed(uint32_t* to, const void* row) {
  const uint32_t shared = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared)
               : "memory");
}

// One instruction, which is off by 2 units in the last place at most; results below 2^-126 are 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#include "last.cu"
  for (int member = 0; member < many; member++) {
    const int of = rows[member];
    const int* range = work + work[4] + of;
    // Nobody reads what is there of the row before.
    __syncthreads();
    for (int index = threadIdx.x; index < G * 32; index += 128) {
      const int head_of = index / 32, d = index % 32 * 4, query_head = head * G + head_of;
      const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : none;
      float highest = sink;
      for (int i = range[0]; i < range[1]; i++)
        highest = max(highest, __ldcg(tops + (int64_t)order[i] * H * G + query_head));
      float total = SINKS ? exp2f(sink - highest) : 0.0f, moved = 0;
      float4 result = make_float4(0, 0, 0, 0);
      #pragma unroll 4
      for (int i = range[0]; i < range[1]; i++) {
        const int64_t place = (int64_t)order[i] * H * G + query_head;
        const float top_of = __ldcg(tops + place);
        const float shrink = top_of == none ? 0.0f : exp2_approx(top_of - highest);
        const float4 x = __ldcg(reinterpret_cast<const float4*>(parts + place * 128 + d));
        total = fmaf(__ldcg(sums + place), shrink, total);
        moved = fmaf(__ldcg(moves + place), shrink, moved);
        result.x = fmaf(x.x, shrink, result.x);
        result.y = fmaf(x.y, shrink, result.y);
        result.z = fmaf(x.z, shrink, result.z);
        result.w = fmaf(x.w, shrink, result.w);
      }
      // A row of padding has read nothing.
      if (total == 0.0f) total = 1.0f;
      space[head_of * 128 + d] = (result.x + moved) / total;
      space[head_of * 128 + d + 1] = (result.y + moved) / total;
      space[head_of * 128 + d + 2] = (result.z + moved) / total;
      space[head_of * 128 + d + 3] = (result.w + moved) / total;
    }
    transform(space, G);
    for (int i = threadIdx.x; i < G * 128; i += 128)
      out[((int64_t)of * H + head) * G * 128 + i] = T(space[i] * norm * signs[i % 128]);
  }

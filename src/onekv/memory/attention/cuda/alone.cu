#include "last.cu"
  for (int index = threadIdx.x; index < many * G * (DV / 4); index += 128) {
    const int d = index % (DV / 4) * 4, query_head = head * G + index / (DV / 4) % G;
    const int of = rows[index / (DV / 4) / G];
    const int* range = work + work[4] + of;
    const float sink = SINKS ? float(sinks[query_head]) * 1.4426950408889634f : none;
    float highest = sink;
    for (int i = range[0]; i < range[1]; i++)
      highest = max(highest, __ldcg(tops + (int64_t)order[i] * H * G + query_head));
    float total = SINKS ? exp2f(sink - highest) : 0.0f;
    float4 result = make_float4(0, 0, 0, 0);
    #pragma unroll 4
    for (int i = range[0]; i < range[1]; i++) {
      const int64_t place = (int64_t)order[i] * H * G + query_head;
      const float top_of = __ldcg(tops + place);
      const float shrink = top_of == none ? 0.0f : exp2_approx(top_of - highest);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(parts + place * DV + d));
      total = fmaf(__ldcg(sums + place), shrink, total);
      result.x = fmaf(x.x, shrink, result.x);
      result.y = fmaf(x.y, shrink, result.y);
      result.z = fmaf(x.z, shrink, result.z);
      result.w = fmaf(x.w, shrink, result.w);
    }
    // A row of padding has read nothing.
    if (total == 0.0f) total = 1.0f;
    T* to = out + ((int64_t)of * H * G + query_head) * DV + d;
    to[0] = T(result.x / total);
    to[1] = T(result.y / total);
    to[2] = T(result.z / total);
    to[3] = T(result.w / total);
  }

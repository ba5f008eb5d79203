"""Kernels on the CPU: what lanes exchange, what is noticed, and mistakes in the real kernels, which are all found."""

import mlx.core as mx
import numpy as np
import pytest

import test_cuda
import test_cuda_encoded
from onekv.cuda import products
from onekv.memory import pairs
from onekv.memory.layout import Rule
from test_cuda_products import layer_of

from .on_cpu import KernelError, OnCpu


def run(kernels, source, inputs=(), shape=(64,), dtype=mx.int32, blocks=1, threads=64):
    names = [f"in{number}" for number in range(len(inputs))]
    kernel = kernels.cuda_kernel(name="small", input_names=names, output_names=["out"], source=source)
    launch = {"grid": (blocks * threads, 1, 1), "threadgroup": (threads, 1, 1)}
    return kernel(inputs=list(inputs), **launch, output_shapes=[shape], output_dtypes=[dtype])[0]


@pytest.fixture(params=["", "-DPORTABLE"], scope="module")
def kernels(request, kernels_on_cpu, tmp_path_factory):
    """Threads are changed by a few instructions where they are known, else by the C library."""
    return OnCpu(tmp_path_factory.mktemp("portable"), (request.param,)) if request.param else kernels_on_cpu


def test_what_lanes_exchange(kernels):
    source = """
  const int x = threadIdx.x * 10, lane = threadIdx.x & 31;
  const int other = __shfl_xor_sync(~0u, x, 5), third = __shfl_sync(~0u, x, 3);
  const bool any = __any_sync(~0u, x == 320), none = __any_sync(~0u, x < 0);
  const int most = __reduce_max_sync(~0u, x), least = __reduce_min_sync(~0u, x);
  int* to = out + threadIdx.x * 6;
  to[0] = other; to[1] = third; to[2] = any; to[3] = none; to[4] = most; to[5] = least;
"""
    out = np.array(run(kernels, source, shape=(64, 6)))
    thread = np.arange(64)
    first = thread // 32 * 32
    expected = [(thread ^ 5) * 10, (first + 3) * 10, first == 32, thread < 0, (first + 31) * 10, first * 10]
    assert (out == np.stack(expected, axis=1)).all()


@pytest.mark.parametrize(("dtype", "name"), [(mx.bfloat16, "__nv_bfloat16"), (mx.float16, "__half")])
def test_a_product_is_that_of_the_instruction(kernels_on_cpu, dtype, name):
    """Each lane takes its numbers from matrices in memory, as the manual says which they are."""
    source = f"""
  const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
  const auto two = [](const {name}* x, int step) {{ return x[0].bits | uint32_t(x[step].bits) << 16; }};
  uint32_t a[4];
  for (int i = 0; i < 4; i++) a[i] = two(in0 + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 1);
  const uint32_t b0 = two(in1 + 2 * t * 8 + g, 8), b1 = two(in1 + (2 * t + 8) * 8 + g, 8);
  float c[4] = {{1, 1, 1, 1}};
  mma<{name}>(c, a, b0, b1);
  for (int i = 0; i < 4; i++) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
"""
    a, b = (mx.random.normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    out = run(kernels_on_cpu, source, (a, b), (16, 8), mx.float32, threads=32)
    assert mx.allclose(out, a.astype(mx.float32) @ b.astype(mx.float32) + 1, atol=1e-5)


def test_matrices_are_loaded_as_by_the_instruction(kernels_on_cpu):
    """Four of 8 x 8; each lane gives the address of a row and gets two numbers of each, from a row or from a column."""
    source = """
  __shared__ __align__(16) __half numbers[32][8];
  for (int i = 0; i < 8; i++) numbers[threadIdx.x][i] = in0[threadIdx.x * 8 + i];
  __syncthreads();
  uint32_t two[4];
  for (int side = 0; side < 2; side++) {
    if (side) load_transposed(two, numbers[threadIdx.x]);
    else load_matrices(two, numbers[threadIdx.x]);
    for (int m = 0; m < 4; m++)
      for (int i = 0; i < 2; i++) {
        const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2 + i;
        out[((side * 4 + m) * 8 + row) * 8 + column] = bits_as<__half>(uint16_t(two[m] >> 16 * i));
      }
  }
"""
    numbers = mx.arange(256).astype(mx.float16).reshape(4, 8, 8)
    out = run(kernels_on_cpu, source, (numbers,), (2, 4, 8, 8), mx.float16, threads=32)
    assert mx.array_equal(out[0], numbers) and mx.array_equal(out[1], numbers.swapaxes(1, 2))


def test_numbers_of_16_bits_are_those_of_mlx(kernels_on_cpu):
    some = [mx.random.normal((2000,)), 10.0 ** mx.random.uniform(-8, 5, (2000,)), mx.array([mx.inf, 65519.0, 65520.0])]
    x, every = mx.concatenate(some), mx.arange(2**16).astype(mx.uint16)
    for dtype, name in ((mx.bfloat16, "__nv_bfloat16"), (mx.float16, "__half")):
        source = f"for (int i = threadIdx.x; i < {x.size}; i += 64) out[i] = {name}(in0[i]);"
        assert mx.array_equal(run(kernels_on_cpu, source, (x,), x.shape, dtype), x.astype(dtype))
        numbers = every.view(dtype)
        source = f"for (int i = threadIdx.x; i < {numbers.size}; i += 64) out[i] = float(in0[i]);"
        out = run(kernels_on_cpu, source, (numbers,), numbers.shape, mx.float32)
        assert mx.array_equal(out, numbers.astype(mx.float32), equal_nan=True)


def test_blocks_and_threads_come_in_a_random_order_and_each_once(kernels):
    source = "out[blockIdx.x * 64 + threadIdx.x] = atomicAdd(const_cast<int*>(in0), 1);"
    count = mx.zeros((1,), mx.int32)
    mx.eval(count)
    order = np.array(run(kernels, source, (count,), (20 * 64,), blocks=20))
    assert count.item() == 20 * 64 and sorted(order) == list(range(20 * 64))
    assert (np.diff(order[::64]) < 0).any() and (np.diff(order[:64]) < 0).any()


NOTICED = {
    "waits forever at __syncthreads": "if (threadIdx.x != 5) __syncthreads(); out[0] = 0;",
    "waits forever at __syncwarp": "if (threadIdx.x == 5) return; __syncwarp(); out[0] = 0;",
    "while others are at __syncthreads": "if (threadIdx.x < 40) __syncthreads();\nelse __syncthreads(); out[0] = 0;",
    "__any_sync": "if (threadIdx.x & 1) __syncwarp(); else __any_sync(~0u, true); out[0] = 0;",
    "index is out of bounds": "__shared__ int a[9]; a[threadIdx.x] = 1; out[0] = a[0];",
    "address is not aligned": "out[0] = reinterpret_cast<const uint4*>(in0 + threadIdx.x)->x;",
    "shares 65536 bytes": "__shared__ float a[1 << 14]; a[threadIdx.x] = 1; out[0] = a[0];",
}


@pytest.mark.parametrize("message", NOTICED)
def test_what_no_kernel_may_do_is_noticed(kernels, message):
    with pytest.raises(KernelError, match=message):
        run(kernels, NOTICED[message], (mx.zeros((256,), mx.int32),))
    # And the next one runs.
    assert run(kernels, "out[threadIdx.x] = 3;").tolist() == [3] * 64


@pytest.mark.parametrize("place", ["out + 63", "in0 + 255"])
def test_one_element_beyond_an_array_is_noticed(kernels_on_cpu, place):
    source = f"out[threadIdx.x] = ({place})[threadIdx.x == 7];"
    with pytest.raises(KernelError, match="outside of all arrays"):
        run(kernels_on_cpu, source, (mx.zeros((256,), mx.int32),))


def test_what_nobody_wrote_is_nan(kernels_on_cpu):
    source = (
        "__shared__ float a[64]; a[0] = 1; __syncthreads(); if (threadIdx.x < 9) out[threadIdx.x] = a[threadIdx.x];"
    )
    out = run(kernels_on_cpu, source, dtype=mx.float32)
    assert out[0].item() == 1 and mx.isnan(out[1:]).all()


# How far a kernel is from its reference, where 1 is as far as its tests allow.


def plain() -> float:
    return test_cuda.error(mx.float16, (64, 64), 9, (300, 1, 33), Rule(), 16, with_sinks=True) / 0.002


def together(steep: float = 1.0) -> float:
    lengths, forks = (300, 310, 290, 80, 300, 300), {1: (0, 256), 2: (1, 272), 4: (0, 288), 5: (4, 256)}
    with pytest.MonkeyPatch.context() as patch:
        # Each of them shares something, and has some of its own.
        patch.setattr(pairs, "SHARED", 16)
        shape = (mx.float16, (64, 64), 4, lengths, Rule(), 16, forks)
        return test_cuda.error(*shape, with_sinks=True, steep=steep) / 0.002


def steep() -> float:
    return together(40.0)


def encoded() -> float:
    shape = (mx.float16, 7, (300, 33), Rule(window=200, keep=4), 16, True, test_cuda_encoded.SHAPES[0][-1])
    return test_cuda_encoded.error("k8v4", *shape) / 0.003


def product() -> float:
    layer = layer_of(mx.float16, 1056, 64, True)
    x = mx.random.normal((13, 1, 1056)).astype(mx.float16)
    out, expected = products.multiply(layer, x, (64,))[0], layer(x)
    return float((mx.abs(out - expected).max() / mx.abs(expected).max()).item()) / 0.002


JOIN = "    __syncthreads();\n    for (int index = threadIdx.x; index < many"
PLANTED = [
    # A wrong constant.
    (plain, "SCALE * 1.4426950408889634f", "SCALE * 1.4326950408889634f"),
    (plain, "0x7632", "0x7623"),
    (encoded, "0.08838834764831845f;\n  uint32_t code", "0.08738834764831845f;\n  uint32_t code"),
    (product, "row = tile * 8 + g", "row = tile * 8 + g % 7"),
    # A missing barrier.
    (plain, JOIN, JOIN.removeprefix("    __syncthreads();")),
    (plain, "__syncthreads();\n  if (!last)", "if (!last)"),
    (plain, "lane];\n      __syncwarp();", "lane];"),
    (together, "wait_for_copies<STAGES - 2>();\n    __syncthreads();", "wait_for_copies<STAGES - 2>();"),
    (together, "wait_for_copies<STAGES - 2>();", "wait_for_copies<STAGES - 1>();"),
    (together, "copy(stage + STAGES - 1);\n    find", "copy(stage + STAGES);\n    find"),
    (together, "half; half /= 2) {\n    __syncthreads();", "half; half /= 2) {"),
    (together, "__syncthreads();\n    if (turn < half)", "if (turn < half)"),
    # What is not seen is seen.
    (together, "    if (!all) {", "    if (false) {"),
    # Weights beyond what 16 bits hold.
    (steep, "LAG = 8", "LAG = 800"),
    # Matrices that are not those of these tokens.
    (together, "lane % 16 * (WIDE_V + 1)", "lane % 8 * (WIDE_V + 1)"),
    (together, "lane / 8 % 2;", "lane / 16;"),
    (together, "t & step ? x[i] : x[i + step], step)", "t & step ? x[i + step] : x[i], step)"),
    (together, "[lane];\n    }\n    __syncthreads();", "[lane];\n    }"),
    (encoded, "step *= 2) {\n    __syncthreads();", "step *= 2) {"),
    (product, "acc[out][tile][i];\n    __syncthreads();", "acc[out][tile][i];"),
    # A wrong lane.
    (
        plain,
        "max(highest, __shfl_xor_sync(0xffffffffu, highest, 2))",
        "max(highest, __shfl_xor_sync(0xffffffffu, highest, 4))",
    ),
    (
        plain,
        "sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 1);",
        "sum[high] += __shfl_xor_sync(0xffffffffu, sum[high], 2);",
    ),
    (encoded, "x[i], step)", "x[i], step ^ 1)"),
]


@pytest.mark.parametrize("kernel", [plain, together, steep, encoded, product])
def test_kernels_without_a_mistake_are_right(cuda, kernel):
    assert kernel() < 1


@pytest.mark.parametrize(("kernel", "old", "new"), PLANTED)
def test_a_mistake_is_found(cuda, kernel, old, new, kernels_on_cpu):
    with kernels_on_cpu.planted(old, new):
        try:
            far = kernel()
        except (AssertionError, KernelError):
            return
    assert not far < 1

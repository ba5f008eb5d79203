"""Products of few rows with weights: the kernel of OneKV, and MLX's own (cuBLAS), in the same run.

    python benchmarks/cuda_products.py 2 8 16 32
    python benchmarks/cuda_products.py --tune 8 40       # with other numbers of loads in flight and of outputs

The shapes of an 8B Llama, bfloat16. Needs a CUDA device. Microseconds for each product, and the share of the bandwidth
that was measured; medians of 20 rounds of 30 products with different weights, interleaved.
"""

import argparse
import statistics
import time

import mlx.core as mx
from mlx import nn

from onekv.bench.roofline import bandwidth
from onekv.cuda import products

SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
COUNT = 30


def measure(rows: int, k: int, n: int) -> tuple[float, float]:
    layers = [nn.Linear(k, n, bias=False) for _ in range(COUNT)]
    for layer in layers:
        layer.set_dtype(mx.bfloat16)
    x = mx.random.normal((rows, 1, k)).astype(mx.bfloat16)
    mx.eval(x, [layer.parameters() for layer in layers])

    def ours(x: mx.array) -> list[mx.array]:
        return [products.multiply(layer, x, (n,))[0] for layer in layers]

    def stock(x: mx.array) -> list[mx.array]:
        return [layer(x) for layer in layers]

    times: list[list[float]] = [[], []]
    for _ in range(22):
        for side, function in enumerate((ours, stock)):
            begin = time.perf_counter()
            mx.eval(function(x))
            times[side].append((time.perf_counter() - begin) / COUNT)
    ours_s, stock_s = (statistics.median(some[2:]) for some in times)
    return ours_s, stock_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, default=[8])
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    per_second = bandwidth()
    chosen = products.way
    for rows in arguments.rows:
        for k, n in SHAPES:
            tried = [(1, 4), (1, 2), (2, 2), (2, 1), (4, 1)] if arguments.tune else [chosen(rows, k, n)]
            for outs, batch in tried:
                products.way = lambda rows, k, n, way=(outs, batch): way
                ours, stock = measure(rows, k, n)
                share = 2 * k * n / per_second / ours
                print(
                    f"{rows:2} x {k} x {n}, {16 * outs} outputs, {batch} loads: {ours * 1e6:.1f} us, "
                    f"MLX {stock * 1e6:.1f} us: {stock / ours:.2f}x, {share:.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Products of a few rows with the matrices of SmolLM2-135M on CPU: compiled loops beside MLX's own.

    python benchmarks/cpu_products.py               all matrices and kinds
    python benchmarks/cpu_products.py --threads 1   loops with one thread; MLX keeps as many as it takes
    python benchmarks/cpu_products.py --alone       without MLX, whose threads stay on their cores for a while
    python benchmarks/cpu_products.py --alone --matrix 8192x2048 --matrix 2048x8192

Each line is the best of several rounds, in which both take turns. Each call has other memory to read, so that weights
come from RAM, as in a model, and not from the processor's caches; GB/s counts their bytes, with scales and biases.
With `NUMBA_CACHE_DIR` set to an empty folder, the first line says what compiling takes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)
from onekv.loops import products

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

MATRICES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576))
KINDS = ("float32", "4 bits", "8 bits")
# Bytes that the copies of a matrix have together, more than the caches.
SPREAD = 256 << 20


def layers(n: int, k: int, kind: str) -> tuple[list[Any], int]:
    """Copies of a layer, and the bytes of one."""
    made: list[Any] = []
    total = 0
    while total < SPREAD:
        layer: Any = nn.Linear(k, n, bias=False)
        if kind != "float32":
            layer = nn.QuantizedLinear.from_linear(layer, 32, int(kind[0]))
        arrays = [layer[name] for name in ("weight", "scales", "biases") if name in layer]
        mx.eval(arrays)
        made.append(layer)
        total += sum(array.nbytes for array in arrays)
    return made, total // len(made)


def times(calls: list[list[Callable[[], Any]]], rounds: int) -> list[float]:
    """The best time of each of several ways, which take turns."""
    best = [float("inf")] * len(calls)
    for index in range(rounds):
        for way, ways in enumerate(calls):
            call = ways[index % len(ways)]
            start = time.perf_counter()
            call()
            best[way] = min(best[way], time.perf_counter() - start)
    return best


def measure(n: int, k: int, kind: str, rounds: int, alone: bool) -> None:
    copies, size = layers(n, k, kind)
    made = [products.product(layer) for layer in copies]
    for rows in (1, 2, 4, 8):
        x = np.random.default_rng(rows).standard_normal((rows, k), dtype=np.float32)
        given = mx.array(x)
        ours = [lambda each=each, x=x: each(x) for each in made]
        theirs = [lambda each=each, given=given: mx.eval(each(given)) for each in copies]
        assert np.allclose(ours[0](), np.asarray(copies[0](given)), atol=1e-3)
        own, *others = times([ours] if alone else [ours, theirs], rounds)
        beside = "".join(f"   MLX {other * 1e6:7.0f} us  {other / own:5.1f}x" for other in others)
        print(
            f"{n:6} x {k:4}  {kind}  {rows} rows  {own * 1e6:7.0f} us  {n * k / own / 1e9:5.1f} billion weights/s  "
            f"{size / own / 1e9:5.1f} GB/s{beside}",
            flush=True,
        )


def compile_all() -> float:
    """Seconds for all that `measure` calls, and unpacking."""
    start = time.perf_counter()
    for kind in KINDS:
        layer: Any = nn.Linear(64, 64, bias=False)
        if kind != "float32":
            layer = nn.QuantizedLinear.from_linear(layer, 32, int(kind[0]))
        made = products.product(layer)
        made(np.ones((1, 64), np.float32))
        made.unpack(np.empty((64, 64), np.float32))
    return time.perf_counter() - start


def _matrix(text: str) -> tuple[int, int]:
    n, k = map(int, text.split("x"))
    return n, k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of the loops")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--matrix", action="append", type=_matrix, metavar="OUTPUTSxINPUTS")
    arguments = parser.parse_args()
    if arguments.threads:
        products.threads = lambda: arguments.threads
    print(f"compiled or loaded in {compile_all():.1f} s; {products.threads()} threads", flush=True)
    for n, k in arguments.matrix or MATRICES:
        for kind in KINDS:
            measure(n, k, kind, arguments.rounds, arguments.alone)


if __name__ == "__main__":
    main()

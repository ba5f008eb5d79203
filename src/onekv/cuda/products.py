"""Products of few rows with weights, as a CUDA kernel: as fast as weights are read, and little for the host to do.

MLX leaves a product of several rows to cuBLAS and looks for an algorithm at every call: 20 us of the host's time, where
starting a kernel takes 9 (one H200, benchmarks/). With eight rows that is what limits a decode step. Here a thread
block has sixteen outputs: its warps share the inputs, multiply on the tensor cores with sums in float32, and add up in
an order that depends on the shape alone. Where several layers share their input, their outputs are apart (`ends`): what
comes next would copy columns of a joint one.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from .source import NAMES, Constants, define, kernel_name, read

# Warps of a thread block, and how many times 32 inputs each of them loads at once, of up to 8 rows and of more: what is
# loaded must leave room for a second thread block.
WARPS, BATCH, BATCH_OF_MORE = 8, 4, 2
# Rows that are multiplied by the kernel; one is MLX's own, more are cuBLAS's.
LEAST, MOST = 2, 16


class FewRows(Linear):
    """A linear layer in place of another, with its weights."""

    def __init__(self, stock: Linear) -> None:
        Module.__init__(self)
        dict.update(self, stock)

    def __call__(self, x: mx.array) -> mx.array:
        if fits(self, x):
            return multiply(self, x, (self.weight.shape[0],))[0]
        stock: mx.array = super().__call__(x)
        return stock


def few_rows(layer: Any) -> Any:
    """The layer whose few rows the kernel multiplies; the same if it cannot."""
    return FewRows(layer) if type(layer) is Linear and supports(layer) else layer


def supports(layer: Linear, ends: tuple[int, ...] = ()) -> bool:
    n, k = layer.weight.shape
    return layer.weight.dtype in NAMES and k % 32 == 0 and all(end % 16 == 0 for end in (n, *ends))


def fits(layer: Linear, x: mx.array) -> bool:
    """Whether `x` [rows, 1, k] is a decode step's, and of as many rows as are faster here."""
    rows = x.shape[0]
    return LEAST <= rows <= MOST and x.size == rows * x.shape[-1] and x.dtype == layer.weight.dtype


def multiply(layer: Linear, x: mx.array, ends: tuple[int, ...]) -> list[mx.array]:
    """What `layer` makes of `x` [rows, 1, k], its columns apart where `ends` say."""
    weight: mx.array = layer.weight
    n, k = weight.shape
    tiles = -(-x.shape[0] // 8)
    constants: Constants = (
        ("K", k),
        ("TILES", tiles),
        ("WARPS", WARPS),
        ("BATCH", BATCH if tiles == 1 else BATCH_OF_MORE),
        ("BIAS", "bias" in layer),
    )
    parts: list[mx.array] = _kernel(weight.dtype, constants, ends)(
        inputs=[x, weight, layer.bias if "bias" in layer else weight],
        grid=(n // 16 * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(*x.shape[:-1], end - start) for start, end in pairwise((0, *ends))],
        output_dtypes=[x.dtype] * len(ends),
    )
    return parts


@cache
def _kernel(dtype: mx.Dtype, constants: Constants, ends: tuple[int, ...]) -> Any:
    names = "_".join(map(str, ends))
    return mx.fast.cuda_kernel(
        name=f"onekv_product_{kernel_name(dtype, constants)}_{names}",
        input_names=["x", "weight", "bias"],
        output_names=[f"out{number}" for number in range(len(ends))],
        header=read("mma") + define(dtype, constants),
        source=_choose(ends) + read("product"),
    )


def _choose(ends: tuple[int, ...]) -> str:
    """Where a thread block's outputs go: `to`, of rows of `width`, from `column` on."""
    lines = ["  T* to = out0;", f"  int column = blockIdx.x * 16, width = {ends[0]};"]
    for number, (start, end) in enumerate(pairwise(ends), 1):
        lines.append(f"  if (blockIdx.x * 16 >= {start}) {{")
        lines.append(f"    to = out{number}; column = blockIdx.x * 16 - {start}; width = {end - start};")
        lines.append("  }")
    return "\n" + "\n".join(lines)

"""Matrix products of few rows with weights, as a CUDA kernel: as fast as weights can be read, with little work for the
host.

MLX uses cuBLAS for a product of several rows and searches for an algorithm at every call: 20 us of host time, where
launching a kernel takes 9 (one H200, benchmarks/). With eight rows, that limits the decode step. Here a thread block
computes sixteen outputs or a small multiple: its warps share the inputs, multiply on the tensor cores with sums in
float32, and add up in an order that depends only on the shape of the weights. So the result for a row is bit for bit
the same whatever other rows there are, if any: several tokens of a sequence in one step give the same results as one at
a time (docs/speculation.md). If several layers share their input, their outputs are separate (`ends`): whatever uses
them next would have to copy columns of a joint output. If they are gate and up of an MLP, `silu(gate) * up` can be made
of them in the same launch (`gated`).
"""

from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from ..traces import notes
from .source import NAMES, Constants, define, kernel_name, read

# Warps of a thread block, and how many times 32 inputs each of them loads at once, of up to 8 rows and of more: what is
# loaded must leave room for a second thread block.
WARPS, BATCH, BATCH_OF_MORE = 8, 4, 2
# Times sixteen outputs of a thread block where there are more than MOST rows: each reads all inputs, which is more than
# its weights then. With more than 8 rows it also pays from so many outputs on; and with so many inputs, more loads.
OUTS, WIDE, LONG = 2, 16384, 8192
# Rows that are multiplied by the kernel, and where some are tokens of one sequence; more are cuBLAS's.
LEAST, MOST, MOST_OF_SEVERAL = 1, 16, 64

Weights = Linear | Embedding


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


class FewRowsHead(Embedding):
    """An embedding in place of another, with its weights, which also make the logits."""

    def __init__(self, stock: Embedding) -> None:
        Module.__init__(self)
        dict.update(self, stock)

    def as_linear(self, x: mx.array) -> mx.array:
        if fits(self, x):
            return multiply(self, x, (self.weight.shape[0],))[0]
        stock: mx.array = super().as_linear(x)  # type: ignore[no-untyped-call]
        return stock


def few_rows(layer: Any) -> Any:
    """The layer whose few rows the kernel multiplies; the same if it cannot."""
    if type(layer) is Linear and supports(layer):
        return FewRows(layer)
    return FewRowsHead(layer) if type(layer) is Embedding and supports(layer) else layer


def supports(layer: Weights, ends: tuple[int, ...] = ()) -> bool:
    n, k = layer.weight.shape
    return layer.weight.dtype in NAMES and k % 32 == 0 and all(end % 16 == 0 for end in (n, *ends))


def fits(layer: Weights, x: mx.array) -> bool:
    """Whether `x` [rows, 1, k] is a decode step's, and of as many rows as are multiplied here."""
    rows, noted = x.shape[0], notes()
    most = MOST_OF_SEVERAL if noted is not None and noted.alike else MOST
    return LEAST <= rows <= most and x.size == rows * x.shape[-1] and x.dtype == layer.weight.dtype


def way(rows: int, k: int, n: int) -> tuple[int, int]:
    """Times sixteen outputs of a thread block, and loads at once: as many as there are registers for."""
    if rows <= 8:
        return 1, BATCH
    outs = OUTS if (rows > MOST or n >= WIDE) and n % (16 * OUTS) == 0 else 1
    if rows <= MOST and outs == 1 and k >= LONG:
        return outs, BATCH
    return outs, BATCH_OF_MORE if -(-rows // 8) + 2 * outs <= 10 else 1


def gated(layer: Weights, x: mx.array, gate: int) -> mx.array:
    """`silu(gate) * up` of `x` [rows, 1, k], where half `gate` (0 or 1) of the columns that `layer` makes is the gate,
    and the other is `up`."""
    half = layer.weight.shape[0] // 2
    return multiply(layer, x, (half,), half, gate)[0]


def multiply(layer: Weights, x: mx.array, ends: tuple[int, ...], half: int = 0, gate: int = 0) -> list[mx.array]:
    """What `layer` makes of `x` [rows, 1, k], its columns apart where `ends` say; `half` columns if it is `gated`."""
    weight: mx.array = layer.weight
    n, k = weight.shape
    tiles = -(-x.shape[0] // 8)
    outs, batch = way(x.shape[0], k, n)
    constants: Constants = (
        ("K", k),
        ("TILES", tiles),
        ("OUTS", outs),
        ("WARPS", WARPS),
        ("BATCH", batch),
        ("BIAS", "bias" in layer),
        ("HALF", half),
        ("SECOND", bool(gate)),
    )
    parts: list[mx.array] = _kernel(weight.dtype, constants, ends)(
        inputs=[x, weight, layer.bias if "bias" in layer else weight],
        grid=(n // 16 // outs * WARPS * 32, 1, 1),
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
    """Where outputs from `first` on go: `to`, of rows of `width`, from `column` on."""
    lines = ["  struct Place { T* to; int column, width; };", "  const auto place_of = [&](int first) -> Place {"]
    for number, (start, end) in reversed(list(enumerate(pairwise((0, *ends))))):
        lines.append(f"    if (first >= {start}) return {{out{number}, first - {start}, {end - start}}};")
    return "\n" + "\n".join([*lines, "    return {out0, first, 0};", "  };"])

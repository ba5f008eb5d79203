"""How much of a difference is rounding, for each type that models compute in.

Attention is compared call by call, over the same blocks: bounds are 3 to 20 times what was measured, and in float32 a
scale that is wrong by a thousandth is beyond them. Kernels add up in float32; MLX's own operations round scores to half
precision, too. Logits come out of the whole model, which amplifies what rounding does in each layer: in half precision
they tell wrong blocks from right ones, and attention tells the rest.
"""

from typing import NamedTuple

import mlx.core as mx

from ..memory.device import Kind

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


class Bounds(NamedTuple):
    """The most that may differ: outputs of attention, in parts of the largest one, by kernels and by MLX's operations;
    logits, in parts of their standard deviation, of steps over the same blocks (`compiled`), and where prompts were
    attended to by other operations, too (`memory`)."""

    kernel: float
    operations: float
    compiled: float
    memory: float


_BOUNDS = {
    "float32": Bounds(kernel=5e-5, operations=5e-5, compiled=2e-3, memory=3e-4),
    "bfloat16": Bounds(kernel=1.5e-2, operations=0.15, compiled=0.3, memory=0.3),
    "float16": Bounds(kernel=3e-3, operations=1e-2, compiled=5e-2, memory=5e-2),
}
# Where a number is on the edge of two codes, rounding decides which one stands for it in every later step. Measured
# were up to 0.003 in float32, 0.26 in float16 and 0.69 in bfloat16; logits of another row are 4 to 5 apart.
_ENCODED = {"float32": 0.1, "float16": 0.8, "bfloat16": 2.0}


def bounds(dtype: str, plain: bool, device: Kind) -> Bounds:
    """For KV that is stored as it is (`plain`), or encoded."""
    # MLX multiplies float32 on CUDA in TF32, which has as many bits as float16.
    computed = "float16" if dtype == "float32" and device == "cuda" else dtype
    found = _BOUNDS[computed]
    return found if plain else found._replace(memory=_ENCODED[computed])


def name_of(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]

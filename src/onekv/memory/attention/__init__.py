"""Attention over the pool.

hook.py routes a model's calls here; layer.py has a layer's KV, and how a step writes and reads it. Attention is
computed by a backend (base.py has the contract):

    cuda/         kernels over plain and over encoded blocks
    metal/        kernels over plain blocks, used if a trial at load says so
    numba/        compiled loops over plain and over encoded blocks on CPU; loops.py for steps outside of MLX
    paged.py      MLX's operations over plain blocks
    shared.py     the same for rows that begin with the same blocks, which are read once
    tiles.py      MLX's operations over encoded blocks on CPU, a tile at a time
    decoded.py    MLX's own attention over dequantized blocks, and mlx-lm's over what is read
"""

from ..layout import Rule
from .base import Backend, Call
from .cuda.encoded import CudaEncoded
from .cuda.plain import CudaPlain
from .decoded import Decoded, Stock
from .layer import LayerKV
from .metal.backend import MetalPlain
from .numba.encoded import Numba
from .numba.plain import NumbaPlain
from .paged import Paged
from .shared import Shared
from .tiles import Tiles

__all__ = ["Backend", "Call", "LayerKV", "backends", "choose"]

# They are tried in this order; another backend is inserted at its position before a model is loaded.
backends: list[type[Backend]] = [
    CudaPlain,
    CudaEncoded,
    MetalPlain,
    Numba,
    NumbaPlain,
    Shared,
    Paged,
    Tiles,
    Decoded,
    Stock,
]


def choose(
    kv: LayerKV, block_size: int, rule: Rule, query_heads: int, eager: bool = True
) -> tuple[tuple[Backend, ...], list[str]]:
    """The backends of one layer, and the reasons why others that support it are not used (`Backend.why_not`).

    Without `eager`, only those that compute when the step is evaluated.
    """
    chosen, reasons = [], []
    for backend in backends:
        allowed = (kv.kernels or not backend.kernel) and (eager or not backend.eager)
        if not allowed or not backend.supports(kv.layer, block_size, kv.device):
            continue
        reason = backend.why_not(kv.layer, block_size, rule, query_heads)
        if reason is None:
            chosen.append(backend(kv))
        else:
            reasons.append(reason)
    return tuple(chosen), reasons

"""Attention over the pool.

How a model's calls reach it is hook.py's part; what a layer has there, and how a step writes and reads it, layer.py's.
What computes is a backend (base.py has the contract):

    cuda/         kernels over plain and over encoded blocks
    numba/        compiled loops over encoded blocks on CPU
    paged.py      MLX's operations over plain blocks
    shared.py     the same where rows begin with the same blocks, which are read once
    tiles.py      the same over encoded ones on CPU, a tile at a time
    decoded.py    MLX's own attention over decoded blocks, and mlx-lm's over what is read
"""

from .base import Backend, Call
from .cuda.encoded import CudaEncoded
from .cuda.plain import CudaPlain
from .decoded import Decoded, Stock
from .layer import LayerKV
from .numba.encoded import Numba
from .paged import Paged
from .shared import Shared
from .tiles import Tiles

__all__ = ["Backend", "Call", "LayerKV", "backends", "choose"]

# In this order they are asked; whoever has another puts it where it belongs, before a model is loaded.
backends: list[type[Backend]] = [CudaPlain, CudaEncoded, Numba, Shared, Paged, Tiles, Decoded, Stock]


def choose(kv: LayerKV, block_size: int) -> tuple[Backend, ...]:
    """The backends of one layer."""
    return tuple(backend(kv) for backend in backends if backend.supports(kv.layer, block_size, kv.device))

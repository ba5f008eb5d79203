"""On what MLX computes. Asked for when a model is loaded: what is chosen by it stays."""

from typing import Literal

import mlx.core as mx

Kind = Literal["cpu", "metal", "cuda"]


def kind() -> Kind:
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def settle(*arrays: object) -> None:
    """Evaluate `arrays`, and wait until nothing refers to what was read for them.

    MLX's thread says that it is done before it lets go of what it has read. A write in between would find a second
    reference and copy the whole array.
    """
    mx.eval(*arrays)
    mx.synchronize()

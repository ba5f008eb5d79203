"""The device that MLX computes on. It is queried when a model is loaded; choices based on it are final."""

from typing import Literal

import mlx.core as mx

Kind = Literal["cpu", "metal", "cuda"]


def kind() -> Kind:
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def settle(*arrays: object) -> None:
    """Evaluate `arrays`, and wait until nothing refers to what was read for them.

    On a GPU, `mx.eval` returns when the device signals that it is done. What was read is released after that, by a
    completion handler in another thread; MLX would find a second reference until then, and copy an array that it is to
    write. So whatever has read the pool is settled before MLX writes it. On CPU, this takes 5 µs.
    """
    mx.eval(*arrays)
    mx.synchronize()

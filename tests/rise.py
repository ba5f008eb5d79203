"""What a block of code adds to MLX's memory."""

import gc

import mlx.core as mx


class Rise:
    """How far memory rises in a block, and what of it stays, in parts of `unit` bytes."""

    def __init__(self, unit: int = 1) -> None:
        self._unit = unit

    def __enter__(self) -> "Rise":
        gc.collect()
        self._level = mx.get_active_memory()
        mx.reset_peak_memory()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = (mx.get_peak_memory() - self._level) / self._unit
        self.left = (mx.get_active_memory() - self._level) / self._unit

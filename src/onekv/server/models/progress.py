"""Progress of loads and unloads, and estimates of how long a load will take.

`Loads` remembers the durations of loads. The progress of a load is derived from these, from the time since it began
(`Model.since`) and from the bytes read so far; that of an unload from what its engine's thread is doing.
"""

import time
from typing import Any

from ...config import counted
from ...models.reading import read
from .model import Model


class Loads:
    """Changed by who loads, read by any thread. One model is loaded at a time: the bytes read since are its own."""

    def __init__(self) -> None:
        # Seconds of the last load of each model, by name.
        self._last: dict[str, float] = {}
        # Of all loads together.
        self._bytes, self._seconds = 0, 0.0
        self._read_before = 0

    def began(self) -> None:
        self._read_before = read.bytes

    def ended(self, model: Model, seconds: float) -> None:
        self._last[model.name] = seconds
        self._bytes += model.planned.plan.weights
        self._seconds += seconds

    def estimate(self, model: Model) -> float | None:
        """Seconds that a load of `model` will take: as the last one, else at the speed of all others; None at first."""
        if model.name in self._last:
            return self._last[model.name]
        return model.planned.plan.weights * self._seconds / self._bytes if self._bytes else None

    def so_far(self, model: Model) -> dict[str, Any]:
        """Of the model that is being loaded."""
        weights, estimate = model.planned.plan.weights, self.estimate(model)
        return {
            "for_s": round(time.monotonic() - model.since, 3),
            "estimate_s": None if estimate is None else round(estimate, 3),
            # Layers that are unpacked while they are read may be counted a little larger than they end up.
            "read_bytes": min(read.bytes - self._read_before, weights),
            "weights_bytes": weights,
        }

    def told(self, model: Model) -> str:
        """A sentence for a request that waits for `model`."""
        if model.state != "loading":
            return f"the model {model.name} is {model.state}"
        estimate = self.estimate(model)
        length = "" if estimate is None else f" of about {estimate:.0f} s"
        return f"the model {model.name} has been loading for {time.monotonic() - model.since:.0f} s{length}"

    def expected(self, model: Model) -> str:
        """For the log, before a load."""
        estimate = self.estimate(model)
        if estimate is None:
            return "how long that takes is not known yet"
        source = "as the last time" if model.name in self._last else "at the speed of earlier loads"
        return f"about {estimate:.1f} s, {source}"


def unloading(model: Model) -> dict[str, Any]:
    """Of a model that is being unloaded: what it waits for, or what it is doing."""
    said: dict[str, Any] = {"for_s": round(time.monotonic() - model.since, 3)}
    backend = model.backend
    if model.uses > 0:
        return said | {"doing": f"waiting for {counted(model.uses, 'requests')} in flight"}
    if backend is None:
        return said | {"doing": "giving memory back"}
    doing = backend.thread.doing
    if doing.stored is None:
        return said | {"doing": "stopping its engine"}
    stored, total = doing.stored
    return said | {"doing": str(doing), "stored_bytes": stored, "store_bytes": total}

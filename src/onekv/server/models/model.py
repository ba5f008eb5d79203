"""One model of several: its state, what it needs, and the requests that use it.

`Models` (registry.py) changes it, with its lock held; only `move` changes the state. A `Place` is a request's claim to
a model: it is in the queue until the model is loaded, then it holds the model until it leaves.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from ...engine.known import Known
from ...memory.plan import MARGIN
from ...prefix.events import Listener
from ..backend import Backend
from ..metrics import Metrics
from .planning import Planned
from .settings import LRU, PINNED, idle_seconds
from .spec import ModelSpec

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
MOVES: dict[State, tuple[State, ...]] = {
    "unloaded": ("loading",),
    "loading": ("loaded", "failed"),
    "loaded": ("unloading",),
    "unloading": ("unloaded",),
    "failed": ("loading",),
}
# Where it is in memory, or soon will be, and stays.
PRESENT = ("loading", "loaded")


class Model:
    def __init__(self, spec: ModelSpec, metrics: Metrics, listener: Listener | None = None) -> None:
        """`listener` hears which of its blocks are cached, from one time that it is loaded to the next."""
        self.spec, self.metrics, self.listener = spec, metrics, listener
        self.name, self.names = spec.name, spec.names
        # How long it stays loaded: as configured, until it is pinned at run time.
        self.keep = spec.keep
        self.state: State = "unloaded"
        # When that became so (`time.monotonic`).
        self.since = time.monotonic()
        # Why it failed; None in every other state.
        self.reason: str | None = None
        # Known from the server's start on.
        self.planned: Planned
        # From one time that it is loaded to the next; used by the thread that loads.
        self.known = Known()
        # While it is loaded or unloading.
        self.backend: Backend | None = None
        # Requests that hold it, and when one last came or left (`time.monotonic`).
        self.uses = 0
        self.used = -float("inf")

    def move(self, state: State, reason: str | None = None) -> None:
        assert state in MOVES[self.state], f"{self.name}: {self.state} -> {state}"
        self.state, self.reason, self.since = state, reason, time.monotonic()

    @property
    def pinned(self) -> bool:
        return self.keep == PINNED

    def pin(self) -> None:
        self.keep = PINNED

    def unpin(self) -> None:
        """Back to what was configured, or to lru where that was pinned."""
        self.keep = LRU if self.spec.keep == PINNED else self.spec.keep

    @property
    def counted(self) -> bool:
        """Whether it takes bytes of the budget now."""
        return self.state in ("loading", "loaded", "unloading")

    @property
    def expires(self) -> float:
        """When it has idled long enough, if it is not used until then."""
        return self.used + idle_seconds(self.keep)

    @property
    def expired(self) -> bool:
        return self.state == "loaded" and self.uses == 0 and time.monotonic() >= self.expires


@dataclass(eq=False)
class Place:
    """A request for `model`. The future has the backend, which the request then holds, or why there is none."""

    model: Model
    # What its client knows it by.
    request: str | None = None
    since: float = field(default_factory=time.monotonic)
    came: "Future[Backend]" = field(default_factory=Future)


def limit_of(memory: int, others: Iterable[Model]) -> int:
    """How large the process may become while a model is loaded: `others` have their weights and pools, but may need all
    of their workspace meanwhile.
    """
    plans = [model.planned.plan for model in others]
    return memory - sum(plan.workspace + plan.staging + plan.state_bytes for plan in plans)


def needs(models: list[Model], held: Iterable[Model] = ()) -> int:
    """Bytes that `models` take when they are loaded together, with the process's own; weights of several count once.

    Of those `held` the weights that are shared are in memory, and no more.
    """
    shared = {model.spec.weights: model.planned.shared for model in (*models, *held)}
    return sum(model.planned.own for model in models) + sum(shared.values()) + MARGIN

"""Creates the backend of a model.

`Loader` is used by the thread that loads and unloads; `loads` and `holds` may be read by any thread.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import MemoryBudgetError
from ...models.freed import freed
from ...units import format_size
from ..backend import Backend
from .freeing import Parts, give_back
from .model import Model
from .progress import Loads
from .spec import ModelSpec
from .weights import SharedWeights

log = logging.getLogger("onekv.models")


class Loader:
    def __init__(self, specs: Sequence[ModelSpec], common: Mapping[str, Any]) -> None:
        """`common` are arguments of every `Backend`."""
        self._common = dict(common)
        self._weights = SharedWeights(specs)
        self.loads = Loads()

    def load(self, model: Model) -> Backend:
        """The backend of `model`, started. Raises what loading it raises."""
        plan, tokenizer = model.planned.plan, model.planned.tokenizer
        size = format_size(plan.weights)
        log.info("loading the model %s, %s of weights: %s", model.name, size, self.loads.expected(model))
        # In bytes, as it was planned: what is free is another number by now.
        settings = vars(model.spec.engine) | {"kv_memory": plan.budget}
        common = self._common | {"served": model.spec.served, "name": model.name, "metrics": model.metrics}
        common["known"] = model.known
        weights = self._weights.of(model.spec, tokenizer, bool(common.get("progress", True)))
        backend = Backend(weights, listener=model.listener, tokenizer=tokenizer, **common, **settings)
        backend.start()
        freed.release()
        taken = backend.llm.plan.total
        if taken > plan.total:
            backend.stop(0)
            raise MemoryBudgetError(
                f"the model {model.name!r} takes {format_size(taken)}, more than the {format_size(plan.total)} planned"
            )
        self.loads.ended(model, time.monotonic() - model.since)
        return backend

    def holds(self, model: Model) -> bool:
        """Whether the weights that `model` shares with others are in memory, whether or not it is loaded."""
        return self._weights.holds(model.spec)

    def keep(self, models: Iterable[Model], parts: Parts | None = None, limit: int | None = None) -> None:
        """Let go of shared weights that none of `models` has, and give back to the system what is free; see
        `give_back`.
        """
        self._weights.keep(model.spec for model in models)
        give_back(parts, limit)

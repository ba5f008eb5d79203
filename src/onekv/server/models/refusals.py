"""Errors for requests that get no model, with the numbers and the flag that changes them."""

from collections.abc import Sequence

from ...config import counted
from ...errors import MemoryBudgetError, OverloadedError
from ...units import format_size
from .model import Model, Place, needs


def check_fits(model: Model, pinned: list[Model], memory: int) -> None:
    """Raises MemoryBudgetError if `model` cannot be loaded with the others that are `pinned`, whatever is unloaded."""
    wanted = needs([model, *pinned])
    if wanted <= memory:
        return
    beside = f" beside what is pinned ({', '.join(other.name for other in pinned)})" if pinned else ""
    plan = model.planned.plan
    kv, workspace = format_size(plan.pool_bytes + plan.state_bytes), format_size(plan.workspace + plan.staging)
    need = wanted - needs(pinned)
    # Those that are not there already.
    weights = format_size(plan.weights - (model.planned.need - need))
    raise MemoryBudgetError(
        f"the model {model.name!r} needs {format_size(need)} (weights {weights}, KV {kv}, workspace {workspace})"
        f"{beside}: {format_size(wanted)} in all with the margin, but --memory is {format_size(memory)}; "
        f"{_ways(model, pinned, memory)}"
    )


def _ways(model: Model, pinned: list[Model], memory: int) -> str:
    """What would help."""
    ways = ["raise it"]
    if pinned and needs([model]) <= memory:
        ways.append("pin fewer models")
    there = [model, *pinned]
    if needs(there) - sum(each.planned.need - each.planned.least for each in there) <= memory:
        ways.append("lower --kv-memory")
    return ", or ".join((", ".join(ways[:-1]), ways[-1])) if len(ways) > 1 else ways[0]


def too_many(model: Model, waiting: int) -> OverloadedError:
    return OverloadedError(
        f"the model {model.name!r} is {model.state}, and {waiting} requests wait for models already; try again later "
        "(--max-waiting changes that)",
        retry_after=5,
    )


def too_long(place: Place, queue: Sequence[Place], max_wait: float) -> OverloadedError:
    """Of a request that has waited `max_wait` seconds."""
    return OverloadedError(
        f"the request waited {max_wait:.0f} s for the model {place.model.name!r}, which is {place.model.state}; it was "
        f"{standing(place, queue)} (--max-wait)",
        retry_after=10,
    )


def standing(place: Place, queue: Sequence[Place]) -> str:
    """Which place in the queue it is."""
    number = queue.index(place) + 1 if place in queue else 0
    return f"number {number} of {counted(len(queue), 'requests')} waiting for models"


def shutting_down() -> OverloadedError:
    return OverloadedError("the server is shutting down", retry_after=5)

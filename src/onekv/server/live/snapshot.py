"""One snapshot: memory, pools with their blocks, requests, prefix cache and tiers, for each model."""

import base64
import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from ...engine.view import RequestView, View
from ...footprint import footprint
from ...llm import PoolStats
from ..backend import Backend
from ..metrics import Ended
from ..models.describe import overview, overview_of_one
from ..models.registry import Models

# Bytes of memory, by owner, that each model has separately.
OWNERS = ("held", "cached", "pinned", "free", "states", "snapshots")
# Fields of /admin/models that are also in the feed.
KEPT = (
    *("name", "names", "state", "keep", "base", "reason", "bytes"),
    *("context_length", "block_size", "loading", "unloading"),
)
# Seconds over which the speed of a request is averaged.
RATE_S = 2.0
# Two requests with the same number, which is reused, have not arrived within so many seconds of each other.
SAME_S = 1e-4
LONGEST_RUN = 255


class Snapshots:
    """Makes them, one after the other: remembers what requests had generated, to tell how fast they are."""

    def __init__(self, backend: Backend | Models) -> None:
        self._backend = backend
        self._seen: dict[tuple[str, int], _Seen] = {}
        # Ids of the requests that have ended and are still shown, by model.
        self._ended: dict[str, dict[Ended, int]] = {}
        self._ids = itertools.count(1)

    @property
    def stopping(self) -> bool:
        return self._backend.stopping if isinstance(self._backend, Models) else self._backend.thread.stopping

    def id_of(self, model: str, number: int) -> int | None:
        """The id under which the feed shows a request; None if it has not shown it yet."""
        seen = self._seen.get((model, number))
        return seen.id if seen is not None else None

    def newer_than(self, moment: float) -> bool:
        """Whether the views of all loaded models are; asking makes an idle engine take another one."""
        backend = self._backend
        backends = backend.backends().values() if isinstance(backend, Models) else [backend]
        return all(each.thread.look(blocks=True).time >= moment for each in backends if each.loaded)

    def take(self) -> dict[str, Any]:
        """What there is now. Only where something is loaded (`admin.access.loaded`)."""
        backend = self._backend
        if isinstance(backend, Models):
            said, backends = overview(backend), backend.backends()
        else:
            said, backends = overview_of_one(backend), {backend.name: backend}
        views = {name: each.thread.look(blocks=True) for name, each in backends.items() if each.loaded}
        # After the views: who is in none of them has ended.
        self._ended = {name: self._ids_of(name, backends[name].metrics.ended.copy()) for name in views}
        self._forget(views)
        models = [self._model(row, views.get(row["name"])) for row in said["models"]]
        return {
            "version": 1,
            "memory": self._memory(said["memory"], models, views),
            "models": models,
            "lookups": max((each.metrics.lookups.last for each in backends.values()), default=0),
            "queue": [{"position": place["position"], "model": place["model"]} for place in said["queue"]],
        }

    def _memory(
        self, budget: dict[str, Any], models: list[dict[str, Any]], views: dict[str, View]
    ) -> dict[str, int | None]:
        limit, counted = budget["limit"], budget["counted"]
        rows = [model["memory"] for model in models if model["memory"] is not None]
        figures = {owner: sum(row[owner] for row in rows) for owner in OWNERS}
        newest = max(views.values(), key=lambda view: view.time, default=None)
        process = newest.stats.memory if newest is not None else None
        return {
            "budget": counted if limit is None else limit,
            "counted": counted,
            "weights": self._weights(views),
            **figures,
            "active": process.active if process is not None else None,
            "peak": process.peak if process is not None else None,
            "buffer_cache": process.buffer_cache if process is not None else None,
            "footprint": process.footprint if process is not None else footprint(),
        }

    def _weights(self, views: dict[str, View]) -> int:
        """Those that several models have count once."""
        if not isinstance(self._backend, Models):
            return sum(view.stats.memory.weights for view in views.values())
        present = [model for model in self._backend.models if model.name in views]
        shared = {model.spec.weights: model.planned.shared for model in present}
        return sum(model.planned.plan.weights - model.planned.shared for model in present) + sum(shared.values())

    def _model(self, row: dict[str, Any], view: View | None) -> dict[str, Any]:
        said = {key: row[key] for key in KEPT if key in row}
        expires = row["expires_s"]
        said["expires_s"] = None if expires is None else math.ceil(expires)
        if view is None:
            return said | {
                "memory": None,
                "pools": [],
                "requests": [],
                "ended": [],
                "prefix": None,
                "tiers": [],
                "speculation": None,
            }
        stats = view.stats
        maps = view.blocks or (None,) * len(stats.pools)
        ended = self._ended[row["name"]]
        requests = [self._request(row["name"], request, view.time) for request in view.requests]
        # A request may have ended after the view was made.
        over = set(ended.values())
        return said | {
            "memory": _owners(view),
            "pools": [_pool(pool, blocks) for pool, blocks in zip(stats.pools, maps, strict=True)],
            "requests": sorted((each for each in requests if each["id"] not in over), key=lambda each: each["id"]),
            "ended": [_ended(each, number) for each, number in ended.items()],
            "prefix": asdict(stats.prefix) if stats.prefix is not None else None,
            "tiers": [asdict(tier) for tier in stats.tiers],
            "speculation": asdict(stats.speculation) if stats.speculation is not None else None,
        }

    def _request(self, model: str, request: RequestView, now: float) -> dict[str, Any]:
        seen = self._see(model, request.number, now - request.age)
        return {
            "id": seen.id,
            "state": request.state,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "stored_tokens": min(request.stored_tokens, request.prompt_tokens),
            "generated_tokens": request.generated_tokens,
            "max_tokens": request.max_tokens,
            "proposed_tokens": request.proposed_tokens,
            "accepted_tokens": request.accepted_tokens,
            "tokens_per_second": seen.speed(now, request.generated_tokens),
            "age_s": round(request.age, 2),
        }

    def _see(self, model: str, number: int, created: float) -> "_Seen":
        """The request as it is known to who watches; a new one if it has not been seen yet."""
        seen = self._seen.get((model, number))
        if seen is None or abs(seen.created - created) > SAME_S:
            seen = self._seen[model, number] = _Seen(next(self._ids), created)
        return seen

    def _ids_of(self, model: str, ended: Iterable[Ended]) -> dict[Ended, int]:
        known = self._ended.get(model, {})
        return {each: known.get(each) or self._see(model, each.number, each.created).id for each in ended}

    def _forget(self, views: dict[str, View]) -> None:
        there = {(name, request.number) for name, view in views.items() for request in view.requests}
        self._seen = {key: seen for key, seen in self._seen.items() if key in there}


class _Seen:
    """A request that is known as `id` to who watches, and how fast it is."""

    def __init__(self, number: int, created: float) -> None:
        self.id, self.created = number, created
        self._moments: deque[tuple[float, int]] = deque()

    def speed(self, now: float, generated: int) -> float | None:
        """Tokens a second; None until there are two moments to compare."""
        moments = self._moments
        if generated and (not moments or now > moments[-1][0]):
            moments.append((now, generated))
        while len(moments) > 2 and moments[1][0] <= now - RATE_S:
            moments.popleft()
        if len(moments) < 2:
            return None
        (began, before), (ended, after) = moments[0], moments[-1]
        return round((after - before) / (ended - began), 1)


def _ended(request: Ended, number: int) -> dict[str, Any]:
    """As a request, with what it was in the end."""
    figures = asdict(request)
    del figures["number"], figures["created"]
    age = figures.pop("seconds")
    return {"id": number, "state": "ended", **figures, "age_s": age}


def _owners(view: View) -> dict[str, int]:
    """Bytes of one model."""
    stats = view.stats
    pools = stats.pools
    return {
        "weights": stats.memory.weights,
        "held": sum(pool.held * pool.block_bytes for pool in pools),
        "cached": sum(pool.idle * pool.block_bytes for pool in pools),
        "pinned": sum(pool.pinned * pool.block_bytes for pool in pools),
        "free": sum(pool.free * pool.block_bytes for pool in pools),
        "states": stats.memory.states,
        "snapshots": stats.prefix.snapshot_bytes if stats.prefix is not None else 0,
    }


def _pool(pool: PoolStats, blocks: bytes | None) -> dict[str, Any]:
    return {**asdict(pool), "map": None if blocks is None else base64.b64encode(runs(blocks)).decode()}


def runs(blocks: bytes) -> bytes:
    """`blocks` as pairs of bytes: what it is, and how many such blocks follow each other (at most 255)."""
    states = np.frombuffer(blocks, np.uint8)
    edges = np.flatnonzero(np.diff(states)) + 1
    starts = np.concatenate(([0], edges))[: len(states)]
    lengths = np.diff(np.concatenate((starts, [len(states)])))
    pieces = -(-lengths // LONGEST_RUN)
    pairs = np.full((int(pieces.sum()), 2), LONGEST_RUN, np.uint8)
    pairs[:, 0] = np.repeat(states[starts], pieces)
    last = np.cumsum(pieces) - 1
    pairs[last, 1] = lengths - (pieces - 1) * LONGEST_RUN
    return pairs.tobytes()

"""One snapshot: memory, pools with their blocks, requests, prefix cache and tiers, for each model."""

import base64
import math
from collections import deque
from dataclasses import asdict
from typing import Any

import numpy as np

from ...engine.view import RequestView, View
from ...footprint import footprint
from ...llm import PoolStats
from ..backend import Backend
from ..models.describe import overview, overview_of_one
from ..models.registry import Models

# Bytes of memory, by owner, that models have each of their own.
OWNERS = ("held", "cached", "pinned", "free", "states", "snapshots")
# What /admin/models says of a model that the feed says, too.
KEPT = (
    *("name", "names", "state", "keep", "base", "reason", "bytes"),
    *("context_length", "block_size", "loading", "unloading"),
)
# Seconds over which the speed of a request is averaged.
RATE_S = 2.0
LONGEST_RUN = 255


class Snapshots:
    """Makes them, one after the other: remembers what requests had generated, to tell how fast they are."""

    def __init__(self, backend: Backend | Models) -> None:
        self._backend = backend
        self._speeds: dict[tuple[str, int], _Speed] = {}
        self._number = 0

    @property
    def stopping(self) -> bool:
        return self._backend.stopping if isinstance(self._backend, Models) else self._backend.thread.stopping

    def id_of(self, model: str, number: int) -> int | None:
        """The id under which the feed shows a request; None if it has not shown it yet."""
        speed = self._speeds.get((model, number))
        return speed.id if speed is not None else None

    def take(self) -> dict[str, Any]:
        """What there is now. Only where something is loaded (`admin.access.loaded`)."""
        backend = self._backend
        if isinstance(backend, Models):
            said, backends = overview(backend), backend.backends()
        else:
            said, backends = overview_of_one(backend), {backend.name: backend}
        views = {name: each.thread.look(blocks=True) for name, each in backends.items() if each.loaded}
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
                "prefix": None,
                "tiers": [],
                "speculation": None,
            }
        stats = view.stats
        maps = view.blocks or (None,) * len(stats.pools)
        requests = [self._request(row["name"], request, view.time) for request in view.requests]
        return said | {
            "memory": _owners(view),
            "pools": [_pool(pool, blocks) for pool, blocks in zip(stats.pools, maps, strict=True)],
            "requests": sorted(requests, key=lambda request: request["id"]),
            "prefix": asdict(stats.prefix) if stats.prefix is not None else None,
            "tiers": [asdict(tier) for tier in stats.tiers],
            "speculation": asdict(stats.speculation) if stats.speculation is not None else None,
        }

    def _request(self, model: str, request: RequestView, now: float) -> dict[str, Any]:
        speed = self._speeds.get((model, request.number))
        if speed is None:
            self._number += 1
            speed = self._speeds[model, request.number] = _Speed(self._number)
        return {
            "id": speed.id,
            "state": request.state,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "stored_tokens": min(request.stored_tokens, request.prompt_tokens),
            "generated_tokens": request.generated_tokens,
            "max_tokens": request.max_tokens,
            "proposed_tokens": request.proposed_tokens,
            "accepted_tokens": request.accepted_tokens,
            "tokens_per_second": speed.after(now, request.generated_tokens),
            "age_s": round(request.age, 2),
        }

    def _forget(self, views: dict[str, View]) -> None:
        there = {(name, request.number) for name, view in views.items() for request in view.requests}
        self._speeds = {key: speed for key, speed in self._speeds.items() if key in there}


class _Speed:
    """Tokens a second of one request, which is known as `id` to who watches."""

    def __init__(self, number: int) -> None:
        self.id = number
        self._seen: deque[tuple[float, int]] = deque()

    def after(self, now: float, generated: int) -> float | None:
        """None until there are two moments to compare."""
        seen = self._seen
        if generated and (not seen or now > seen[-1][0]):
            seen.append((now, generated))
        while len(seen) > 2 and seen[1][0] <= now - RATE_S:
            seen.popleft()
        if len(seen) < 2:
            return None
        (began, before), (ended, after) = seen[0], seen[-1]
        return round((after - before) / (ended - began), 1)


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

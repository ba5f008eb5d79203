"""The response of /admin/cache/conversations: built once for all clients, at a cost of at most 1 % of the time."""

import asyncio
import json
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from ...engine.contents import TreeView, read_tree
from ...prefix.index import as_tokens
from ..backend import Backend
from ..explain import words_of
from ..live.tree import MOST, Row, rows_of
from .access import Reader

# Tokens of a row that are shown, and the longest text they may become.
SHOWN, LONGEST = 40, 160
# Tokens that its neighbours have, too, and that are shown before those that only this row has.
BEFORE = 4
# A tree is reread once its age exceeds this many times the engine time it took, and this many seconds.
PATIENCE, FRESH_S = 100, 1.0


class _Reading:
    """One tree of one model, and the answers made from it, by who asked."""

    def __init__(self, backend: Backend) -> None:
        self.task = asyncio.create_task(backend.in_slices(read_tree))
        self.answers: dict[tuple[str, bool], asyncio.Task[bytes]] = {}
        self._began = time.monotonic()

    @property
    def old(self) -> bool:
        if not self.task.done():
            return False
        if self.task.cancelled() or self.task.exception() is not None:
            return True
        return time.monotonic() >= self._began + max(FRESH_S, PATIENCE * self.task.result().seconds)


class Trees:
    """Used by the event loop only."""

    def __init__(self) -> None:
        # Weak, so that an unloaded model is not kept alive here.
        self._readings: WeakKeyDictionary[Backend, _Reading] = WeakKeyDictionary()

    async def answer(self, backend: Backend, asking: Reader) -> bytes:
        """As much of the tree as `asking` may see, as JSON."""
        reading = self._readings.get(backend)
        if reading is None or reading.old:
            reading = self._readings[backend] = _Reading(backend)
        tree = await asyncio.shield(reading.task)
        who = (asking.salt, asking.administrator)
        if who not in reading.answers:
            reading.answers[who] = asyncio.create_task(asyncio.to_thread(_answer, backend, asking, tree))
        return await asyncio.shield(reading.answers[who])

    def forget(self, backend: Backend) -> None:
        """Its tree was changed by a client that will look again."""
        self._readings.pop(backend, None)


def _answer(backend: Backend, asking: Reader, tree: TreeView) -> bytes:
    sizes = [pool.block_bytes for pool in backend.thread.look().stats.pools]
    rows = rows_of(tree, sizes, asking.sees)
    common = _common(rows[:MOST])
    said = {
        "bytes": sum(row.size for row in rows),
        "conversations": sum(row.ends for row in rows if row.parent is None),
        "rows": [_row(backend, asking, tree, row, common[row.key]) for row in rows[:MOST]],
        "left_out": {"rows": len(rows[MOST:]), "bytes": sum(row.size for row in rows[MOST:])},
    }
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _row(backend: Backend, asking: Reader, tree: TreeView, row: Row, common: int) -> dict[str, Any]:
    first, last = row.nodes[0], row.nodes[-1]
    return {
        # Pins extend to the last node; a drop starts at the first.
        "id": last.key.hex(),
        "first": first.key.hex(),
        "parent": row.parent.hex() if row.parent is not None else None,
        **asking.owner(row.salt),
        "start": first.start,
        "end": last.end,
        "bytes": row.size,
        "total_bytes": row.total,
        "conversations": row.ends,
        "pinned": row.pinned,
        "running": sum(node.leases for node in row.nodes),
        "idle_s": round(max(0.0, tree.time - max(node.used_at for node in row.nodes)), 1),
        "text": _text(backend, row, common) if asking.reads(row.salt) else None,
    }


def _common(rows: list[Row]) -> dict[bytes, int]:
    """For each row, by its key: how many of its tokens one that continues the same row begins with, too.

    Prefixes are shared by whole blocks, so conversations that differ in the first one all begin with the same words.
    """
    siblings: dict[tuple[str, bytes | None], list[tuple[list[int], bytes]]] = defaultdict(list)
    for row in rows:
        siblings[row.salt, row.parent].append((as_tokens(row.nodes[0].tokens), row.key))
    common: dict[bytes, int] = defaultdict(int)
    for family in siblings.values():
        # In this order, the one that has most in common with a row is next to it.
        for (tokens, key), (others, other) in pairwise(sorted(family)):
            same = _alike(tokens, others)
            common[key], common[other] = max(common[key], same), max(common[other], same)
    return common


def _alike(some: list[int], others: list[int]) -> int:
    different = (at for at, (one, other) in enumerate(zip(some, others, strict=False)) if one != other)
    return next(different, min(len(some), len(others)))


def _text(backend: Backend, row: Row, common: int) -> str:
    """How the row begins, or how it continues what it has in common with others."""
    begin = max(0, common - BEFORE)
    tokens: list[int] = []
    for node in row.nodes:
        tokens += as_tokens(node.tokens)
        if len(tokens) >= begin + SHOWN:
            break
    text = words_of(backend, tokens[begin : begin + SHOWN])
    return f"…{text}"[:LONGEST] if begin else text[:LONGEST]

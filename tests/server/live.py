"""A watcher of GET /admin/live, as a program would be."""

import base64
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import numpy as np

Snapshot = dict[str, Any]
LONGEST_S = 60


@contextmanager
def watching(url: str, key: str | None = None) -> Iterator[Iterator[Snapshot]]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{url}/admin/live", headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _snapshots(answer.iter_lines())


def _snapshots(lines: Iterator[str]) -> Iterator[Snapshot]:
    """Also a feed in which nothing changes has lines; it is not read for ever."""
    deadline = time.monotonic() + LONGEST_S
    for line in lines:
        assert time.monotonic() < deadline, f"what was waited for was not in the feed for {LONGEST_S} s"
        if line.startswith("data: "):
            yield json.loads(line[6:])


def until(snapshots: Iterator[Snapshot], wanted: Callable[[Snapshot], Any]) -> Snapshot:
    """The first that is as wanted."""
    return next(snapshot for snapshot in snapshots if wanted(snapshot))


def blocks(pool: dict[str, Any]) -> np.ndarray:
    """What each block of a pool is; nothing where that is not known yet."""
    pairs = np.frombuffer(base64.b64decode(pool["map"] or ""), np.uint8).reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1])


def counts(pool: dict[str, Any]) -> dict[str, int]:
    """Blocks by state, as PoolStats counts them."""
    found = Counter(min(state, 3) for state in blocks(pool).tolist())
    return {"free": found[0], "idle": found[1], "pinned": found[2], "held": found[3]}

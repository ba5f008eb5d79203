"""Events as vLLM's routers read them: arrays of MessagePack, with numbers for hashes.

    batch      [time, [event, ...], rank]                                rank is 0: one publisher for each model
    event      ["BlockStored", [hash, ...], parent, [token, ...], block size, None, medium, None]
               ["BlockRemoved", [hash, ...], medium]
               ["AllBlocksCleared"]

The two that are None are for LoRA. Blocks that follow each other, stored or removed, share an event. A hash is the last
8 bytes of the block's key, as an unsigned number: what vLLM sends, and what routers make of longer ones.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...prefix.events import Cleared, Event, Removed, Stored
from ...prefix.index import TOKEN_BYTES

RANK = 0
# The KV pool, whatever the device: it is what routers take for the fastest place.
MEDIUM = "GPU"


def number(key: bytes) -> int:
    """The hash of a block, for its key."""
    return int.from_bytes(key[-8:], "big")


def batch(events: Iterable[Event], seconds: float, with_tokens: bool) -> list[Any]:
    """All of `events`, in order, as one message; without tokens, their lists are empty."""
    arrays: list[list[Any]] = []
    before: Event | None = None
    for event in events:
        if isinstance(event, Cleared):
            arrays.append(["AllBlocksCleared"])
        elif isinstance(event, Removed):
            if isinstance(before, Removed):
                arrays[-1][1].append(number(event.key))
            else:
                arrays.append(["BlockRemoved", [number(event.key)], MEDIUM])
        else:
            tokens = np.frombuffer(event.tokens, np.int32).tolist() if with_tokens else []
            if isinstance(before, Stored) and before.key == event.parent:
                arrays[-1][1].append(number(event.key))
                arrays[-1][3].extend(tokens)
            else:
                parent = number(event.parent) if event.parent is not None else None
                size = len(event.tokens) // TOKEN_BYTES
                arrays.append(["BlockStored", [number(event.key)], parent, tokens, size, None, MEDIUM, None])
        before = event
    return [seconds, arrays, RANK]

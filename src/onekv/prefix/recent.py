"""Which tokens the colder tiers hold, of the nodes used last: known at the start, when nothing is in RAM.

A tier knows neither salts nor what a key is computed from. A key is the hash of the parent's key and the node's tokens,
and the first parent is the root of a salt: so with a salt, one can find what was stored under it. Ownership of a node
follows from hashes that are recomputed here, whatever a tier claims.

    tier      [128, 150) of A    [64, 128) of A    [0, 64) of A    [64, 128) of B    ...
    by root   A: [0, 150)        B: nothing, its beginning is not among them

If nodes in the middle are missing, such as those that have left a window, the salt of what follows is unknown.
"""

from collections.abc import Sequence

import numpy as np

from ..tiers.base import Address
from .index import Index


class Recent:
    def __init__(self, index: Index, addresses: Sequence[Address]) -> None:
        """`addresses`: the nodes of one model, those used last first."""
        self._runs: dict[bytes, list[bytes]] = {}
        nodes = {node.key: node for node in addresses if index.key_after(node.parent, node.tokens) == node.key}
        parents = {node.parent for node in nodes.values()}
        told: set[bytes] = set()
        # What was used last comes last.
        for end in reversed([node for key, node in nodes.items() if key not in parents]):
            path = _path(nodes, end)
            if path[0].start == 0:
                # A shared block is reported once, and again only if a continuation starts from it.
                new = next(number for number, node in enumerate(path) if node.key not in told)
                run = b"".join(node.tokens for node in path[max(new - 1, 0) :])
                self._runs.setdefault(path[0].parent, []).append(run)
                told.update(node.key for node in path)
        self._index = index

    def take(self, salt: str) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
        """Pieces of conversations under `salt`, those used last at the end; once, then they are not kept."""
        return [np.frombuffer(run, np.int32) for run in self._runs.pop(self._index.root(salt).key, [])]


def _path(nodes: dict[bytes, Address], end: Address) -> list[Address]:
    """`end` and the nodes before it, the first one first."""
    path = [end]
    while path[-1].start and (parent := nodes.get(path[-1].parent)) is not None:
        path.append(parent)
    return path[::-1]

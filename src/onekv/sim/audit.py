"""Checks that every cached block and snapshot contains what it should; too slow for every step."""

from collections.abc import Mapping, Set

import numpy as np

from ..engine import Engine
from ..memory.pool.table import FORGOTTEN
from ..prefix.index import Node
from .model import Violation, pool_views
from .truth import Hashes, Truth, as_rows, chain


def check_contents(engine: Engine, truth: Truth, seen: Mapping[str, Set[int]]) -> None:
    """Every cached block and snapshot; `seen` has the prefix hashes of all that was computed, by salt."""
    for salt, root in engine.prefix.index.roots.items():
        open_nodes = [(root, truth.start)]
        while open_nodes:
            node, start = open_nodes.pop()
            hashes = chain(start, np.frombuffer(node.tokens, np.int32).tolist())
            end = hashes[-1] if hashes else start
            open_nodes += [(child, end) for child in node.children.values()]
            if not hashes:
                continue
            if end not in seen.get(salt, ()):
                raise Violation("a block is cached that was never computed under its salt")
            _check_node(engine, truth, node, np.array(hashes, np.uint64))


def _check_node(engine: Engine, truth: Truth, node: Node, hashes: Hashes) -> None:
    for group, pool in enumerate(engine.memory.pools):
        if node.blocks[group] == FORGOTTEN:
            continue
        begin = node.blocks[group] * pool.block_size
        for view, (mark, width, _) in zip(pool_views(pool), truth.arrays[group], strict=True):
            if not (view[:, begin : begin + len(hashes)] == as_rows(hashes, mark, width)).all():
                raise Violation(f"{pool.group.rule}: a cached block does not hold what it says")
    snapshot = engine.prefix.snapshots.get(node.key)
    if snapshot is not None:
        parts = [part for state in snapshot.states for part in state]
        for number, part in enumerate(parts):
            if np.array(part).tobytes() != truth.state(int(hashes[-1]), number):
                raise Violation("a snapshot is not of the tokens it is kept under")

"""Reads what the blocks contain: the whole prefix tree, or everything known about one block.

Both run in the engine's thread, in slices: the generators yield every few nodes and are resumed between later steps
(`Backend.in_slices`), so a step is delayed by about 0.1 ms however large the tree is. Nodes that are evicted between
two slices are left out. The results are immutable and include the tokens; the caller decides who may read them.
"""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..prefix.index import Node, as_bytes
from .engine import Engine

Result = TypeVar("Result")
Slices = Generator[None, None, Result]
# Nodes per slice when copying them, and when only comparing them.
COPIED, COMPARED = 100, 2000


class NodeView(NamedTuple):
    """A node of the prefix tree: tokens [start, end), following the node `parent`."""

    key: bytes
    # The key of a root (`TreeView.salts`) at the start of a conversation.
    parent: bytes
    start: int
    end: int
    tokens: bytes
    # Its block in each group; negative where the group no longer keeps it.
    blocks: tuple[int, ...]
    # Size of its recurrent states.
    snapshot: int
    pins: int
    # Running sequences that continue from here.
    leases: int
    # Last use, by the engine's clock.
    used_at: float


@dataclass(frozen=True)
class TreeView:
    """All nodes, the salt of each root by its key, and the keys of nodes at which a pin ends."""

    # By the engine's clock, and how long its thread was busy with this.
    time: float
    seconds: float
    nodes: list[NodeView]
    salts: dict[bytes, str]
    pinned: frozenset[bytes]


@dataclass(frozen=True)
class BlockView:
    """One block: its owner's salt, the tokens it holds from `start` on, and who references it."""

    salt: str
    start: int
    tokens: bytes
    # Running requests that hold it, by `RequestView.number`.
    requests: tuple[int, ...]
    # Whether it is in the prefix tree. The fields below are only known if it is.
    cached: bool = False
    pins: int = 0
    idle: float | None = None
    # Names of the colder tiers that have a copy.
    tiers: tuple[str, ...] = ()


def read_tree(engine: Engine) -> Slices[TreeView]:
    prefix = engine.prefix
    seconds, began = 0.0, time.perf_counter()
    found, nodes, kept = prefix.index.nodes, list(prefix.index.nodes.values()), []
    for count, node in enumerate(nodes, 1):
        if node.parent is not None and found.get(node.key) is node:
            snapshot = prefix.snapshots.get(node.key)
            kept.append(
                NodeView(
                    node.key,
                    node.parent.key,
                    node.start,
                    node.end,
                    node.tokens,
                    tuple(node.blocks),
                    snapshot.nbytes if snapshot is not None else 0,
                    node.pins,
                    node.leases,
                    node.used_at,
                )
            )
        if not count % COPIED:
            seconds += time.perf_counter() - began
            yield
            began = time.perf_counter()
    salts = {root.key: salt for salt, root in prefix.index.roots.items()}
    seconds += time.perf_counter() - began
    return TreeView(engine.now(), seconds, kept, salts, prefix.pinned_ends())


def read_block(engine: Engine, group: int, block: int) -> Slices[BlockView | None]:
    """None if the block is free."""
    node = yield from _node_of(engine, group, block)
    # In the same slice as the lookup above, since every step changes what requests hold.
    holding = [
        (request, request.sequence.tables[group].blocks.index(block))
        for request in engine.scheduler
        if request.lease is not None and block in request.sequence.tables[group].blocks
    ]
    numbers = tuple(id(request) for request, _ in holding)
    if node is not None:
        now, index = engine.now(), engine.prefix.index
        tiers = tuple(tier.stats().name for tier in engine.prefix.tiers if tier.has(node.key, group))
        return BlockView(
            index.salt_of(node), node.start, node.tokens, numbers, True, node.pins, now - node.used_at, tiers
        )
    if holding:
        request, place = holding[0]
        start = place * engine.plan.block_size
        end = min(start + engine.plan.block_size, request.stored)
        return BlockView(request.salt, start, as_bytes(request.all_tokens[start:end]), numbers)
    return None


def _node_of(engine: Engine, group: int, block: int) -> Slices[Node | None]:
    found = engine.prefix.index.nodes
    for count, node in enumerate(list(found.values()), 1):
        if node.blocks[group] == block and found.get(node.key) is node:
            return node
        if not count % COMPARED:
            yield
    return None

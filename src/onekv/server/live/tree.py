"""Cached conversations as a tree of rows: a shared prefix is one row, and each continuation is a row below it.

node - node - node              one row: nothing branches off inside, and no pin ends inside
               |- node - node   one row each
               `- node
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...engine.contents import NodeView, TreeView

# Rows sent to a client, the largest ones.
MOST = 200


@dataclass(frozen=True)
class Row:
    """Nodes that follow one another without a branch. `total` includes all rows below it."""

    nodes: list[NodeView]
    # The key of the row it continues, if any.
    parent: bytes | None
    salt: str
    size: int
    total: int
    # Conversations that end in it or below it.
    ends: int
    pinned: bool

    @property
    def key(self) -> bytes:
        """The key of its last node."""
        return self.nodes[-1].key


def rows_of(tree: TreeView, block_bytes: Sequence[int], sees: Callable[[str], bool]) -> list[Row]:
    """Rows of the salts that the caller `sees`, largest first, each after the row it continues.

    `block_bytes` has the size of a block of each group.
    """
    children: dict[bytes, list[NodeView]] = defaultdict(list)
    for node in tree.nodes:
        children[node.parent].append(node)
    rows: list[Row] = []
    for root, salt in tree.salts.items():
        if sees(salt):
            rows += _below(root, salt, children, tree.pinned, block_bytes)
    return sorted(rows, key=lambda row: (-row.total, row.nodes[0].start))


def _below(
    root: bytes,
    salt: str,
    children: dict[bytes, list[NodeView]],
    pinned: frozenset[bytes],
    block_bytes: Sequence[int],
) -> list[Row]:
    # Parents come before their children.
    chains: list[tuple[bytes | None, list[NodeView]]] = []
    todo: list[tuple[bytes | None, NodeView]] = [(None, node) for node in children.get(root, [])]
    while todo:
        parent, node = todo.pop()
        chain = [node]
        while len(following := children.get(chain[-1].key, [])) == 1 and chain[-1].key not in pinned:
            chain.append(following[0])
        chains.append((parent, chain))
        todo += [(chain[-1].key, each) for each in following]
    rows: dict[bytes, Row] = {}
    totals: dict[bytes | None, int] = defaultdict(int)
    ends: dict[bytes | None, int] = defaultdict(int)
    for parent, chain in reversed(chains):
        key = chain[-1].key
        own = sum(_bytes(node, block_bytes) for node in chain)
        total, leaves = own + totals[key], max(1, ends[key])
        rows[key] = Row(chain, parent, salt, own, total, leaves, key in pinned)
        totals[parent] += total
        ends[parent] += leaves
    return list(rows.values())


def _bytes(node: NodeView, block_bytes: Sequence[int]) -> int:
    blocks = sum(size for block, size in zip(node.blocks, block_bytes, strict=True) if block >= 0)
    return blocks + node.snapshot

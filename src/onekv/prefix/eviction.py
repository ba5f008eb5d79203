"""Which cached blocks make room for others, and what becomes of them.

The least recently used leaves go first; of a window alone, its blocks, wherever they are in the tree. What goes is
offered to the colder tier, if there is one; what is removed because it is not wanted any more is not.
"""

import heapq
import weakref
from collections.abc import Callable
from functools import partial

from ..errors import MemoryBudgetError
from ..memory.kv import KVMemory
from ..memory.pool import IntegrityError, Pool
from ..memory.pool.table import FORGOTTEN
from .cold import Cold
from .figures import EVICTED, Figures
from .index import Index, Node, held
from .snapshots import Snapshot, Snapshots


class Eviction:
    def __init__(
        self,
        memory: KVMemory,
        index: Index,
        snapshots: Snapshots,
        figures: Figures,
        cold: Cold | None,
        continued: Callable[[Node], bool],
    ) -> None:
        """`continued` says whether a running sequence goes on from a node: such a node stays."""
        self._pools, self._index, self._snapshots = memory.pools, index, snapshots
        self._figures, self._cold, self._continued = figures, cold, continued
        self._heaps: list[list[tuple[int, int, Node]]] = [[] for _ in self._pools]
        for group, pool in enumerate(self._pools):
            pool.reclaim = partial(_reclaim, weakref.ref(self), group)

    def offer(self, node: Node) -> None:
        """Put a node where eviction looks: stale entries are recognised by their time."""
        for group, pool in enumerate(self._pools):
            if node.parent is not None and (not node.children or pool.group.rule.span is not None):
                heapq.heappush(self._heaps[group], (node.last_used, id(node), node))
                if len(self._heaps[group]) > 4 * len(self._index.nodes) + 1024:
                    # Mostly stale; it is built anew when something must be evicted.
                    self._heaps[group].clear()

    def reclaim(self, group: int, count: int) -> None:
        """Free `count` blocks of one pool, the least recently used ones."""
        pool = self._pools[group]
        wanted = pool.free + count
        rebuilt = False
        while pool.free < wanted:
            if not self._heaps[group]:
                if rebuilt:
                    raise IntegrityError(f"{count} blocks of {pool.group.rule} cannot be evicted")
                rebuilt = True
                for node in self._index.nodes.values():
                    self.offer(node)
                continue
            used, _, node = heapq.heappop(self._heaps[group])
            if used != node.last_used or self._index.nodes.get(node.key) is not node or not held(node, group):
                continue
            block = node.blocks[group]
            if not pool.references[block] and not pool.pinned[block] and self._evict(group, pool, node):
                rebuilt = False

    def _evict(self, group: int, pool: Pool, node: Node) -> bool:
        """Drop a leaf whole; of a node that must stay, a window's block alone. False if neither is possible."""
        parent = node.parent
        if self.removable(node):
            self._figures.remember(node.key, EVICTED)
            if self._cold is not None:
                self._cold.store_node(node)
            self.remove(node)
            if parent is not None and not parent.children:
                self.offer(parent)
        elif pool.group.rule.span is not None:
            if self._cold is not None:
                self._cold.store(node, group)
            pool.drop(node.blocks[group])
            node.blocks[group] = FORGOTTEN
        else:
            return False
        self._figures.evicted_blocks += 1
        return True

    def snapshot_dropped(self, key: bytes, snapshot: Snapshot) -> None:
        """A snapshot made room for others."""
        node = self._index.nodes.get(key)
        if node is None:
            # Pruning another one has taken it along.
            return
        if self._cold is not None and not self._outlived(node):
            self._cold.store_states(node, snapshot)
            if not node.children:
                # The end of a conversation is read as a whole, its part of a block included.
                self._cold.store_node(node)
        self.prune(node)

    def _outlived(self, node: Node) -> bool:
        """Whether all that continue `node` also pass a later snapshot: then its own is hardly missed."""
        while len(node.children) == 1:
            node = next(iter(node.children.values()))
            if self._snapshots.get(node.key) is not None:
                return True
        return False

    def prune(self, node: Node) -> None:
        """Without attention layers a node is worth no more than the snapshots at and after it."""
        while not self._pools and node.parent is not None and self.removable(node):
            if self._snapshots.get(node.key) is not None:
                return
            parent = node.parent
            self._index.remove(node)
            node = parent

    def removable(self, node: Node) -> bool:
        """A leaf that is not pinned and that no running sequence refers to or continues from."""
        if node.children or node.pins or self._continued(node):
            return False
        return all(not held(node, g) or pool.references[node.blocks[g]] == 0 for g, pool in enumerate(self._pools))

    def remove(self, node: Node) -> None:
        self._snapshots.drop(node.key)
        for pool, block in zip(self._pools, node.blocks, strict=True):
            if block != FORGOTTEN:
                pool.drop(block)
        node.blocks = [FORGOTTEN] * len(node.blocks)
        self._index.remove(node)

    def discard(self, node: Node) -> None:
        """Forget `node` and those before it that nobody else uses or continues, in the colder tier, too."""
        keys = []
        while node.parent is not None and self.removable(node):
            parent = node.parent
            keys.append(node.key)
            self.remove(node)
            node = parent
        self.offer(node)
        if self._cold is not None:
            self._cold.tier.drop(keys)

    def pin(self, path: list[Node]) -> None:
        """These stay until they are unpinned as often."""
        for group, pool in enumerate(self._pools):
            blocks = [node.blocks[group] for node in path if held(node, group)]
            if blocks and not pool.can_pin(blocks):
                raise MemoryBudgetError(
                    f"a prompt of {path[-1].end} tokens cannot be pinned: {len(blocks)} of {pool.blocks} blocks, and "
                    f"{pool.available} are not promised to running requests; pin less or raise --kv-memory"
                )
        self._change_pins(path, 1)

    def unpin(self, path: list[Node]) -> None:
        self._change_pins(path, -1)

    def _change_pins(self, nodes: list[Node], change: int) -> None:
        for node in nodes:
            node.pins += change
            for pool, block in zip(self._pools, node.blocks, strict=True):
                if block != FORGOTTEN:
                    pool.pin(block, node.pins > 0)
            self.offer(node)

    def clear(self) -> None:
        """Forget everything that no running sequence uses and that is not pinned."""
        leaves = [node for node in self._index.nodes.values() if self.removable(node)]
        while leaves:
            node = leaves.pop()
            parent = node.parent
            self.remove(node)
            if parent is not None and parent.parent is not None and self.removable(parent):
                leaves.append(parent)


def _reclaim(eviction: "weakref.ref[Eviction]", group: int, count: int) -> None:
    """What a pool calls to have blocks evicted; it must not keep the cache, and with it the pools, alive."""
    owner = eviction()
    if owner is not None:
        owner.reclaim(group, count)

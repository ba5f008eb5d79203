"""The cache's hold on blocks and snapshots: what enters it, what is evicted, and where that goes.

A node in the index has one block of each group (or none: a window has moved on), which the cache keeps (`Pool.keep`).
Whoever needs blocks calls `make_room` first, which evicts the least recently used leaves; of a window, just its blocks,
wherever they are in the tree. Evicted blocks are offered to the colder tiers; those removed because they are no longer
wanted are not. A node that holds nothing and has no continuation is removed, too.
"""

import heapq

from ..errors import MemoryBudgetError
from ..memory.kv import KVMemory
from ..memory.pool import IntegrityError, Pool
from ..memory.pool.table import FORGOTTEN
from .figures import EVICTED, Figures
from .index import Index, Node, held
from .offload import Offload
from .snapshots import Snapshot, Snapshots


class Store:
    def __init__(
        self,
        memory: KVMemory,
        index: Index,
        snapshots: Snapshots,
        figures: Figures,
        offload: Offload,
        write_through: bool,
    ) -> None:
        """With `write_through` blocks go to the colder tiers as soon as they are full, not when they are evicted."""
        self.memory, self.pools = memory, memory.pools
        self.index, self.snapshots, self.figures, self.offload = index, snapshots, figures, offload
        self._through = write_through
        self._heaps: list[list[tuple[int, int, Node]]] = [[] for _ in self.pools]

    # What is kept

    def enter(self, parent: Node, tokens: bytes, blocks: list[int]) -> Node:
        """Keep the blocks that hold `tokens` after `parent`, one per group, all held by a table."""
        for pool, block in zip(self.pools, blocks, strict=True):
            if block != FORGOTTEN:
                pool.keep(block)
        node = self.index.add(parent, tokens, blocks)
        self.used(node)
        if self.index.full(node):
            self._write_through(node)
        return node

    def fill(self, node: Node, group: int, block: int) -> None:
        """Keep a block that `node` lacks; if the node is pinned, only if that breaks no reservation."""
        pool = self.pools[group]
        if not node.pins or pool.can_pin([block]):
            pool.keep(block)
            node.blocks[group] = block
            pool.pin(block, node.pins > 0)

    def again(self, node: Node) -> None:
        """The content of `node` was computed or read again."""
        self._write_through(node)
        self.index.touch(node)
        self.used(node)

    def _write_through(self, node: Node) -> None:
        for group in range(len(self.pools)) if self._through else ():
            if held(node, group):
                self.offload.block(node, group)

    def keep_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        if self._through:
            self.offload.states(node, snapshot)
        gone = [(self.index.nodes[key], dropped) for key, dropped in self.snapshots.put(node.key, snapshot)]
        try:
            for old, dropped in gone:
                self._offer_snapshot(old, dropped)
        finally:
            # Without it a node may hold nothing.
            for old, _ in gone:
                self.prune(old)

    def _offer_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        """A snapshot made room for others."""
        if not self._outlived(node):
            self.offload.states(node, snapshot)
            if not node.children:
                # The end of a conversation is read as a whole, its part of a block included.
                self.offload.node(node)

    def _outlived(self, node: Node) -> bool:
        """Whether all that continue `node` also pass a later snapshot: then its own is hardly missed."""
        while len(node.children) == 1:
            node = next(iter(node.children.values()))
            if self.snapshots.get(node.key) is not None:
                return True
        return False

    # Making room

    def used(self, node: Node) -> None:
        """Put a node where eviction looks: stale entries are recognised by their time."""
        for group, pool in enumerate(self.pools):
            if node.parent is not None and (not node.children or pool.group.rule.span is not None):
                heapq.heappush(self._heaps[group], (node.last_used, id(node), node))
                if len(self._heaps[group]) > 4 * len(self.index.nodes) + 1024:
                    # Mostly stale; it is rebuilt when something must be evicted.
                    self._heaps[group].clear()

    def make_room(self, group: int, count: int) -> None:
        """Ensure that `count` blocks of one pool are free, by evicting the least recently used ones."""
        pool = self.pools[group]
        rebuilt = False
        while pool.free < count:
            if not self._heaps[group]:
                if rebuilt:
                    raise IntegrityError(f"{count - pool.free} blocks of {pool.group.rule} cannot be evicted")
                rebuilt = True
                for node in self.index.nodes.values():
                    self.used(node)
                continue
            used, _, node = heapq.heappop(self._heaps[group])
            if used != node.last_used or self.index.nodes.get(node.key) is not node or not held(node, group):
                continue
            block = node.blocks[group]
            if not pool.references[block] and not pool.pinned[block] and self._evict(group, pool, node):
                rebuilt = False

    def _evict(self, group: int, pool: Pool, node: Node) -> bool:
        """Drop a whole leaf; of a node that must stay, only a window's block. False if neither is possible."""
        parent = node.parent
        if self.removable(node):
            self.figures.remember(node.key, EVICTED)
            self.offload.node(node)
            self.remove(node)
            if parent is not None and not parent.children:
                self.used(parent)
                self.prune(parent)
        elif pool.group.rule.span is not None:
            self.offload.block(node, group)
            pool.drop(node.blocks[group])
            node.blocks[group] = FORGOTTEN
        else:
            return False
        self.figures.evicted_blocks += 1
        return True

    # What goes

    def removable(self, node: Node) -> bool:
        """A leaf that is not pinned and that no running sequence refers to or continues from."""
        if node.children or node.pins or node.leases:
            return False
        return all(not held(node, g) or pool.references[node.blocks[g]] == 0 for g, pool in enumerate(self.pools))

    def remove(self, node: Node) -> None:
        self.snapshots.drop(node.key)
        for pool, block in zip(self.pools, node.blocks, strict=True):
            if block != FORGOTTEN:
                pool.drop(block)
        node.blocks = [FORGOTTEN] * len(node.blocks)
        self.index.remove(node)

    def worthless(self, node: Node) -> bool:
        """Whether it holds nothing."""
        return all(block == FORGOTTEN for block in node.blocks) and self.snapshots.get(node.key) is None

    def prune(self, node: Node) -> None:
        """Remove `node` and those before it, as far as they hold nothing and lead nowhere."""
        while self.index.nodes.get(node.key) is node and self.removable(node) and self.worthless(node):
            parent = node.parent
            assert parent is not None, "a root is in no list of nodes"
            self.remove(node)
            node = parent

    def discard(self, node: Node) -> None:
        """Drop `node` and those before it that are not used or continued otherwise, in all tiers: it may be wrong."""
        keys = []
        while node.parent is not None and self.removable(node):
            parent = node.parent
            keys.append(node.key)
            self.remove(node)
            node = parent
        self.used(node)
        self.offload.drop(keys, wrong=True)

    def drop(self, node: Node) -> int:
        """Drop `node` and its continuations, except for what is in use or pinned, in this server's tiers, too."""
        below = [node]
        for each in below:
            below.extend(each.children.values())
        keys = []
        # What continues a node comes after it.
        for each in reversed(below):
            if self.removable(each):
                keys.append(each.key)
                self.remove(each)
        self.offload.drop(keys)
        assert node.parent is not None, "a root holds nothing"
        self.used(node.parent)
        self.prune(node.parent)
        return len(keys)

    def clear(self) -> None:
        """Drop everything that no running sequence uses and that is not pinned."""
        leaves = [node for node in self.index.nodes.values() if self.removable(node)]
        while leaves:
            node = leaves.pop()
            parent = node.parent
            self.remove(node)
            if parent is not None and parent.parent is not None and self.removable(parent):
                leaves.append(parent)

    # Pins

    def pin(self, path: list[Node]) -> None:
        """These stay until they are unpinned as often."""
        for group, pool in enumerate(self.pools):
            blocks = [node.blocks[group] for node in path if held(node, group)]
            if blocks and not pool.can_pin(blocks):
                raise MemoryBudgetError(
                    f"a prompt of {path[-1].end} tokens cannot be pinned: {len(blocks)} of {pool.blocks} blocks, and "
                    f"{pool.available} are not promised to running requests; pin less or raise --kv-memory"
                )
        self._change_pins(path, 1)

    def unpin(self, path: list[Node]) -> None:
        self._change_pins(path, -1)
        if path:
            self.prune(path[-1])

    def _change_pins(self, nodes: list[Node], change: int) -> None:
        for node in nodes:
            node.pins += change
            for pool, block in zip(self.pools, node.blocks, strict=True):
                if block != FORGOTTEN:
                    pool.pin(block, node.pins > 0)
            self.used(node)

    def check_integrity(self) -> None:
        """Every node is reachable and has its full-attention blocks; snapshots are tagged with their node's end."""
        for node in self.index.nodes.values():
            name = f"the node of tokens {node.start} to {node.end}"
            if node.parent is None or node.parent.children.get(node.tokens) is not node:
                raise IntegrityError(f"{name} is not in the tree")
            for group, pool in enumerate(self.pools):
                if pool.group.rule.span is None and not held(node, group):
                    raise IntegrityError(f"{name} lost its block")
                if held(node, group) and pool.pinned[node.blocks[group]] != (node.pins > 0):
                    raise IntegrityError(f"{name} is pinned and its block is not, or the reverse")
            if self.worthless(node) and self.removable(node):
                raise IntegrityError(f"{name} is kept and holds nothing")
        for key, snapshot in self.snapshots.items():
            node = self.index.nodes[key]
            if snapshot.length != node.end:
                raise IntegrityError(f"a state of {snapshot.length} tokens is kept under {node.end}")
        total = sum(snapshot.nbytes for _, snapshot in self.snapshots.items())
        if total != self.snapshots.nbytes or total > self.snapshots.budget:
            raise IntegrityError(f"{self.snapshots.nbytes} bytes of snapshots are counted, {total} are held")

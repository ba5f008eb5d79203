"""Writing from RAM to the colder tiers: a part is offered to each of them in order; the first that accepts it keeps it.

The tiers know which of them has a part; uses and removals are reported to all of them. Without tiers, everything that
is evicted is lost.

Tiers that want copies of what stays in RAM get them between steps (`share`), from a list of waiting nodes. A node that
is evicted meanwhile leaves the list and is handled like any evicted node.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from ..memory.kv import KVMemory
from ..memory.pool.blocks import BlockContent, Blocks, StatesContent, state_tensors, states_fit
from ..tiers.base import STATES, Tier
from .index import Index, Node, address_of, held
from .snapshots import Snapshot, Snapshots

# Maximum number of nodes waiting to be copied to a tier; beyond it, the oldest is dropped until it is used again.
UNSHARED = 65536
# Seconds for such copies at shutdown.
LAST_SECONDS = 10.0


class Offload:
    def __init__(self, tiers: Sequence[Tier], memory: KVMemory, index: Index, snapshots: Snapshots) -> None:
        self.tiers = tiers
        self._pools, self._index, self._snapshots = memory.pools, index, snapshots
        self._blocks = [Blocks(pool) for pool in memory.pools]
        self._states = state_tensors(memory.layout)
        # Keys of nodes that a tier wants a copy of, the oldest first.
        self._unshared: dict[tuple[Tier, bytes], None] = {}

    def block(self, node: Node, group: int, wait: bool = False) -> bool:
        """Offer a node's block of one group."""
        return self._offer(node, group, BlockContent(self._blocks[group], node.blocks[group]), wait)

    def states(self, node: Node, snapshot: Snapshot, wait: bool = False) -> bool:
        """Offer recurrent states, unless they are of another shape than the layout's."""
        states = snapshot.states
        if not states_fit(states, self._states):
            return False
        return self._offer(node, STATES, StatesContent(states), wait)

    def node(self, node: Node, wait: bool = False) -> None:
        """Offer all that is left of a node."""
        for group in range(len(self._pools)):
            if held(node, group):
                self.block(node, group, wait)
        snapshot = self._snapshots.get(node.key)
        if snapshot is not None:
            self.states(node, snapshot, wait)

    def _offer(self, node: Node, part: int, fill: Callable[[memoryview], None], wait: bool) -> bool:
        return any(tier.offer(address_of(node), part, fill, wait) for tier in self.tiers)

    def everything(self) -> Iterator[tuple[int, int]]:
        """Offer everything cached that fits, waiting for it; yields (bytes done, in total)."""
        nodes: list[Node] = []
        self._share_the_rest()
        room = sum(tier.stats().limit for tier in self.tiers)
        # The hottest first: a beginning is hotter than what continues it, and is worth something without it.
        for node in sorted(self._index.nodes.values(), key=lambda node: -node.last_used) if self.tiers else ():
            room -= self._node_bytes(node)
            if room < 0:
                break
            nodes.append(node)
        keys = [node.key for node in reversed(nodes)]
        self.touch(keys)
        total, done = sum(map(self._node_bytes, nodes)), 0
        if nodes:
            yield done, total
        for node in nodes:
            self.node(node, wait=True)
            done += self._node_bytes(node)
            yield done, total
        self.touch(keys)

    def _node_bytes(self, node: Node) -> int:
        snapshot = self._snapshots.get(node.key)
        blocks = sum(pool.block_bytes for group, pool in enumerate(self._pools) if held(node, group))
        return blocks + (snapshot.nbytes if snapshot is not None else 0)

    def want(self, keys: Sequence[bytes]) -> None:
        """These nodes were used, in path order: note which of them tiers want copies of."""
        for tier in self.tiers:
            for key in tier.wants(keys):
                self._unshared[tier, key] = None
        while len(self._unshared) > UNSHARED:
            del self._unshared[next(iter(self._unshared))]

    @property
    def unshared(self) -> bool:
        return bool(self._unshared)

    def share(self, seconds: float) -> None:
        """Copy nodes to the tiers that want them, while they have room: for about `seconds`, at least one."""
        end = time.perf_counter() + seconds
        while self._unshared:
            tier, key = next(iter(self._unshared))
            node, room = self._index.nodes.get(key), True
            try:
                room = node is None or not tier.wants([key]) or self._copy(tier, node, wait=False)
            finally:
                # Where that raised, it is not tried in every step.
                if room:
                    del self._unshared[tier, key]
            if not room or time.perf_counter() >= end:
                break

    def _share_the_rest(self) -> None:
        """Copy what tiers still want, waiting for room, for at most `LAST_SECONDS`."""
        end = time.perf_counter() + LAST_SECONDS
        for tier, key in list(self._unshared):
            node = self._index.nodes.get(key)
            if time.perf_counter() < end and node is not None and tier.wants([key]):
                self._copy(tier, node, wait=True)
        self._unshared.clear()

    def _copy(self, tier: Tier, node: Node, wait: bool) -> bool:
        """Offer all parts of `node` to `tier`; False if it had no room for one."""
        address, snapshot = address_of(node), self._snapshots.get(node.key)
        fills = {
            group: BlockContent(self._blocks[group], node.blocks[group])
            for group in range(len(self._pools))
            if held(node, group)
        }
        taken = all(tier.offer(address, group, fill, wait) for group, fill in fills.items())
        if snapshot is not None and states_fit(states := snapshot.states, self._states):
            taken = tier.offer(address, STATES, StatesContent(states), wait) and taken
        return taken

    def touch(self, keys: Sequence[bytes]) -> None:
        """These nodes were used now, the last of them last."""
        for tier in self.tiers:
            tier.touch(keys)

    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        """Drop these nodes; from a store that other servers read, only if they may be `wrong`."""
        for tier in self.tiers:
            tier.drop(keys, wrong)

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()

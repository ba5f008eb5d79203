"""What goes from RAM to the colder tiers: a part is offered to each of them in order; the first that takes it has it.

Which tier has a part is for the tiers to know. What counts for all of it, a use or its end, is told to all of them.
Without tiers nothing is taken and everything that is evicted is lost.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..memory.kv import KVMemory
from ..memory.pool.blocks import Blocks, read_states, state_tensors, states_fit
from ..tiers.base import STATES, Tier
from .index import Index, Node, address_of, held
from .snapshots import Snapshot, Snapshots


class Offload:
    def __init__(self, tiers: Sequence[Tier], memory: KVMemory, index: Index, snapshots: Snapshots) -> None:
        self.tiers = tiers
        self._pools, self._index, self._snapshots = memory.pools, index, snapshots
        self._blocks = [Blocks(pool) for pool in memory.pools]
        self._states = state_tensors(memory.layout)

    def block(self, node: Node, group: int, wait: bool = False) -> bool:
        """Offer a node's block of one group."""
        return self._offer(node, group, partial(self._blocks[group].read, node.blocks[group]), wait)

    def states(self, node: Node, snapshot: Snapshot, wait: bool = False) -> bool:
        """Offer recurrent states, unless they are of another shape than the layout's."""
        states = snapshot.states
        if not states_fit(states, self._states):
            return False
        return self._offer(node, STATES, lambda out: read_states(states, out), wait)

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
        """Offer all that is cached and fits, waiting for it; gives (bytes done, in all)."""
        nodes: list[Node] = []
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
        for node in nodes:
            self.node(node, wait=True)
            done += self._node_bytes(node)
            yield done, total
        self.touch(keys)

    def _node_bytes(self, node: Node) -> int:
        snapshot = self._snapshots.get(node.key)
        blocks = sum(pool.block_bytes for group, pool in enumerate(self._pools) if held(node, group))
        return blocks + (snapshot.nbytes if snapshot is not None else 0)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These nodes were used now, the last of them last."""
        for tier in self.tiers:
            tier.touch(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget these nodes."""
        for tier in self.tiers:
            tier.drop(keys)

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()

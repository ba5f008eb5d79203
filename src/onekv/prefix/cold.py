"""The colder tier, as the prefix cache uses it: what goes there, what is there, and bringing it back.

A sequence whose prompt goes on in the tier is opened with blocks of its own for what lies there (`WANTED`), and is
*loading* until all of it has been read into them, some between each two steps; then it is as if it had computed it.
Meanwhile it holds its blocks like any other, and no other sequence starts to read the same: it waits for this one.

    loading ->  loaded: its blocks are published, it goes on from there
            ->  failed: something could not be read; it is closed and opened again, without that
            ->  cancelled
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ..memory.kv import KVMemory
from ..memory.pool.blocks import Blocks, make_states, read_states, shared_memory, state_tensors, states_fit, write_block
from ..memory.pool.sequence import Sequence, State
from ..memory.pool.table import FORGOTTEN, WANTED
from ..tiers.base import STATES, Address, Entry, Target, Tier
from .index import TOKEN_BYTES, Index, Match, Node, held
from .restore import Piece, blocks_read, restore_point
from .snapshots import Snapshot, Snapshots

# Keys asked for at once.
LOOK_AHEAD = 256
# Parts asked for at once. Where other threads cannot copy them into the pool, this many, less than four, lie beside it.
AT_ONCE = 64 if shared_memory() else 2


@dataclass(frozen=True)
class Place:
    """One block of a path: its node if it is in RAM, and the parts of it that the tier has."""

    address: Address
    node: Node | None
    parts: frozenset[int]

    @property
    def end(self) -> int:
        return self.address.start + len(self.address.tokens) // TOKEN_BYTES

    def has(self, group: int) -> bool:
        return (self.node is not None and held(self.node, group)) or group in self.parts


@dataclass(eq=False)
class Loading:
    """A sequence that will have `length` tokens stored when the parts in `left` have been read."""

    sequence: Sequence
    tokens: list[int]
    length: int
    # Where each goes: the block of that group; recurrent states have no place in the pool.
    left: dict[tuple[bytes, int], int]
    states: list[State] | None = None
    # The keys of what could not be read.
    failed: list[bytes] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return not self.left or bool(self.failed)


class Cold:
    def __init__(
        self,
        tier: Tier,
        memory: KVMemory,
        index: Index,
        snapshots: Snapshots,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tier, self._now = tier, now
        self._memory, self._index, self._snapshots = memory, index, snapshots
        self._size = memory.block_size
        self._blocks = [Blocks(pool) for pool in memory.pools]
        self._full = [g for g, pool in enumerate(memory.pools) if pool.group.rule.span is None]
        self._states = state_tensors(memory.layout)
        # Nodes in RAM may lack something that the tier has.
        self._mixed = len(self._full) < len(memory.pools) or bool(self._states)
        self.loading: dict[Sequence, Loading] = {}

    # Out

    def store(self, node: Node, group: int, wait: bool = False) -> bool:
        """Offer a block to the tier."""
        return self.tier.offer(address_of(node), group, partial(self._blocks[group].read, node.blocks[group]), wait)

    def store_states(self, node: Node, snapshot: Snapshot, wait: bool = False) -> bool:
        """Offer recurrent states to the tier, unless they are of another shape than the layout's."""
        states = snapshot.states
        if not states_fit(states, self._states):
            return False
        return self.tier.offer(address_of(node), STATES, lambda out: read_states(states, out), wait)

    def store_node(self, node: Node, wait: bool = False) -> None:
        """Offer all that is left of a node to the tier."""
        for group in range(len(self._memory.pools)):
            if held(node, group):
                self.store(node, group, wait)
        snapshot = self._snapshots.get(node.key)
        if snapshot is not None:
            self.store_states(node, snapshot, wait)

    def store_all(self) -> Iterator[tuple[int, int]]:
        """Offer all that is cached and fits the tier, waiting for it; gives (bytes done, in all)."""
        nodes: list[Node] = []
        room = self.tier.stats().limit
        # The hottest first: a beginning is hotter than what continues it, and is worth something without it.
        for node in sorted(self._index.nodes.values(), key=lambda node: -node.last_used):
            room -= self._node_bytes(node)
            if room < 0:
                break
            nodes.append(node)
        keys = [node.key for node in reversed(nodes)]
        self.tier.touch(keys)
        total, done = sum(map(self._node_bytes, nodes)), 0
        for node in nodes:
            self.store_node(node, wait=True)
            done += self._node_bytes(node)
            yield done, total
        self.tier.touch(keys)

    def _node_bytes(self, node: Node) -> int:
        snapshot = self._snapshots.get(node.key)
        blocks = sum(pool.block_bytes for group, pool in enumerate(self._memory.pools) if held(node, group))
        return blocks + (snapshot.nbytes if snapshot is not None else 0)

    # What is there

    def reach(self, match: Match, tokens: bytes, limit: int) -> tuple[list[Place], int]:
        """The path of all that is known of the first `limit` tokens, in RAM or in the tier, and how far it leads."""
        tokens = tokens[: limit * TOKEN_BYTES]
        keys = [node.key for node in match.nodes] if self._mixed else []
        known = self._find(keys)
        places = [Place(address_of(node), node, known.get(node.key, frozenset())) for node in match.nodes]
        parent = match.nodes[-1].key if match.nodes else match.root.key
        following = self._following(parent, tokens, len(match.nodes))
        places += [Place(entry.address, None, entry.parts) for entry in following]
        best = places, self._restore_point(places)
        # With recurrent states, an end of a conversation may lead further than whole blocks do.
        for count in range(len(places), -1 if self._states else len(places) - 1, -1):
            if count * self._size + self._size <= best[1]:
                break
            parent = places[count - 1].address.key if count else match.root.key
            start = count * self._size
            tail = self._tail(parent, start, tokens[start * TOKEN_BYTES :])
            if tail is not None:
                path = [*places[:count], Place(tail.address, None, tail.parts)]
                best = max(best, (path, self._restore_point(path)), key=lambda found: found[1])
        return best

    def _find(self, keys: list[bytes]) -> dict[bytes, frozenset[int]]:
        return {key: entry.parts for key, entry in self.tier.find(keys).items()} if keys else {}

    def _following(self, parent: bytes, tokens: bytes, first: int) -> Iterator[Entry]:
        """The whole blocks after `first` of them that the tier has enough of.

        Layers of full attention allow no gap. Without such layers a block may lack everything: what counts is a window
        or a state further on.
        """
        size = self._size * TOKEN_BYTES
        starts = range(first * size, len(tokens) - size + 1, size)
        for begin in range(0, len(starts), LOOK_AHEAD):
            addresses = []
            for start in starts[begin : begin + LOOK_AHEAD]:
                block = tokens[start : start + size]
                key = self._index.key_after(parent, block)
                addresses.append(Address(key, parent, start // TOKEN_BYTES, block))
                parent = key
            found = self.tier.find([address.key for address in addresses])
            for address in addresses:
                entry = found.get(address.key)
                if entry is not None and entry.address != address:
                    entry = None
                entry = entry or Entry(address, frozenset())
                if not self._usable(entry):
                    return
                yield entry

    def _tail(self, parent: bytes, start: int, tokens: bytes) -> Entry | None:
        """The longest partial block after `parent`, which ends at `start`, that `tokens` begin with."""
        entries = []
        for entry in self.tier.tails(parent):
            part = entry.address.tokens
            right = Address(self._index.key_after(parent, part), parent, start, part)
            if entry.address == right and self._usable(entry) and tokens.startswith(part):
                entries.append(entry)
        return max(entries, key=lambda entry: len(entry.address.tokens), default=None)

    def _usable(self, entry: Entry) -> bool:
        """Whether the tier has it for all layers of full attention: without them nothing else counts."""
        return all(group in entry.parts for group in self._full)

    def _restore_point(self, places: list[Place]) -> int:
        groups = range(len(self._memory.pools))
        pieces = [
            Piece(
                place.address.start,
                place.end,
                tuple(place.has(g) for g in groups),
                STATES in place.parts or self._snapshots.get(place.address.key) is not None,
            )
            for place in places
        ]
        return restore_point(pieces, [pool.group.rule for pool in self._memory.pools], bool(self._states))

    # In

    def wanted(self, places: list[Place], length: int) -> list[tuple[int, int]]:
        """(place, part) of all that must be read to continue at `length`; the states come last."""
        wanted = []
        for group, pool in enumerate(self._memory.pools):
            for i in blocks_read(pool.group.rule, length, self._size):
                node = places[i].node
                if node is None or not held(node, group):
                    wanted.append((i, group))
        wanted.sort()
        last = -(-length // self._size) - 1
        if self._states and self._snapshots.get(places[last].address.key) is None:
            wanted.append((last, STATES))
        return wanted

    def busy(self, places: list[Place], wanted: list[tuple[int, int]]) -> bool:
        """Whether another sequence is reading some of `wanted` now."""
        keys = {(places[i].address.key, part) for i, part in wanted}
        return any(not keys.isdisjoint(loading.left) for loading in self.loading.values())

    def open(
        self, tokens: list[int], max_length: int, places: list[Place], length: int, wanted: list[tuple[int, int]]
    ) -> Sequence:
        """A sequence that is loading. Raises OutOfBlocks, having changed nothing."""
        prefixes = []
        for group, pool in enumerate(self._memory.pools):
            blocks = [FORGOTTEN] * -(-length // self._size)
            for i in blocks_read(pool.group.rule, length, self._size):
                node = places[i].node
                blocks[i] = node.blocks[group] if node is not None and held(node, group) else WANTED
            prefixes.append(blocks)
        # Looked up before blocks are taken: making room for them may drop what nobody holds.
        snapshot = self._snapshots.get(places[-(-length // self._size) - 1].address.key)
        sequence = self._memory.open(max_length, prefixes)
        left = {
            (places[i].address.key, part): sequence.tables[part].blocks[i] if part != STATES else WANTED
            for i, part in wanted
        }
        loading = Loading(sequence, tokens, length, left)
        if snapshot is not None:
            loading.states = [list(state) for state in snapshot.states]
        try:
            self.tier.expect(list(left))
        except BaseException:
            self._memory.close(sequence)
            raise
        self.loading[sequence] = loading
        return sequence

    def load(self, seconds: float) -> list[Loading]:
        """Read what loading sequences lack, the oldest first, for about `seconds`; returns those that ended."""
        ended: list[Loading] = []
        deadline = self._now() + seconds
        while self.loading and (left := deadline - self._now()) > 0:
            loading = next(iter(self.loading.values()))
            self._read(loading, list(loading.left)[:AT_ONCE], left)
            if loading.ended:
                self.cancel(loading.sequence)
                ended.append(loading)
        return ended

    def _read(self, loading: Loading, parts: list[tuple[bytes, int]], seconds: float) -> None:
        """Read some of what is left into its place, or beside the pool and then from there."""
        targets: list[Target] = []
        direct = {part for _, part in parts if part != STATES} if shared_memory() else set()
        for group in direct:
            self._blocks[group].look()
        for key, part in parts:
            into: bytearray | Callable[[memoryview], None]
            if part in direct:
                into = partial(self._blocks[part].write, loading.left[key, part])
            else:
                into = bytearray(self._bytes_of(part))
            targets.append(Target(key, part, into))
        for target, read in zip(targets, self.tier.read(targets, seconds), strict=True):
            if read is None:
                continue
            block = loading.left.pop((target.key, target.part))
            if not read:
                loading.failed.append(target.key)
            elif isinstance(target.into, bytearray):
                data = memoryview(target.into)
                if target.part == STATES:
                    loading.states = make_states(self._memory.layout, data)
                else:
                    write_block(self._memory.pools[target.part], block, data)

    def _bytes_of(self, part: int) -> int:
        if part == STATES:
            return sum(tensor.nbytes for tensor in self._states)
        return self._memory.pools[part].block_bytes

    def cancel(self, sequence: Sequence) -> None:
        """The sequence is not loading any more."""
        loading = self.loading.pop(sequence)
        self.tier.unexpect(list(loading.left))


def address_of(node: Node) -> Address:
    assert node.parent is not None, "a root has no content"
    return Address(node.key, node.parent.key, node.start, node.tokens)

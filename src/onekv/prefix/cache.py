"""Sequences start from what is cached, leave behind what they compute, and old blocks make room for new ones.

A block in the index is held by the cache (`Pool.keep`) and by every table that uses it. While a sequence runs, each
block it fills is published; when it ends, its last, partial block too. Nothing is copied or moved for that.

    open       tokens: [ shared blocks ...... | tail | to compute ............ ]
                         referenced             taken over, or one block copied
    publish    a full block whose tokens are known already: the sequence takes the known one and frees its own
    evict      see eviction.py; what is evicted may go to a colder tier and come back from there, see cold.py

Recurrent states are stored as snapshots, references to immutable arrays, each with the length it is the state of.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import MemoryBudgetError
from ..memory.kv import KVMemory
from ..memory.pool import IntegrityError, OutOfBlocks
from ..memory.pool.sequence import Sequence, State
from ..memory.pool.table import FORGOTTEN
from ..tiers.base import Tier
from ..units import format_size
from .cold import Cold, Loading, Place
from .eviction import Eviction
from .figures import DAMAGED, EVICTED, NEVER_SEEN, NO_SNAPSHOT, OTHER_SALT, Figures, PrefixStats
from .index import TOKEN_BYTES, Index, Match, Node, as_bytes, held
from .restore import Piece, blocks_read, restore_point
from .snapshots import Snapshot, Snapshots, message_ends


@dataclass
class Chain:
    """A running sequence's place in the index: `node` ends where its published blocks end."""

    node: Node
    # Where a snapshot would have let the sequence start, had there been one.
    junction: int = 0
    # Why no more of its tokens was cached; None if all were.
    missed: str | None = None


class PrefixCache:
    def __init__(
        self,
        memory: KVMemory,
        fingerprint: str,
        snapshot_budget: int,
        tier: Tier | None = None,
        write_through: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Evicted blocks go to `tier`; with `write_through` all blocks do, as soon as they are full."""
        self._memory = memory
        self._recurrent = bool(memory.layout.states)
        # Nodes may lack something that a sequence needs to start there.
        self._mixed = self._recurrent or any(pool.group.rule.span is not None for pool in memory.pools)
        self._size = memory.block_size
        self.index = Index(fingerprint, self._size)
        self._chains: dict[Sequence, Chain] = {}
        # The nodes that each pin keeps, by salt and tokens.
        self._pins: dict[tuple[str, bytes], list[list[Node]]] = {}
        self.snapshots = Snapshots(snapshot_budget)
        self._figures = Figures()
        self._cold = Cold(tier, memory, self.index, self.snapshots, now) if tier is not None else None
        self._through = self._cold if write_through else None
        chains = self._chains
        self._eviction = Eviction(
            memory,
            self.index,
            self.snapshots,
            self._figures,
            self._cold,
            lambda node: any(chain.node is node for chain in chains.values()),
        )

    # Starting a sequence

    def open(self, tokens: list[int], max_length: int, salt: str = "") -> Sequence | None:
        """A sequence for `tokens` that has stored as many of them as are cached, but never the last one.

        It may be loading first (`loading`). None: another one loads what this one needs; try again later. Raises
        OutOfBlocks if what is left to compute cannot be promised; then nothing has changed.
        """
        data, limit = as_bytes(tokens), len(tokens) - 1
        match = self.index.match(data, salt, limit)
        path, length = self._furthest(match, data, limit)
        if self._cold is not None and length < limit:
            places, reach = self._cold.reach(match, data, limit)
            if reach > length:
                return self._open_cold(self._cold, match, places, reach, tokens, max_length, salt)
        try:
            sequence = self._open_at(path, length, max_length)
        except OutOfBlocks:
            # A block to copy the tail into, or the tail itself, may be what is missing.
            path = match.nodes
            length = self._restore_point(self._pieces(path, len(path) * self._size))
            sequence = self._open_at(path, length, max_length)
        node = path[length // self._size - 1] if length >= self._size else match.root
        missed = self._missed(match.nodes[-1] if match.nodes else match.root, match.length, length, tokens, salt)
        self._chains[sequence] = Chain(node, match.length - match.length % self._size, missed)
        self._figures.started(length, missed)
        return sequence

    def _furthest(self, match: Match, data: bytes, limit: int) -> tuple[list[Node], int]:
        """The path in RAM on which a sequence can start furthest, and where that is."""
        path = [*match.nodes, *([match.tail] if match.tail is not None else [])]
        length = self._restore_point(self._pieces(path, match.length))
        # Where not all is kept, an end of a conversation may lead further than what has most in common with the prompt.
        for count in range(len(match.nodes), -1 if self._mixed else len(match.nodes), -1):
            if (count + 1) * self._size <= length:
                break
            parent = match.nodes[count - 1] if count else match.root
            for end in self.index.ends(parent, data[count * self._size * TOKEN_BYTES : limit * TOKEN_BYTES]):
                other = [*match.nodes[:count], end]
                reached = self._restore_point(self._pieces(other, end.end))
                if reached > length:
                    path, length = other, reached
                    self.index.touch(end)
                    break
        return path, length

    def _open_cold(
        self,
        cold: Cold,
        match: Match,
        places: list[Place],
        length: int,
        tokens: list[int],
        max_length: int,
        salt: str,
    ) -> Sequence | None:
        """A sequence that reads from the colder tier what RAM lacks of its first `length` tokens."""
        wanted = cold.wanted(places, length)
        if cold.busy(places, wanted):
            return None
        sequence = cold.open(tokens, max_length, places, length, wanted)
        assert wanted, "what needs nothing to be read is found in RAM"
        # Publishing gives nodes what was read for them, so it starts before the first of those.
        first = min(wanted[0][0], len(match.nodes))
        node = match.nodes[first - 1] if first else match.root
        while node.parent is not None and self.index.nodes.get(node.key) is not node:
            # Evicted just now, for the blocks to read into.
            node = node.parent
        known = places[-1].end
        missed = self._missed_after(places, known, length, tokens, salt)
        self._chains[sequence] = Chain(node, known - known % self._size, missed)
        return sequence

    def loading(self, sequence: Sequence) -> bool:
        """Whether it waits for what is read from the colder tier; it must not be used before that has ended."""
        return self._cold is not None and sequence in self._cold.loading

    def load(self, seconds: float) -> list[tuple[Sequence, bool]]:
        """Read what loading sequences wait for, for about `seconds`; no step may be in the air.

        Returns the sequences that have ended loading, and whether that went well. If not, close it and open it again:
        what could not be read is not offered a second time.
        """
        if self._cold is None:
            return []
        ended = self._cold.load(seconds)
        for loading in ended:
            for key in loading.failed:
                self._figures.remember(key, DAMAGED)
            if loading.failed:
                self._chains.pop(loading.sequence)
            else:
                self._loaded(loading)
        return [(loading.sequence, not loading.failed) for loading in ended]

    def _loaded(self, loading: Loading) -> None:
        sequence, chain = loading.sequence, self._chains[loading.sequence]
        sequence.length = loading.length
        if loading.states is not None:
            sequence.states = loading.states
        self.publish(sequence, loading.tokens)
        self.snapshot(sequence)
        self._figures.started(loading.length, chain.missed)

    def _restore_point(self, pieces: list[Piece]) -> int:
        rules = [pool.group.rule for pool in self._memory.pools]
        return restore_point(pieces, rules, self._recurrent)

    def _open_at(self, path: list[Node], length: int, max_length: int) -> Sequence:
        """A sequence that has `length` tokens stored, which `path` holds."""
        states = self._states_at(path[-(-length // self._size) - 1], length) if self._recurrent and length else []
        tail = path[length // self._size] if length % self._size and self._memory.pools else None
        if tail is not None:
            # Held until it is taken over or copied: making room must not evict it.
            self._share(tail)
        try:
            sequence = self._memory.open(max_length, self._prefix(path, length))
        except BaseException:
            if tail is not None:
                self._release(tail)
            raise
        sequence.length, sequence.states = length, states
        try:
            if tail is not None:
                self._continue_block(sequence, tail, length)
        except BaseException:
            self._memory.close(sequence)
            raise
        return sequence

    def _share(self, node: Node) -> None:
        for pool, block in zip(self._memory.pools, node.blocks, strict=True):
            pool.share([block] if block != FORGOTTEN else [])

    def _release(self, node: Node) -> None:
        for pool, block in zip(self._memory.pools, node.blocks, strict=True):
            pool.release([block] if block != FORGOTTEN else [])

    def _pieces(self, path: list[Node], length: int) -> list[Piece]:
        """What there is in RAM of the first `length` tokens of `path`, which end in its last node."""
        groups = range(len(self._memory.pools))
        pieces = []
        for node in path:
            end = min(node.end, length)
            has = tuple(held(node, g) for g in groups)
            pieces.append(Piece(node.start, end, has, end == node.end and self._has_snapshot(node)))
        return pieces

    def _has_snapshot(self, node: Node) -> bool:
        return self.snapshots.get(node.key) is not None

    def _prefix(self, path: list[Node], length: int) -> list[list[int]]:
        """Per group, the whole blocks a sequence that continues at `length` refers to."""
        prefixes = []
        for group, pool in enumerate(self._memory.pools):
            blocks = [FORGOTTEN] * (length // self._size)
            for i in blocks_read(pool.group.rule, length, self._size):
                if i < len(blocks):
                    blocks[i] = path[i].blocks[group]
            prefixes.append(blocks)
        return prefixes

    def _continue_block(self, sequence: Sequence, tail: Node, length: int) -> None:
        """Give the sequence the block that `length` lies in: `tail`'s own if nobody else needs it, else a copy."""
        pools = self._memory.pools
        sole = all(not held(tail, g) or pool.references[tail.blocks[g]] == 1 for g, pool in enumerate(pools))
        if sole and length == tail.end and not tail.children and not tail.pins:
            for table, block in zip(sequence.tables, tail.blocks, strict=True):
                if block != FORGOTTEN:
                    table.adopt(block)
            self._eviction.remove(tail)
            return
        try:
            for group, (table, pool) in enumerate(zip(sequence.tables, pools, strict=True)):
                if held(tail, group):
                    table.advance(length - 1, 1)
                    pool.copy(tail.blocks[group], table.blocks[-1])
        finally:
            self._release(tail)

    def _states_at(self, node: Node, length: int) -> list[State]:
        snapshot = self.snapshots.get(node.key)
        if snapshot is None or snapshot.length != length:
            raise IntegrityError(f"no recurrent state is tagged {length}")
        self.snapshots.use(node.key)
        return [list(state) for state in snapshot.states]

    def probe(self, tokens: list[int], salt: str = "") -> tuple[int, int, str | None]:
        """How many of `tokens` a request would find cached now, how many of those in RAM, and why not more.

        Changes nothing.
        """
        data, limit = as_bytes(tokens), len(tokens) - 1
        match = self.index.match(data, salt, limit, touch=False)
        _, hot = self._furthest(match, data, limit)
        if self._cold is not None and hot < limit:
            places, reach = self._cold.reach(match, data, limit)
            if reach > hot:
                return reach, hot, self._missed_after(places, places[-1].end, reach, tokens, salt)
        last = match.nodes[-1] if match.nodes else match.root
        return hot, hot, self._missed(last, match.length, hot, tokens, salt)

    # What a sequence leaves behind

    def stops(self, sequence: Sequence, prompt: list[int], stop_tokens: set[int]) -> list[int]:
        """Lengths at which prefill should pause for a snapshot: where this prompt's last block ends, the junction, and
        the last blocks of messages.
        """
        if not self._recurrent:
            return []
        ends = [*message_ends(prompt, stop_tokens), len(prompt) - 1]
        wanted = [self._chains[sequence].junction, *(end // self._size * self._size for end in ends)]
        return sorted({stop for stop in wanted if stop > sequence.length})

    def due(self, sequence: Sequence) -> bool:
        """Whether the sequence has filled a block that is not published."""
        return sequence.length - self._chains[sequence].node.end >= self._size

    def publish(self, sequence: Sequence, tokens: list[int]) -> None:
        """Enter the blocks that `sequence` has filled; `tokens` are all that are known of it."""
        chain = self._chains[sequence]
        end = min(sequence.length, len(tokens)) // self._size * self._size
        if end == chain.node.end:
            return
        data = as_bytes(tokens[chain.node.end : end])
        size = self._size * TOKEN_BYTES
        for start in range(0, len(data), size):
            block = data[start : start + size]
            known = self.index.nodes.get(self.index.child_key(chain.node, block))
            if known is None:
                chain.node = self._enter(sequence, chain.node, block)
            else:
                chain.node = self._use_known(sequence, known)

    def _enter(self, sequence: Sequence, parent: Node, tokens: bytes) -> Node:
        index = parent.end // self._size
        blocks = [table.blocks[index] for table in sequence.tables]
        for pool, block in zip(self._memory.pools, blocks, strict=True):
            if block != FORGOTTEN:
                pool.keep(block)
        node = self.index.add(parent, tokens, blocks)
        self._eviction.offer(node)
        if len(tokens) == self._size * TOKEN_BYTES:
            self._write_through(node)
        return node

    def _write_through(self, node: Node) -> None:
        for group in range(len(self._memory.pools)):
            if self._through is not None and held(node, group):
                self._through.store(node, group)

    def _use_known(self, sequence: Sequence, node: Node) -> Node:
        """Computed by another at the same time: one copy stays, the one that is known."""
        index = node.start // self._size
        for group, (table, pool) in enumerate(zip(sequence.tables, self._memory.pools, strict=True)):
            own = table.blocks[index]
            if own == FORGOTTEN or own == node.blocks[group]:
                continue
            if held(node, group):
                table.replace(index, node.blocks[group])
            elif not node.pins or pool.can_pin([own]):
                pool.keep(own)
                node.blocks[group] = own
                pool.pin(own, node.pins > 0)
        self._write_through(node)
        self.index.touch(node)
        self._eviction.offer(node)
        return node

    def snapshot(self, sequence: Sequence) -> None:
        """Store the recurrent states of `sequence`, tagged with its length, if it ends at a published block."""
        node = self._chains[sequence].node
        if self._recurrent and node.end == sequence.length:
            self._store_snapshot(node, sequence)

    def _store_snapshot(self, node: Node, sequence: Sequence) -> None:
        snapshot = Snapshot(sequence.length, self._memory.states_of(sequence))
        if self._through is not None:
            self._through.store_states(node, snapshot)
        for key, dropped in self.snapshots.put(node.key, snapshot):
            self._eviction.snapshot_dropped(key, dropped)

    def finish(self, sequence: Sequence, tokens: list[int]) -> None:
        """The sequence ends: all it has stored stays cached. Close it afterwards."""
        self.publish(sequence, tokens)
        stored = min(sequence.length, len(tokens))
        node = self._chains[sequence].node
        if stored > node.end:
            node = self._enter_tail(sequence, node, as_bytes(tokens[node.end : stored]))
        if self._recurrent and node.end == sequence.length and node.parent is not None:
            self._store_snapshot(node, sequence)
        # From here on it is as if it had never run; if it fails before, all it computed is discarded.
        del self._chains[sequence]
        path = list(node.path())
        for used in path:
            self.index.touch(used)
        if self._cold is not None:
            self._cold.tier.touch([used.key for used in path])
        self._eviction.offer(node)
        self._eviction.prune(node)

    def abandon(self, sequence: Sequence) -> Node | None:
        """Nothing more of the sequence is kept. Close it; if it failed, then `discard` the node this gives.

        None: it had finished when it failed.
        """
        if self._cold is not None and sequence in self._cold.loading:
            self._cold.cancel(sequence)
        chain = self._chains.pop(sequence, None)
        return chain.node if chain is not None else None

    def discard(self, node: Node) -> None:
        """Forget `node` and those before it that nobody else uses or continues."""
        self._eviction.discard(node)

    def _enter_tail(self, sequence: Sequence, parent: Node, tokens: bytes) -> Node:
        """A partial block as a leaf, unless a sibling has all of it; a sibling it extends is dropped."""
        whole = parent.children.get(tokens)
        if whole is not None:
            return whole
        if self.index.continued(parent, tokens):
            return parent
        for sibling in list(self.index.ends(parent, tokens)):
            if self._eviction.removable(sibling):
                self._eviction.remove(sibling)
        return self._enter(sequence, parent, tokens)

    # All of it

    def clear(self) -> None:
        """Forget everything that no running sequence uses and that is not pinned; in the colder tier, everything."""
        self.forget()
        if self._cold is not None:
            self._cold.tier.clear()

    def forget(self) -> None:
        """Like `clear`, but what the colder tier has stays there."""
        self._eviction.clear()

    def store_all(self) -> Iterator[tuple[int, int]]:
        """Offer to the colder tier all that is cached and fits there, waiting for it; gives (bytes done, in all)."""
        return self._cold.store_all() if self._cold is not None else iter(())

    # Pins

    def pin(self, tokens: list[int], salt: str = "") -> int:
        """Never evict the blocks that are cached of `tokens`; returns how many tokens they hold."""
        data = as_bytes(tokens)
        match = self.index.match(data, salt, len(tokens))
        path = [*match.nodes, *([match.tail] if match.tail and match.length == match.tail.end else [])]
        self._eviction.pin(path)
        self._pins.setdefault((salt, data), []).append(path)
        return path[-1].end if path else 0

    def unpin(self, tokens: list[int], salt: str = "") -> None:
        """Take back one pin of `tokens`: of what was pinned then, not of what is cached now."""
        name = (salt, as_bytes(tokens))
        if name in self._pins:
            self._eviction.unpin(self._pins[name].pop())
            if not self._pins[name]:
                del self._pins[name]

    def refusal(self) -> MemoryBudgetError:
        """Why nothing can be admitted although nothing runs: what is left is pinned."""
        pinned = sum(int(pool.pinned.sum()) * pool.block_bytes for pool in self._memory.pools)
        total = sum(pool.nbytes for pool in self._memory.pools)
        return MemoryBudgetError(
            f"{format_size(pinned)} of the KV pool's {format_size(total)} are pinned, "
            "and the request does not fit beside that; unpin something or raise --kv-memory"
        )

    # Figures

    def _missed(self, last: Node, known: int, length: int, tokens: list[int], salt: str) -> str | None:
        """Why a sequence that continues at `length` finds no more; `last` is the last whole block of `known` tokens."""
        return self._why(last.key, last.end, known, length, tokens, salt)

    def _missed_after(self, places: list[Place], known: int, length: int, tokens: list[int], salt: str) -> str | None:
        whole = [place for place in places if place.end % self._size == 0]
        last = whole[-1].address.key if whole else self.index.root(salt).key
        return self._why(last, len(whole) * self._size, known, length, tokens, salt)

    def _why(self, last: bytes, end: int, known: int, length: int, tokens: list[int], salt: str) -> str | None:
        if length >= len(tokens) - 1:
            return None
        if length < known:
            return NO_SNAPSHOT if self._recurrent else EVICTED
        block = as_bytes(tokens[end : end + self._size])
        gone = self._figures.why_gone(self.index.key_after(last, block))
        if gone is not None:
            return gone
        others = (root for name, root in self.index.roots.items() if name != salt)
        if not end and any(self.index.child_key(root, block) in self.index.nodes for root in others):
            return OTHER_SALT
        return NEVER_SEEN

    def stats(self) -> PrefixStats:
        figures = self._figures
        return PrefixStats(
            hits=figures.hits,
            tokens_reused=figures.reused,
            misses=dict(figures.misses),
            nodes=len(self.index.nodes),
            evicted_blocks=figures.evicted_blocks,
            snapshots=len(self.snapshots),
            snapshot_bytes=self.snapshots.nbytes,
            peak_snapshot_bytes=self.snapshots.peak,
        )

    def cached_blocks(self, group: int) -> list[int]:
        return [node.blocks[group] for node in self.index.nodes.values() if held(node, group)]

    def check_integrity(self) -> None:
        """Every node is reachable and has its full-attention blocks; snapshots are tagged with their node's end."""
        for node in self.index.nodes.values():
            if node.parent is None or node.parent.children.get(node.tokens) is not node:
                raise IntegrityError(f"the node of tokens {node.start} to {node.end} is not in the tree")
            for group, pool in enumerate(self._memory.pools):
                if pool.group.rule.span is None and not held(node, group):
                    raise IntegrityError(f"the node of tokens {node.start} to {node.end} lost its block")
                if held(node, group) and pool.pinned[node.blocks[group]] != (node.pins > 0):
                    raise IntegrityError(
                        f"of the node of tokens {node.start} to {node.end} and its block one is pinned"
                    )
        for node in (node for paths in self._pins.values() for path in paths for node in path):
            if self.index.nodes.get(node.key) is not node or not node.pins:
                raise IntegrityError(f"the node of tokens {node.start} to {node.end} is pinned and not cached any more")
        for key, snapshot in self.snapshots.items():
            node = self.index.nodes[key]
            if snapshot.length != node.end:
                raise IntegrityError(f"a state of {snapshot.length} tokens is kept under {node.end}")
        total = sum(snapshot.nbytes for _, snapshot in self.snapshots.items())
        if total != self.snapshots.nbytes or total > self.snapshots.budget:
            raise IntegrityError(f"{self.snapshots.nbytes} bytes of snapshots are counted, {total} are held")

"""One sequence's hold on memory, from the first block it shares to the last it leaves behind.

A lease on what was found in the cache is created in this order and nowhere else:

    find       (before it) where the sequence can continue, see find.py
    share      reference the cached blocks that it reads; they cannot be evicted from here on
    reserve    the rest of its worst case, in every group; if that is impossible, nothing has changed
    make room  evict what the next blocks need, just before they are taken
    take       its own blocks: for what is read from a colder tier, for a partial block, for new tokens (`grow`)
    publish    each block it fills enters the index; if it is known there, that one is used and its own is freed
    release    `finish` leaves all of it cached; `discard` drops what it computed

    tokens: [ shared blocks ...... | end | to compute ............ ]
              referenced             taken over, or one block copied

    loading -> open -> released             loading: something is read from a colder tier; `open` from the start if not
       \\_________\\_____/

Nothing of this copies or moves anything, except for the one partial block at an end that others still need.
"""

from ..memory.device import settle
from ..memory.pool import IntegrityError
from ..memory.pool.sequence import Sequence, State
from ..memory.pool.table import FORGOTTEN, WANTED
from ..tiers.base import STATES, Tier
from .branch import Branch
from .find import Found, Link
from .index import TOKEN_BYTES, Node, as_bytes, held
from .loading import Loader, Loading
from .restore import blocks_read
from .snapshots import Snapshot, message_ends
from .store import Store


class BeingRead(Exception):
    """Another sequence is reading what this one needs from a colder tier: retry once it has."""


class Lease:
    def __init__(
        self,
        store: Store,
        loader: Loader,
        found: Found,
        max_length: int,
        prompt: list[int],
        missed: str | None,
        publishes: bool = True,
    ) -> None:
        """Room for `max_length` tokens, which begin with `prompt`; what was `found` of it is there, or is loading.

        `missed` is the reason why no more of it was cached. Raises OutOfBlocks or BeingRead; then nothing has changed.
        """
        self._store, self._loader, self._publishes = store, loader, publishes
        self._prompt, self.missed = prompt, missed
        # Where the prompt diverges from the cache, if something else continues there.
        self.branch: Branch | None = None
        self._size = store.memory.block_size
        # Where a snapshot would have let the sequence start, had there been one.
        self._junction = found.known - found.known % self._size
        wanted = self._wanted(found)
        if loader.reads({(found.path[i].key, part) for i, part in wanted}):
            raise BeingRead
        states = self._states_at(found)
        # Published blocks end here. Where something is read, they end before the first of that.
        self._node: Node | None = self._start(found, wanted)
        self._node.leases += 1
        try:
            self.sequence = self._take(found, max_length)
        except BaseException:
            self._leave()
            raise
        self.loading: Loading | None = None
        try:
            if not wanted:
                self._continue(found.length, states)
                return
            left = {(found.path[i].key, part): self._place(found.path[i], i, part) for i, part in wanted}
            self.loading = Loading(found.length, left, states or None)
            loader.start(self.loading)
        except BaseException:
            self.loading = None
            self.release()
            raise

    # Starting

    def _wanted(self, found: Found) -> list[tuple[int, int]]:
        """(block, part) of all that must be read from colder tiers; the states come last."""
        wanted = sorted(
            (i, group)
            for group, pool in enumerate(self._store.pools)
            for i in blocks_read(pool.group.rule, found.length, self._size)
            if not found.path[i].hot(group)
        )
        last = -(-found.length // self._size) - 1
        if self._recurrent and found.length and self._store.snapshots.get(found.path[last].key) is None:
            wanted.append((last, STATES))
        return wanted

    @property
    def _recurrent(self) -> bool:
        return bool(self._store.memory.layout.states)

    def _start(self, found: Found, wanted: list[tuple[int, int]]) -> Node:
        whole = [link.node for link in found.path[: found.length // self._size]]
        count = min(wanted[0][0], len(found.match.nodes)) if wanted else len(whole)
        node = whole[count - 1] if count else found.match.root
        assert node is not None, "what is not in RAM is read"
        return node

    def _states_at(self, found: Found) -> list[State]:
        """The recurrent states at the length found, if they are in RAM."""
        if not self._recurrent or not found.length:
            return []
        key = found.path[-(-found.length // self._size) - 1].key
        snapshot = self._store.snapshots.get(key)
        if snapshot is None:
            return []
        if snapshot.length != found.length:
            raise IntegrityError(f"no recurrent state is tagged {found.length}")
        self._store.snapshots.use(key)
        return snapshot.states

    def _take(self, found: Found, max_length: int) -> Sequence:
        """Share, reserve, make room, take."""
        memory, partial = self._store.memory, found.length % self._size
        last = found.path[found.length // self._size] if partial and self._store.pools else None
        end = last.node if last is not None else None
        if end is not None:
            # Held until it is taken over or copied: making room must not evict it.
            self._share(end)
        try:
            sequence = memory.open(max_length, self._prefixes(found, end))
        except BaseException:
            if end is not None:
                self._unshare(end)
            raise
        self.sequence = sequence
        try:
            for group, table in enumerate(sequence.tables):
                self._store.make_room(group, table.wanted)
                table.take_wanted()
            if end is not None:
                self._continue_block(end, found.length)
        except BaseException:
            memory.close(sequence)
            raise
        return sequence

    def _prefixes(self, found: Found, end: Node | None) -> list[list[int]]:
        """Per group, the blocks that are shared, and WANTED for what is read; without the block that is `end`'s."""
        count = found.length // self._size if end is not None else -(-found.length // self._size)
        prefixes = []
        for group, pool in enumerate(self._store.pools):
            blocks = [FORGOTTEN] * count
            for i in blocks_read(pool.group.rule, found.length, self._size):
                if i < count:
                    node = found.path[i].node
                    blocks[i] = node.blocks[group] if node is not None and held(node, group) else WANTED
            prefixes.append(blocks)
        return prefixes

    def _place(self, link: Link, index: int, part: int) -> tuple[Tier, int]:
        """Where a part is read from and to."""
        return link.tiers[part], WANTED if part == STATES else self.sequence.tables[part].blocks[index]

    def _share(self, node: Node) -> None:
        for pool, block in zip(self._store.pools, node.blocks, strict=True):
            pool.share([block] if block != FORGOTTEN else [])

    def _unshare(self, node: Node) -> None:
        for pool, block in zip(self._store.pools, node.blocks, strict=True):
            pool.release([block] if block != FORGOTTEN else [])

    def _continue_block(self, end: Node, length: int) -> None:
        """Continue in the block that contains `length`: `end`'s own if nothing else needs it, otherwise a copy."""
        pools, tables = self._store.pools, self.sequence.tables
        sole = all(not held(end, g) or pool.references[end.blocks[g]] == 1 for g, pool in enumerate(pools))
        if sole and length == end.end and not (end.children or end.pins or end.leases):
            for table, block in zip(tables, end.blocks, strict=True):
                if block != FORGOTTEN:
                    table.adopt(block)
            self._store.remove(end)
            return
        try:
            for group, (table, pool) in enumerate(zip(tables, pools, strict=True)):
                if held(end, group):
                    self._extend(group, length - 1, length)
                    pool.copy(end.blocks[group], table.blocks[-1])
        finally:
            self._unshare(end)

    def _continue(self, length: int, states: list[State]) -> None:
        """The sequence has `length` tokens stored, which others have computed."""
        self.sequence.length = length
        if states:
            self._store.memory.restore(self.sequence, states)

    def loaded(self) -> None:
        """Everything was read: it is as if the sequence had computed it. If something was not, it is released."""
        loading, self.loading = self.loading, None
        assert loading is not None and loading.ended, "a lease that is not loading, or that has not ended"
        if loading.failed:
            self.release()
            return
        self._continue(loading.length, loading.states or [])
        self.publish(self._prompt)
        self.snapshot()

    # Running

    def grow(self, count: int) -> None:
        """Make room for `count` more tokens in every group."""
        for group in range(len(self.sequence.tables)):
            self._extend(group, self.sequence.length, self.sequence.length + count)

    def _extend(self, group: int, position: int, end: int) -> None:
        """Room for [position, end) in one group: first release what is no longer read, then evict."""
        table = self.sequence.tables[group]
        table.forget(position)
        self._store.make_room(group, table.lacking(end))
        table.extend(end)

    def truncate(self, length: int) -> None:
        """Roll back the last tokens, which were not published: `length` are left."""
        assert length >= self._at.end, "published blocks cannot be taken back"
        self._store.memory.truncate(self.sequence, length)

    def stops(self, prompt: list[int], stop_tokens: set[int]) -> list[int]:
        """Lengths at which prefill should pause for a snapshot: where this prompt's last block ends, the junction, and
        the last blocks of messages.
        """
        if not self._recurrent or not self._publishes:
            return []
        ends = [*message_ends(prompt, stop_tokens), len(prompt) - 1]
        wanted = [self._junction, *(end // self._size * self._size for end in ends)]
        return sorted({stop for stop in wanted if stop > self.sequence.length})

    @property
    def due(self) -> bool:
        """Whether the sequence has filled a block that is not published."""
        return self._publishes and self.sequence.length - self._at.end >= self._size

    @property
    def _at(self) -> Node:
        assert self._node is not None, "the lease was released"
        return self._node

    def _move(self, node: Node) -> None:
        self._at.leases -= 1
        node.leases += 1
        self._node = node

    def publish(self, tokens: list[int]) -> None:
        """Enter the blocks that the sequence has filled; `tokens` are all that are known of it."""
        start, end = self._at.end, min(self.sequence.length, len(tokens)) // self._size * self._size
        if not self._publishes or end == start:
            return
        data = as_bytes(tokens[start:end])
        size = self._size * TOKEN_BYTES
        index = self._store.index
        for at in range(0, len(data), size):
            block = data[at : at + size]
            known = index.nodes.get(index.child_key(self._at, block))
            if known is None:
                self._move(self._enter(block))
            else:
                self._use_known(known)
                self._move(known)

    def _enter(self, tokens: bytes) -> Node:
        index = self._at.end // self._size
        return self._store.enter(self._at, tokens, [table.blocks[index] for table in self.sequence.tables])

    def _use_known(self, node: Node) -> None:
        """Another sequence computed the same block: only the copy in the index is kept."""
        index = node.start // self._size
        for group, table in enumerate(self.sequence.tables):
            own = table.blocks[index]
            if own == FORGOTTEN or own == node.blocks[group]:
                continue
            if held(node, group):
                table.replace(index, node.blocks[group])
            else:
                self._store.fill(node, group, own)
        self._store.again(node)

    def snapshot(self) -> None:
        """Keep the recurrent states, tagged with the length, if the sequence ends at a published block."""
        if self._publishes and self._recurrent and self._at.end == self.sequence.length:
            self._keep_states()

    def _keep_states(self) -> None:
        snapshot = Snapshot(self.sequence.length, self._store.memory.keep_states(self.sequence))
        self._store.keep_snapshot(self._at, snapshot)

    # Ending

    def finish(self, tokens: list[int]) -> None:
        """The sequence ends: all it has stored stays cached. If this fails, discard it."""
        if self.loading is None and self._publishes:
            self.publish(tokens)
            stored = min(self.sequence.length, len(tokens))
            if stored > self._at.end:
                self._enter_end(as_bytes(tokens[self._at.end : stored]))
            if self._recurrent and self._at.end == self.sequence.length and self._at.parent is not None:
                self._keep_states()
            self._use(self._at)
        self.release()

    def _enter_end(self, tokens: bytes) -> None:
        """A partial block as a leaf, unless a sibling has all of it; a sibling it extends is dropped."""
        store, parent = self._store, self._at
        whole = parent.children.get(tokens)
        if whole is None and not store.index.continued(parent, tokens):
            for sibling in list(store.index.ends(parent, tokens)):
                if store.removable(sibling):
                    store.remove(sibling)
            whole = self._enter(tokens)
        if whole is not None:
            self._move(whole)

    def _use(self, node: Node) -> None:
        path = list(node.path())
        for used in path:
            self._store.index.touch(used)
        self._store.offload.touch([used.key for used in path])
        # Whole blocks, the first ones first: that is how others find them.
        self._store.offload.want([used.key for used in reversed(path) if self._store.index.full(used)])

    def _leave(self) -> None:
        """The sequence no longer continues from its node."""
        node, self._node = self._at, None
        node.leases -= 1
        self._store.used(node)
        self._store.prune(node)

    def _stop_loading(self) -> None:
        if self.loading is not None:
            self._loader.stop(self.loading)
            self.loading = None

    def release(self) -> None:
        """Release everything; what was published stays cached, and nothing else."""
        self._stop_loading()
        if self._node is not None:
            self._leave()
        self._store.memory.close(self.sequence)

    def discard(self) -> None:
        """The sequence failed: drop everything it computed, which may be wrong. No step may be in flight."""
        blocks = [table.held for table in self.sequence.tables]
        self._stop_loading()
        node, self._node = self._node, None
        if node is not None:
            node.leases -= 1
        self._store.memory.close(self.sequence)
        try:
            if node is not None:
                self._store.discard(node)
        finally:
            # Slots that are not read count with weight 0, and 0 times NaN is NaN: the next holder must not find any.
            for pool, held_before in zip(self._store.pools, blocks, strict=True):
                pool.erase(held_before)
            settle(self._store.memory.arrays())

"""What a sequence can start from: leases on cached blocks, and operations on the whole cache.

`open` finds what is cached of a prompt (find.py) and leases it (lease.py); from then on its owner uses the lease. If
the cache is off, leases start from nothing and leave nothing behind.

Recurrent states are stored as snapshots, references to immutable arrays, each with the length it is the state of.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from ..errors import MemoryBudgetError
from ..memory.kv import KVMemory
from ..memory.pool import IntegrityError, OutOfBlocks
from ..tiers.base import Tier
from ..units import format_size
from .branch import Branch, branch_of
from .events import Cleared, Listener, Removed
from .figures import DAMAGED, LATE, Figures, PrefixStats
from .find import Finder, Found, NotKnownYet
from .index import Index, Node, as_bytes, held, stored
from .lease import Lease
from .loading import Loader
from .offload import Offload
from .recent import Recent
from .snapshots import Snapshots
from .store import Store


class PrefixCache:
    def __init__(
        self,
        memory: KVMemory,
        fingerprint: str,
        snapshot_budget: int,
        tiers: Sequence[Tier] = (),
        write_through: bool = False,
        now: Callable[[], float] = time.perf_counter,
        enabled: bool = True,
    ) -> None:
        """Evicted blocks go to the first of `tiers` that accepts them; with `write_through` all do once full."""
        self.enabled = enabled
        self._memory = memory
        self.index = Index(fingerprint, memory.block_size, now)
        self.snapshots = Snapshots(snapshot_budget)
        self._figures = Figures()
        self.tiers = tuple(tiers)
        self._offload = Offload(self.tiers, memory, self.index, self.snapshots)
        self._store = Store(memory, self.index, self.snapshots, self._figures, self._offload, write_through)
        self._finder = Finder(memory, self.index, self.snapshots, self._figures, self.tiers)
        self._loader = Loader(memory, now)
        # The nodes that each pin keeps, by salt and tokens.
        self._pins: dict[tuple[str, bytes], list[list[Node]]] = {}

    # Sequences

    def open(
        self, tokens: list[int], max_length: int, salt: str = "", seconds: float = 0.0, alone: bool = False
    ) -> Lease:
        """A lease for `tokens` that starts with as many of them as are cached, but never the last one.

        It may be loading first. Raises NotKnownYet if a tier has not answered within `seconds`, BeingRead if another
        lease loads what this one needs, OutOfBlocks if what is left to compute cannot be reserved; in all cases nothing
        has changed, and it can be retried. With `alone` it starts from nothing and leaves nothing.
        """
        if not self.enabled or alone:
            return Lease(self._store, self._loader, self._nothing(salt), max_length, tokens, None, publishes=False)
        found = self._finder.find(tokens, salt, seconds=seconds)
        try:
            lease = self._lease(found, tokens, max_length, salt)
        except OutOfBlocks:
            if found.cold:
                raise
            # A block to copy an end into, or that end itself, may be what is missing.
            lease = self._lease(self._finder.whole_blocks(found), tokens, max_length, salt)
        if lease.loading is None:
            self._figures.started(lease.sequence.length, lease.missed)
        lease.branch = self._branch(found, tokens)
        return lease

    def _lease(self, found: Found, tokens: list[int], max_length: int, salt: str) -> Lease:
        missed = self._finder.why_not_more(found, tokens, salt)
        return Lease(self._store, self._loader, found, max_length, tokens, missed)

    def _branch(self, found: Found, tokens: list[int]) -> Branch | None:
        # What continues on disk is not known.
        return branch_of(found.match, tokens) if found.known == found.match.length else None

    def _nothing(self, salt: str) -> Found:
        return Found(self.index.match(b"", salt, 0), [], 0, 0)

    def load(self, leases: Sequence[Lease], seconds: float) -> list[tuple[Lease, bool]]:
        """Read what loading `leases` (all of them) wait for; for about `seconds`, and with no step in flight.

        Returns those that are done loading, and whether it succeeded. If not, the lease was released; open another:
        what could not be read is not offered again.
        """
        by_loading = {lease.loading: lease for lease in leases}
        ended = []
        for loading in self._loader.read(seconds):
            lease = by_loading[loading]
            for key in loading.failed:
                self._figures.remember(key, DAMAGED)
            lease.loaded()
            if not loading.failed:
                self._figures.started(lease.sequence.length, lease.missed)
            ended.append((lease, not loading.failed))
        return ended

    def loadable(self, seconds: float) -> bool:
        """Whether `load` would read something now; waits at most about `seconds` for that."""
        return self._loader.ready(seconds)

    def being_read(self) -> Iterator[tuple[int, int]]:
        """(group, block) of everything in flight from colder tiers."""
        return self._loader.places()

    def probe(
        self, tokens: list[int], salt: str = "", seconds: float = 1.0
    ) -> tuple[int, int, str | None, Branch | None]:
        """How many of `tokens` a request would find cached now, how many of those in RAM, why not more, and where from.

        Changes nothing. Waits for colder tiers for about `seconds`.
        """
        if not self.enabled:
            return 0, 0, "the prefix cache is off", None
        hot = self._finder.in_memory(tokens, salt)
        try:
            found = self._finder.find(tokens, salt, touch=False, seconds=seconds)
        except NotKnownYet:
            return hot, hot, LATE, None
        return found.length, hot, self._finder.why_not_more(found, tokens, salt), self._branch(found, tokens)

    # All of it

    def clear(self) -> None:
        """Drop everything that no running sequence uses and that is not pinned; in colder tiers, everything."""
        self.forget()
        self._offload.clear()
        listener, nodes = self.index.listener, self.index.nodes.values()
        if listener is not None and not any(self.index.full(node) for node in nodes):
            listener(Cleared())

    def forget(self) -> None:
        """Like `clear`, but what colder tiers have stays there."""
        self._store.clear()

    def store_all(self) -> Iterator[tuple[int, int]]:
        """Write everything cached that fits to the colder tiers, waiting for it; yields (bytes done, in total)."""
        return self._offload.everything()

    def close(self) -> None:
        """Drop everything, notify the listener, close the colder tiers."""
        self.forget()
        self._stop_listening()
        for tier in self.tiers:
            tier.close()

    def share(self, seconds: float) -> None:
        """Copy cached blocks that shared tiers want, for about `seconds`."""
        self._offload.share(seconds)

    @property
    def unshared(self) -> bool:
        """Whether tiers want more."""
        return self._offload.unshared

    def computed(self, tokens: int, seconds: float) -> None:
        """This many prompt tokens were computed in that time: the speed that reading has to beat."""
        for tier in self.tiers:
            tier.computed(tokens, seconds)

    def recent(self, tokens: int) -> Recent:
        """What the colder tiers hold: about `tokens` most recently used ones in each. For startup, not for requests."""
        count = -(-tokens // self._memory.block_size) if self.enabled else 0
        return Recent(self.index, [address for tier in self.tiers for address in tier.recent(count)])

    # Who listens

    def listen(self, listener: Listener) -> None:
        """Report every whole block in RAM to `listener` now, and every one added or removed from now on."""
        for node in self.index.nodes.values():
            if self.index.full(node):
                listener(stored(node))
        self.index.listener = listener

    def _stop_listening(self) -> None:
        """Tell the listener that everything is gone, and nothing after that."""
        listener, self.index.listener = self.index.listener, None
        if listener is not None:
            # What continues a node is younger than the node.
            for node in reversed(self.index.nodes.values()):
                if self.index.full(node):
                    listener(Removed(node.key))
            listener(Cleared())

    # Pins

    def pin(self, tokens: list[int], salt: str = "") -> int:
        """Never evict the blocks that are cached of `tokens`; returns how many tokens they hold."""
        data = as_bytes(tokens)
        match = self.index.match(data, salt, len(tokens))
        path = [*match.nodes, *([match.tail] if match.tail and match.length == match.tail.end else [])]
        return self._pin(path, salt, data)

    def _pin(self, path: list[Node], salt: str, tokens: bytes) -> int:
        self._store.pin(path)
        self._pins.setdefault((salt, tokens), []).append(path)
        return path[-1].end if path else 0

    def unpin(self, tokens: list[int], salt: str = "") -> None:
        """Undo one pin of `tokens`: of what was pinned then, not of what is cached now."""
        name = (salt, as_bytes(tokens))
        if name in self._pins:
            self._unpin(name, self._pins[name][-1])

    def _unpin(self, name: tuple[str, bytes], path: list[Node]) -> None:
        self._pins[name].remove(path)
        if not self._pins[name]:
            del self._pins[name]
        self._store.unpin(path)

    # A single conversation, identified by the key of a node, as shown in the tree

    def pin_node(self, node: Node) -> int:
        """Never evict `node` and what comes before it; returns how many tokens they hold."""
        path = list(node.path())[::-1]
        return self._pin(path, self.index.salt_of(node), b"".join(each.tokens for each in path))

    def unpin_node(self, node: Node) -> None:
        """Undo one pin that ends at `node`, if there is one."""
        found = ((name, path) for name, paths in self._pins.items() for path in paths if path and path[-1] is node)
        if (pin := next(found, None)) is not None:
            self._unpin(*pin)

    def pinned_ends(self) -> frozenset[bytes]:
        """The keys of nodes at which a pin ends."""
        return frozenset(path[-1].key for paths in self._pins.values() for path in paths if path)

    def drop_node(self, node: Node) -> int:
        """Drop `node` and its continuations, in this server's colder tiers, too, unless in use or pinned.

        Returns how many nodes are gone. Continuations that are only in a colder tier stay there, and so does everything
        in a store that other servers read.
        """
        return self._store.drop(node)

    def refusal(self) -> MemoryBudgetError:
        """Why nothing can be admitted although nothing runs: the rest is pinned."""
        pinned = sum(int(pool.pinned.sum()) * pool.block_bytes for pool in self._memory.pools)
        total = sum(pool.nbytes for pool in self._memory.pools)
        return MemoryBudgetError(
            f"{format_size(pinned)} of the KV pool's {format_size(total)} are pinned, "
            "and the request does not fit beside that; unpin something or raise --kv-memory"
        )

    # Figures

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

    def check_integrity(self) -> None:
        """Every count of nodes, pins and snapshots, and of the pools' blocks that are held or cached."""
        self._store.check_integrity()
        for node in (node for paths in self._pins.values() for path in paths for node in path):
            if self.index.nodes.get(node.key) is not node or not node.pins:
                raise IntegrityError(f"the node of tokens {node.start} to {node.end} is pinned and no longer cached")
        nodes = self.index.nodes.values()
        groups = range(len(self._memory.pools))
        self._memory.check_integrity([[node.blocks[g] for node in nodes if held(node, g)] for g in groups])

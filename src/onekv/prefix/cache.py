"""Sequences start from what is cached, leave behind what they compute, and old blocks make room for new ones.

A block in the index is held by the cache (`Pool.keep`) and by every table that uses it. While a sequence runs, each
block it fills is published; when it ends, its last, partial block too. Nothing is copied or moved for that.

    open       tokens: [ shared blocks ...... | tail | to compute ............ ]
                         referenced             taken over, or one block copied
    publish    a full block whose tokens are known already: the sequence takes the known one and frees its own
    evict      least recently used leaves; of a window alone, its blocks, wherever they are in the tree

Recurrent states are stored as snapshots, references to immutable arrays, each with the length it is the state of.
"""

import heapq
import weakref
from dataclasses import dataclass
from functools import partial

from ..errors import MemoryBudgetError
from ..memory.kv import KVMemory
from ..memory.pool import IntegrityError, OutOfBlocks, Pool
from ..memory.sequence import Sequence
from ..memory.table import FORGOTTEN
from ..units import format_size
from .figures import EVICTED, NEVER_SEEN, NO_SNAPSHOT, OTHER_SALT, Figures, PrefixStats
from .index import TOKEN_BYTES, Index, Match, Node, as_bytes, held
from .restore import Piece, restore_point
from .snapshots import Snapshot, Snapshots, message_ends


@dataclass
class Chain:
    """A running sequence's place in the index: `node` ends where its published blocks end."""

    node: Node
    # Where a snapshot would have let the sequence start, had there been one.
    junction: int = 0


class PrefixCache:
    def __init__(self, memory: KVMemory, fingerprint: str, snapshot_budget: int) -> None:
        self._memory = memory
        self._recurrent = bool(memory.layout.states)
        self._size = memory.block_size
        self.index = Index(fingerprint, self._size)
        self._chains: dict[Sequence, Chain] = {}
        self.snapshots = Snapshots(snapshot_budget)
        self._figures = Figures()
        self._heaps: list[list[tuple[int, int, Node]]] = [[] for _ in memory.pools]
        for group, pool in enumerate(memory.pools):
            pool.reclaim = partial(_reclaim, weakref.ref(self), group)

    # Starting a sequence

    def open(self, tokens: list[int], max_length: int, salt: str = "") -> Sequence:
        """A sequence for `tokens` that has stored as many of them as are cached, but never the last one.

        Raises OutOfBlocks if what is left to compute cannot be promised; then nothing has changed.
        """
        match = self.index.match(as_bytes(tokens), salt, len(tokens) - 1)
        pieces = self._pieces(match)
        path = [*match.nodes, *([match.tail] if match.tail else [])]
        length = self._restore_point(pieces)
        try:
            sequence = self._open_at(path, length, max_length)
        except OutOfBlocks:
            # A block to copy the tail into, or the tail itself, may be what is missing.
            length = self._restore_point(pieces[: len(match.nodes)])
            sequence = self._open_at(path, length, max_length)
        node = path[length // self._size - 1] if length >= self._size else match.root
        self._chains[sequence] = Chain(node, match.length - match.length % self._size)
        self._count(match, length, tokens, salt)
        return sequence

    def _restore_point(self, pieces: list[Piece]) -> int:
        rules = [pool.group.rule for pool in self._memory.pools]
        return restore_point(pieces, rules, self._recurrent)

    def _open_at(self, path: list[Node], length: int, max_length: int) -> Sequence:
        """A sequence that has `length` tokens stored, which `path` holds."""
        tail = path[length // self._size] if length % self._size and self._memory.pools else None
        if tail is not None:
            # Held until it is taken over or copied: making room must not evict it.
            self._share(tail)
        try:
            sequence = self._memory.open(max_length, self._prefix(path, length))
        except OutOfBlocks:
            if tail is not None:
                self._release(tail)
            raise
        sequence.length = length
        if self._recurrent and length:
            self._restore_states(sequence, path[-(-length // self._size) - 1])
        if tail is not None:
            self._continue_block(sequence, tail, length)
        return sequence

    def _share(self, node: Node) -> None:
        for pool, block in zip(self._memory.pools, node.blocks, strict=True):
            pool.share([block] if block != FORGOTTEN else [])

    def _release(self, node: Node) -> None:
        for pool, block in zip(self._memory.pools, node.blocks, strict=True):
            pool.release([block] if block != FORGOTTEN else [])

    def _pieces(self, match: Match) -> list[Piece]:
        groups = range(len(self._memory.pools))
        pieces = [
            Piece(node.start, node.end, tuple(held(node, g) for g in groups), self._has_snapshot(node))
            for node in match.nodes
        ]
        if match.tail is not None:
            tail, whole = match.tail, match.length == match.tail.end
            has = tuple(held(tail, g) for g in groups)
            pieces.append(Piece(tail.start, match.length, has, whole and self._has_snapshot(tail)))
        return pieces

    def _has_snapshot(self, node: Node) -> bool:
        return self.snapshots.get(node.key) is not None

    def _prefix(self, path: list[Node], length: int) -> list[list[int]]:
        """Per group, the whole blocks a sequence that continues at `length` refers to."""
        prefixes = []
        for group, pool in enumerate(self._memory.pools):
            rule = pool.group.rule
            first, kept = rule.first(length) // self._size, -(-min(rule.keep, length) // self._size)
            prefixes.append(
                [
                    node.blocks[group] if i >= first or i < kept else FORGOTTEN
                    for i, node in enumerate(path[: length // self._size])
                ]
            )
        return prefixes

    def _continue_block(self, sequence: Sequence, tail: Node, length: int) -> None:
        """Give the sequence the block that `length` lies in: `tail`'s own if nobody else needs it, else a copy."""
        pools = self._memory.pools
        sole = all(not held(tail, g) or pool.references[tail.blocks[g]] == 1 for g, pool in enumerate(pools))
        if sole and length == tail.end and not tail.children and not tail.pins:
            for table, block in zip(sequence.tables, tail.blocks, strict=True):
                if block != FORGOTTEN:
                    table.adopt(block)
            self._remove(tail)
            return
        for group, (table, pool) in enumerate(zip(sequence.tables, pools, strict=True)):
            if held(tail, group):
                table.advance(length - 1, 1)
                pool.copy(tail.blocks[group], table.blocks[-1])
        self._release(tail)

    def _restore_states(self, sequence: Sequence, node: Node) -> None:
        snapshot = self.snapshots.get(node.key)
        if snapshot is None or snapshot.length != sequence.length:
            raise IntegrityError(f"no recurrent state is tagged {sequence.length}")
        sequence.states = [list(state) for state in snapshot.states]
        self.snapshots.use(node.key)

    def probe(self, tokens: list[int], salt: str = "") -> tuple[int, str | None]:
        """How many of `tokens` a request would find cached now, and why not more; changes nothing."""
        match = self.index.match(as_bytes(tokens), salt, len(tokens) - 1, touch=False)
        length = self._restore_point(self._pieces(match))
        why = self._why_not_more(match, length, tokens, salt) if length < len(tokens) - 1 else None
        return length, why

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
        self._offer(node)
        return node

    def _use_known(self, sequence: Sequence, node: Node) -> Node:
        """Computed by another at the same time: one copy stays, the one that is known."""
        index = node.start // self._size
        for group, (table, pool) in enumerate(zip(sequence.tables, self._memory.pools, strict=True)):
            own = table.blocks[index]
            if own == FORGOTTEN or own == node.blocks[group]:
                continue
            if held(node, group):
                table.replace(index, node.blocks[group])
            else:
                pool.keep(own)
                node.blocks[group] = own
        self.index.touch(node)
        self._offer(node)
        return node

    def snapshot(self, sequence: Sequence) -> None:
        """Store the recurrent states of `sequence`, tagged with its length, if it ends at a published block."""
        node = self._chains[sequence].node
        if self._recurrent and node.end == sequence.length:
            self._store_snapshot(node, sequence)

    def _store_snapshot(self, node: Node, sequence: Sequence) -> None:
        states = self._memory.states_of(sequence)
        for key in self.snapshots.put(node.key, Snapshot(sequence.length, states)):
            # Pruning one may have taken others before it along.
            if key in self.index.nodes:
                self._prune(self.index.nodes[key])

    def _prune(self, node: Node) -> None:
        """Without attention layers a node is worth no more than the snapshots at and after it."""
        while not self._memory.pools and node.parent is not None and self._removable(node):
            if self._has_snapshot(node):
                return
            parent = node.parent
            self.index.remove(node)
            node = parent

    def finish(self, sequence: Sequence, tokens: list[int]) -> None:
        """The sequence ends: all it has stored stays cached. Close it afterwards."""
        self.publish(sequence, tokens)
        chain = self._chains.pop(sequence)
        stored = min(sequence.length, len(tokens))
        node = chain.node
        if stored > node.end:
            node = self._enter_tail(sequence, node, as_bytes(tokens[node.end : stored]))
        if self._recurrent and node.end == sequence.length and node.parent is not None:
            self._store_snapshot(node, sequence)
        for used in node.path():
            self.index.touch(used)
        self._offer(node)
        self._prune(node)

    def abandon(self, sequence: Sequence) -> Node:
        """The sequence failed: nothing more of it is kept. Close it, then `discard` the node this gives."""
        return self._chains.pop(sequence).node

    def discard(self, node: Node) -> None:
        """Forget `node` and those before it that nobody else uses or continues."""
        while node.parent is not None and self._removable(node):
            parent = node.parent
            self._remove(node)
            node = parent
        self._offer(node)

    def _enter_tail(self, sequence: Sequence, parent: Node, tokens: bytes) -> Node:
        """A partial block as a leaf, unless a sibling has all of it; a sibling it extends is dropped."""
        for sibling in list(parent.children.values()):
            if sibling.tokens.startswith(tokens):
                return parent if len(sibling.tokens) > len(tokens) else sibling
            if tokens.startswith(sibling.tokens) and self._removable(sibling):
                self._remove(sibling)
        return self._enter(sequence, parent, tokens)

    # Eviction

    def _offer(self, node: Node) -> None:
        """Put a node where eviction looks: stale entries are recognised by their time."""
        for group, pool in enumerate(self._memory.pools):
            if node.parent is not None and (not node.children or pool.group.rule.span is not None):
                heapq.heappush(self._heaps[group], (node.last_used, id(node), node))
                if len(self._heaps[group]) > 4 * len(self.index.nodes) + 1024:
                    # Mostly stale; it is built anew when something must be evicted.
                    self._heaps[group].clear()

    def reclaim(self, group: int, count: int) -> None:
        """Free `count` blocks of one pool, the least recently used ones."""
        pool = self._memory.pools[group]
        wanted = pool.free + count
        rebuilt = False
        while pool.free < wanted:
            if not self._heaps[group]:
                if rebuilt:
                    raise IntegrityError(f"{count} blocks of {pool.group.rule} cannot be evicted")
                rebuilt = True
                for node in self.index.nodes.values():
                    self._offer(node)
                continue
            used, _, node = heapq.heappop(self._heaps[group])
            if used != node.last_used or self.index.nodes.get(node.key) is not node or not held(node, group):
                continue
            if self._idle(pool, node.blocks[group]) and self._evict(group, pool, node):
                rebuilt = False

    def _evict(self, group: int, pool: Pool, node: Node) -> bool:
        """Drop a leaf whole; of a node that must stay, a window's block alone. False if neither is possible."""
        parent = node.parent
        if self._removable(node):
            self._figures.evicted(node.key)
            self._remove(node)
            if parent is not None and not parent.children:
                self._offer(parent)
        elif pool.group.rule.span is not None:
            pool.drop(node.blocks[group])
            node.blocks[group] = FORGOTTEN
        else:
            return False
        self._figures.evicted_blocks += 1
        return True

    def _idle(self, pool: Pool, block: int) -> bool:
        return not pool.references[block] and not pool.pinned[block]

    def _removable(self, node: Node) -> bool:
        """A leaf that is not pinned and that no running sequence refers to or continues from."""
        if node.children or node.pins or any(chain.node is node for chain in self._chains.values()):
            return False
        pools = enumerate(self._memory.pools)
        return all(not held(node, g) or pool.references[node.blocks[g]] == 0 for g, pool in pools)

    def _remove(self, node: Node) -> None:
        self.snapshots.drop(node.key)
        for pool, block in zip(self._memory.pools, node.blocks, strict=True):
            if block != FORGOTTEN:
                pool.drop(block)
        node.blocks = [FORGOTTEN] * len(node.blocks)
        self.index.remove(node)

    def clear(self) -> None:
        """Forget everything that no running sequence uses and that is not pinned."""
        leaves = [node for node in self.index.nodes.values() if self._removable(node)]
        while leaves:
            node = leaves.pop()
            parent = node.parent
            self._remove(node)
            if parent is not None and parent.parent is not None and self._removable(parent):
                leaves.append(parent)

    # Pins

    def pin(self, tokens: list[int], salt: str = "") -> int:
        """Never evict the blocks that are cached of `tokens`; returns how many tokens they hold."""
        path = self._known(tokens, salt)
        for group, pool in enumerate(self._memory.pools):
            blocks = [node.blocks[group] for node in path if held(node, group)]
            if blocks and not pool.can_pin(blocks):
                raise MemoryBudgetError(
                    f"a prompt of {len(tokens)} tokens cannot be pinned: {len(blocks)} of {pool.blocks} blocks, and "
                    f"{pool.available} are not promised to running requests; pin less or raise --kv-memory"
                )
        self._change_pins(path, 1)
        return path[-1].end if path else 0

    def unpin(self, tokens: list[int], salt: str = "") -> None:
        """Take back one pin of `tokens`."""
        self._change_pins([node for node in self._known(tokens, salt) if node.pins], -1)

    def _known(self, tokens: list[int], salt: str) -> list[Node]:
        match = self.index.match(as_bytes(tokens), salt, len(tokens))
        return [*match.nodes, *([match.tail] if match.tail and match.length == match.tail.end else [])]

    def _change_pins(self, nodes: list[Node], change: int) -> None:
        for node in nodes:
            node.pins += change
            for pool, block in zip(self._memory.pools, node.blocks, strict=True):
                if block != FORGOTTEN:
                    pool.pin(block, node.pins > 0)
            self._offer(node)

    def refusal(self) -> MemoryBudgetError:
        """Why nothing can be admitted although nothing runs: what is left is pinned."""
        pinned = sum(int(pool.pinned.sum()) * pool.block_bytes for pool in self._memory.pools)
        total = sum(pool.nbytes for pool in self._memory.pools)
        return MemoryBudgetError(
            f"{format_size(pinned)} of the KV pool's {format_size(total)} are pinned, "
            "and the request does not fit beside that; unpin something or raise --kv-memory"
        )

    # Figures

    def _count(self, match: Match, length: int, tokens: list[int], salt: str) -> None:
        if length:
            self._figures.hit(length)
        if length < len(tokens) - 1:
            self._figures.misses[self._why_not_more(match, length, tokens, salt)] += 1

    def _why_not_more(self, match: Match, length: int, tokens: list[int], salt: str) -> str:
        if length < match.length:
            return NO_SNAPSHOT if self._recurrent else EVICTED
        parent = match.nodes[-1] if match.nodes else match.root
        block = as_bytes(tokens[parent.end : parent.end + self._size])
        if self._figures.was_evicted(self.index.child_key(parent, block)):
            return EVICTED
        others = (root for name, root in self.index.roots.items() if name != salt)
        if not match.nodes and any(self.index.child_key(root, block) in self.index.nodes for root in others):
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
            if node.parent is None or node.parent.children.get(node.key) is not node:
                raise IntegrityError(f"the node of tokens {node.start} to {node.end} is not in the tree")
            for group, pool in enumerate(self._memory.pools):
                if pool.group.rule.span is None and not held(node, group):
                    raise IntegrityError(f"the node of tokens {node.start} to {node.end} lost its block")
        for key, snapshot in self.snapshots.items():
            node = self.index.nodes[key]
            if snapshot.length != node.end:
                raise IntegrityError(f"a state of {snapshot.length} tokens is kept under {node.end}")
        total = sum(snapshot.nbytes for _, snapshot in self.snapshots.items())
        if total != self.snapshots.nbytes or total > self.snapshots.budget:
            raise IntegrityError(f"{self.snapshots.nbytes} bytes of snapshots are counted, {total} are held")


def _reclaim(cache: "weakref.ref[PrefixCache]", group: int, count: int) -> None:
    """What a pool calls to have blocks evicted; it must not keep the cache, and with it the pools, alive."""
    owner = cache()
    if owner is not None:
        owner.reclaim(group, count)

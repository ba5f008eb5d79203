"""How much of a prompt is cached: in RAM, and where that ends or lacks something, in the colder tiers.

The result is a path of `Link`s, one per block, and the length at which a sequence can continue on it. RAM is searched
first; the tiers only if they could lead further, in order: a part that several of them have is read from the first. A
remote tier may not know yet; then the same lookup is repeated later (`NotKnownYet`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..memory.kv import KVMemory
from ..tiers.base import STATES, Address, Entry, Tier
from .figures import EVICTED, NEVER_SEEN, NO_SNAPSHOT, OTHER_SALT, Figures
from .index import TOKEN_BYTES, Index, Match, Node, as_bytes, held
from .restore import Piece, restore_point
from .snapshots import Snapshots

# Keys looked up at a time.
LOOK_AHEAD = 256


class NotKnownYet(Exception):
    """A tier has not answered yet: ask again."""


@dataclass(frozen=True)
class Link:
    """One block of a path: its node if it is in RAM, and the tiers that have parts of it."""

    node: Node | None
    # Where it is not in RAM.
    address: Address | None
    tiers: dict[int, Tier]

    @property
    def key(self) -> bytes:
        return self.node.key if self.node is not None else self._address.key

    @property
    def start(self) -> int:
        return self.node.start if self.node is not None else self._address.start

    @property
    def end(self) -> int:
        if self.node is not None:
            return self.node.end
        return self._address.start + len(self._address.tokens) // TOKEN_BYTES

    @property
    def _address(self) -> Address:
        assert self.address is not None, "a link is a node or an address"
        return self.address

    def has(self, group: int) -> bool:
        return self.hot(group) or group in self.tiers

    def hot(self, group: int) -> bool:
        return self.node is not None and held(self.node, group)


@dataclass(frozen=True)
class Found:
    """A sequence can continue at `length` on `path`; `known` tokens of the prompt are known in any form."""

    match: Match
    path: list[Link]
    length: int
    known: int
    # Whether something of it is to be read from a tier.
    cold: bool = False


class Finder:
    def __init__(
        self,
        memory: KVMemory,
        index: Index,
        snapshots: Snapshots,
        figures: Figures,
        tiers: Sequence[Tier],
    ) -> None:
        self._index, self._snapshots, self._figures, self._tiers = index, snapshots, figures, tiers
        self._size = memory.block_size
        self._rules = [pool.group.rule for pool in memory.pools]
        self._full = [group for group, rule in enumerate(self._rules) if rule.span is None]
        self._recurrent = bool(memory.layout.states)
        # Nodes in RAM may lack something that a sequence needs to start there.
        self._mixed = self._recurrent or len(self._full) < len(self._rules)

    def find(self, tokens: list[int], salt: str, touch: bool = True, seconds: float = 0.0) -> Found:
        """What is cached of `tokens`, but never the last one; with `touch` it counts as used now.

        Waits for tiers for about `seconds`; raises NotKnownYet if one has not answered by then.
        """
        data, limit = as_bytes(tokens), len(tokens) - 1
        match = self._index.match(data, salt, limit, touch)
        hot = self._in_memory(match, data, limit, touch)
        if not self._tiers or hot.length == limit:
            return hot
        path, length = self._with_tiers(match, data, limit, seconds)
        return Found(match, path, length, path[-1].end, cold=True) if length > hot.length else hot

    # In RAM

    def _in_memory(self, match: Match, data: bytes, limit: int, touch: bool) -> Found:
        """The path in RAM on which a sequence can start furthest."""
        nodes = [*match.nodes, *([match.tail] if match.tail is not None else [])]
        length = self._restore_point(self._pieces(nodes, match.length))
        # Where not all is kept, an end of a conversation may lead further than what has most in common with the prompt.
        for count in range(len(match.nodes), -1 if self._mixed else len(match.nodes), -1):
            if (count + 1) * self._size <= length:
                break
            parent = match.nodes[count - 1] if count else match.root
            for end in self._index.ends(parent, data[count * self._size * TOKEN_BYTES : limit * TOKEN_BYTES]):
                other = [*match.nodes[:count], end]
                reached = self._restore_point(self._pieces(other, end.end))
                if reached > length:
                    nodes, length = other, reached
                    if touch:
                        self._index.touch(end)
                    break
        return Found(match, [Link(node, None, {}) for node in nodes], length, match.length)

    def in_memory(self, tokens: list[int], salt: str) -> int:
        """How many of `tokens` a sequence could start from if there were no tiers; changes nothing."""
        data, limit = as_bytes(tokens), len(tokens) - 1
        return self._in_memory(self._index.match(data, salt, limit, touch=False), data, limit, touch=False).length

    def whole_blocks(self, found: Found) -> Found:
        """Only whole blocks, so that none has to be copied or taken over."""
        nodes = found.match.nodes
        length = self._restore_point(self._pieces(nodes, len(nodes) * self._size))
        return Found(found.match, [Link(node, None, {}) for node in nodes], length, found.known)

    def _pieces(self, nodes: list[Node], length: int) -> list[Piece]:
        """What there is in RAM of the first `length` tokens of `nodes`, which end in the last one."""
        groups = range(len(self._rules))
        pieces = []
        for node in nodes:
            end = min(node.end, length)
            snapshot = end == node.end and self._snapshots.get(node.key) is not None
            pieces.append(Piece(node.start, end, tuple(held(node, g) for g in groups), snapshot))
        return pieces

    def _restore_point(self, pieces: list[Piece]) -> int:
        return restore_point(pieces, self._rules, self._recurrent)

    # In the tiers

    def _with_tiers(self, match: Match, tokens: bytes, limit: int, seconds: float) -> tuple[list[Link], int]:
        """The path of everything known of the first `limit` tokens, in any tier, and how far it leads."""
        tokens = tokens[: limit * TOKEN_BYTES]
        known = self._ask([node.key for node in match.nodes] if self._mixed else [], seconds)
        links = [Link(node, None, _tiers_of(known.get(node.key, []))) for node in match.nodes]
        parent = match.nodes[-1].key if match.nodes else match.root.key
        links += self._following(parent, tokens, len(match.nodes), seconds)
        best = links, self._reach(links)
        # With recurrent states, an end of a conversation may lead further than whole blocks do.
        for count in range(len(links), -1 if self._recurrent else len(links) - 1, -1):
            if count * self._size + self._size <= best[1]:
                break
            parent = links[count - 1].key if count else match.root.key
            start = count * self._size
            end = self._end(parent, start, tokens[start * TOKEN_BYTES :], seconds)
            if end is not None:
                path = [*links[:count], end]
                best = max(best, (path, self._reach(path)), key=lambda found: found[1])
        return best

    def _ask(self, keys: list[bytes], seconds: float) -> dict[bytes, list[tuple[Tier, Entry]]]:
        """What each tier has of `keys`."""
        found: dict[bytes, list[tuple[Tier, Entry]]] = {}
        for tier in self._tiers if keys else ():
            entries = tier.find(keys, seconds)
            if entries is None:
                raise NotKnownYet
            for key, entry in entries.items():
                found.setdefault(key, []).append((tier, entry))
        return found

    def _following(self, parent: bytes, tokens: bytes, first: int, seconds: float) -> Iterator[Link]:
        """The whole blocks after `first` of them that the tiers have enough of.

        Full-attention layers allow no gap. Without such layers a block may lack everything: only a window or a state
        further on counts.
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
            found = self._ask([address.key for address in addresses], seconds)
            for address in addresses:
                # Keys are hashes: the whole address must agree.
                there = [(tier, entry) for tier, entry in found.get(address.key, []) if entry.address == address]
                link = Link(None, address, _tiers_of(there))
                if not self._usable(link):
                    return
                yield link

    def _end(self, parent: bytes, start: int, tokens: bytes, seconds: float) -> Link | None:
        """The longest partial block after `parent`, which ends at `start`, that `tokens` begin with."""
        there: dict[Address, list[tuple[Tier, Entry]]] = {}
        for tier in self._tiers:
            entries = tier.tails(parent, seconds)
            if entries is None:
                raise NotKnownYet
            for entry in entries:
                part = entry.address.tokens
                right = Address(self._index.key_after(parent, part), parent, start, part)
                if entry.address == right and tokens.startswith(part):
                    there.setdefault(right, []).append((tier, entry))
        links = [Link(None, address, _tiers_of(entries)) for address, entries in there.items()]
        return max((link for link in links if self._usable(link)), key=lambda link: link.end, default=None)

    def _usable(self, link: Link) -> bool:
        """Whether the tiers have it for all full-attention layers: without them nothing else counts."""
        return all(group in link.tiers for group in self._full)

    def _reach(self, links: list[Link]) -> int:
        """How far a path leads."""
        groups = range(len(self._rules))
        return self._restore_point(
            [
                Piece(
                    link.start,
                    link.end,
                    tuple(link.has(g) for g in groups),
                    STATES in link.tiers or self._snapshots.get(link.key) is not None,
                )
                for link in links
            ]
        )

    # Why not more

    def why_not_more(self, found: Found, tokens: list[int], salt: str) -> str | None:
        """Why a sequence that continues where `found` says finds no more of `tokens`; None if it finds all."""
        if found.length >= len(tokens) - 1:
            return None
        if found.length < found.known:
            return NO_SNAPSHOT if self._recurrent else EVICTED
        whole = [link for link in found.path if link.end % self._size == 0 and link.end <= found.known]
        last, end = (whole[-1].key, whole[-1].end) if whole else (found.match.root.key, 0)
        block = as_bytes(tokens[end : end + self._size])
        gone = self._figures.why_gone(self._index.key_after(last, block))
        if gone is not None:
            return gone
        others = (root for name, root in self._index.roots.items() if name != salt)
        if not end and any(self._index.child_key(root, block) in self._index.nodes for root in others):
            return OTHER_SALT
        return NEVER_SEEN


def _tiers_of(entries: list[tuple[Tier, Entry]]) -> dict[int, Tier]:
    """For each part, the first tier that has it."""
    tiers: dict[int, Tier] = {}
    for tier, entry in entries:
        for part in entry.parts:
            tiers.setdefault(part, tier)
    return tiers

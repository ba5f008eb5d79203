"""The tree of cached blocks.

    root (one per salt) -> node: tokens [0, 64) -> node: [64, 128) -> node: [128, 150), a partial block
                                                \\-> node: [64, 128), other tokens

A node's key is the hash of its parent's key and its tokens, so a full block is found with one lookup and identifies
everything before it. Tokens are kept and compared. Partial blocks are leaves: the ends of sequences.
"""

import hashlib
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..memory.pool.table import FORGOTTEN
from ..tiers.base import Address
from .events import Listener, Removed, Stored

TOKEN_BYTES = 4


class Node:
    """One block of tokens, [start, end); `blocks[g]` is where group g keeps it, FORGOTTEN if it does not."""

    __slots__ = (
        "blocks", "children", "key", "last_used", "leases", "ordered", "parent", "pins", "start", "tokens", "used_at"
    )  # fmt: skip

    def __init__(self, parent: "Node | None", key: bytes, tokens: bytes, blocks: list[int]) -> None:
        self.parent, self.key, self.tokens, self.blocks = parent, key, tokens, blocks
        self.start: int = parent.end if parent is not None else 0
        # By their tokens; and these in order, so that neighbours have most in common.
        self.children: dict[bytes, Node] = {}
        self.ordered: list[bytes] = []
        # When it was used last: as a count of all uses, which no two nodes share, and by the clock.
        self.last_used, self.used_at = 0, 0.0
        # Running sequences that continue from here.
        self.leases = 0
        self.pins = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    def path(self) -> Iterator["Node"]:
        """This node and those before it, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Match:
    """The longest known beginning of some tokens: whole nodes, then `common` tokens of `tail`."""

    root: Node
    nodes: list[Node]
    tail: Node | None
    common: int

    @property
    def length(self) -> int:
        return (self.nodes[-1].end if self.nodes else 0) + self.common


class Index:
    def __init__(self, fingerprint: str, block_size: int, now: Callable[[], float] = time.perf_counter) -> None:
        """`fingerprint` names what the blocks depend on besides tokens: model, layout, dtype, block size."""
        self._now = now
        self._fingerprint, self._block_bytes = fingerprint, block_size * TOKEN_BYTES
        self.roots: dict[str, Node] = {}
        self.nodes: dict[bytes, Node] = {}
        # Is told of every whole block that is added or removed (events.py).
        self.listener: Listener | None = None
        self._clock = 0

    def root(self, salt: str) -> Node:
        if salt not in self.roots:
            digest = _hash(self._fingerprint.encode() + b"\0" + salt.encode())
            self.roots[salt] = Node(None, digest, b"", [])
        return self.roots[salt]

    def salt_of(self, node: Node) -> str:
        """The salt that `node` belongs to."""
        while node.parent is not None:
            node = node.parent
        return next(salt for salt, root in self.roots.items() if root is node)

    def match(self, tokens: bytes, salt: str, limit: int, touch: bool = True) -> Match:
        """What is known of the first `limit` tokens; with `touch` the nodes found count as used now."""
        root = node = self.root(salt)
        size, end = self._block_bytes, limit * TOKEN_BYTES
        nodes: list[Node] = []
        for start in range(0, end - size + 1, size):
            block = tokens[start : start + size]
            child = self.nodes.get(_hash(node.key + block))
            if child is None or child.tokens != block:
                break
            nodes.append(child)
            node = child
        rest = tokens[len(nodes) * size : end][:size]
        tail, common = _longest_common(node, rest)
        for found in (*nodes, *([tail] if tail else [])) if touch else ():
            self.touch(found)
        return Match(root, nodes, tail, common)

    def ends(self, parent: Node, tokens: bytes) -> Iterator[Node]:
        """The partial blocks after `parent` that `tokens` begin with, the longest first."""
        if len(parent.children) == 1 and len(parent.ordered[0]) == self._block_bytes:
            return
        for end in range(min(len(tokens), self._block_bytes - TOKEN_BYTES), 0, -TOKEN_BYTES):
            child = parent.children.get(tokens[:end])
            if child is not None:
                yield child

    def continued(self, parent: Node, tokens: bytes) -> bool:
        """Whether a child of `parent` begins with `tokens`."""
        at = bisect_left(parent.ordered, tokens)
        return at < len(parent.ordered) and parent.ordered[at].startswith(tokens)

    def full(self, node: Node) -> bool:
        """Whether it is a whole block, not an end."""
        return len(node.tokens) == self._block_bytes

    def child_key(self, parent: Node, tokens: bytes) -> bytes:
        return self.key_after(parent.key, tokens)

    def key_after(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of `tokens` after the node with the key `parent`."""
        return _hash(parent + tokens)

    def add(self, parent: Node, tokens: bytes, blocks: list[int]) -> Node:
        """A new node for `tokens` after `parent`."""
        node = Node(parent, self.child_key(parent, tokens), tokens, blocks)
        self.nodes[node.key] = node
        parent.children[tokens] = node
        insort(parent.ordered, tokens)
        self.touch(node)
        if self.listener is not None and self.full(node):
            self.listener(stored(node))
        return node

    def remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        assert not node.children and node.parent is not None, "only a leaf may be removed"
        del self.nodes[node.key]
        siblings = node.parent
        del siblings.children[node.tokens]
        del siblings.ordered[bisect_left(siblings.ordered, node.tokens)]
        if self.listener is not None and self.full(node):
            self.listener(Removed(node.key))

    def touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used, node.used_at = self._clock, self._now()


def as_bytes(tokens: list[int]) -> bytes:
    """Tokens as the index keeps them."""
    return np.asarray(tokens, np.int32).tobytes()


def as_tokens(data: bytes) -> list[int]:
    """Tokens as the index keeps them, as numbers."""
    return [int(token) for token in np.frombuffer(data, np.int32)]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _longest_common(parent: Node, tokens: bytes) -> tuple[Node | None, int]:
    """The child of `parent` that shares the most first tokens with `tokens`, and how many."""
    at = bisect_left(parent.ordered, tokens)
    near = parent.ordered[max(0, at - 1) : at + 1]
    most, best = max(((common(each, tokens), each) for each in near), default=(0, b""), key=lambda found: found[0])
    if not most:
        return None, 0
    # Of equals the shortest: a partial block that is matched whole can be taken over.
    whole = parent.children.get(tokens[: most * TOKEN_BYTES])
    return whole or parent.children[best], most


def common(a: bytes, b: bytes) -> int:
    """How many first tokens are the same."""
    length = min(len(a), len(b)) // TOKEN_BYTES
    if a[: length * TOKEN_BYTES] == b[: length * TOKEN_BYTES]:
        return length
    different = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length)
    return int(np.argmax(different))


def address_of(node: Node) -> Address:
    """The node's address in tiers."""
    assert node.parent is not None, "a root has no content"
    return Address(node.key, node.parent.key, node.start, node.tokens)


def stored(node: Node) -> Stored:
    """The event for listeners that the node was stored."""
    assert node.parent is not None, "a root has no content"
    # The key of a root depends only on the salt, and is not reported.
    return Stored(node.key, node.parent.key if node.parent.parent is not None else None, node.tokens)


def held(node: Node, group: int) -> bool:
    return node.blocks[group] != FORGOTTEN

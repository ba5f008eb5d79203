"""mlx-lm's LRUPromptCache with one copy of every conversation.

An entry is the caches of one sequence of tokens. The index owns its entries. `fetch_nearest_cache` hands their caches
out without copying them (`loans` says how); an entry that is lent stays listed and counted, and `insert_cache` with
what was lent moves it to its new key. `max_size` and `max_bytes` hold after every call; bytes that entries share count
once.

Which entry is chosen is what mlx-lm chooses: the same tokens, else the shortest entry among those that have most tokens
in common (and can be trimmed to them), else the longest that is a prefix. Eviction takes assistant, user and system
entries in mlx-lm's order; within a type the one that was used longest ago goes first.
"""

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache

from .loans import Cache, Loan, compact, footprint, keep, lend, length, share, shareable, state_id
from .slabs import POOL, Pool

TYPES = ("assistant", "user", "system")
NO_LIMIT = 1 << 63
Ids = np.ndarray[Any, Any]


@dataclass(eq=False)
class Entry:
    """`lengths` says how much each cache holds of `tokens`, whatever a borrower has added since."""

    model: Any
    tokens: list[Any]
    caches: list[Cache]
    cache_type: str
    ids: Ids = field(init=False)
    lengths: list[int | None] = field(init=False)
    loan: Loan | None = None

    def __post_init__(self) -> None:
        self.set_tokens(self.tokens)

    def set_tokens(self, tokens: list[Any]) -> None:
        self.tokens, self.ids = tokens, token_ids(tokens)
        self.lengths = [length(cache) for cache in self.caches]

    @property
    def lent(self) -> bool:
        return self.loan is not None and self.loan.open

    def excess(self) -> list[int]:
        """How many tokens a borrower has added to each cache; less than 0 if it has trimmed it."""
        now = [length(cache) for cache in self.caches]
        return [(n or 0) - (then or 0) for n, then in zip(now, self.lengths, strict=True)]


def token_ids(tokens: list[Any]) -> Ids:
    try:
        return np.array(tokens, np.int64)
    except (OverflowError, TypeError, ValueError):
        # An image stands in the key by a number of its own.
        ids = np.empty(len(tokens), object)
        ids[:] = tokens
        return ids


def common_prefix(a: Ids, b: Ids) -> int:
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    return int(np.argmax(different)) if different.any() else size


class LRUPromptCache:
    """See the module. `leave_one`: every fetch leaves a token to compute; mlx-lm's server cannot do without."""

    def __init__(self, max_size: int = 10, max_bytes: int = NO_LIMIT) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.leave_one = False
        self._queues: dict[str, list[Entry]] = {name: [] for name in TYPES}
        self._by_model: dict[Any, list[Entry]] = {}
        self.copies = 0
        self.misses: Counter[str] = Counter()
        POOL.register(self)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def nbytes(self) -> int:
        return sum(self._bytes_by_type().values())

    def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> tuple[list[Cache] | None, list[Any]]:
        """Caches that hold the first of `tokens`, and the tokens that are left; None and all of them if there are none.

        The caches are the caller's until it inserts them again or lets go of them.
        """
        self._end_loans(model)
        for entry, kept in self._candidates(model, tokens):
            if (caches := self._hand_out(entry, kept)) is not None:
                self._enforce()
                return caches, tokens[kept:]
        return None, tokens

    def insert_cache(
        self, model: Any, tokens: list[Any], prompt_cache: list[Cache], *, cache_type: str = "assistant"
    ) -> None:
        queue = self._queues[cache_type]
        if not prompt_cache:
            return
        states = {state_id(cache) for cache in prompt_cache}
        for entry in self._entries(model):
            returned = any(state_id(cache) in states for cache in entry.caches)
            if returned or entry.tokens == tokens:
                self._remove(entry)
        entry = Entry(model, tokens, [keep(cache) for cache in prompt_cache], cache_type)
        if can_trim_prompt_cache(prompt_cache):
            # What is shorter can be had from this one.
            for other in self._entries(model):
                if len(other.ids) < len(entry.ids) and common_prefix(other.ids, entry.ids) == len(other.ids):
                    self._remove(other)
        queue.append(entry)
        self._by_model.setdefault(model, []).append(entry)
        self._enforce()

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        count = NO_LIMIT if n_sequences is None else max(0, n_sequences)
        size = NO_LIMIT if n_bytes is None else max(0, n_bytes)
        while len(self) and (len(self) > count or self.nbytes > size):
            self._remove(self._oldest())

    def reclaim(self, pool: Pool, size: int) -> None:
        """The pool needs room: what is cached gives way to what runs."""
        while len(self) and pool.free < size:
            self._remove(self._oldest())

    def identities(self) -> set[int]:
        caches = [cache for queue in self._queues.values() for entry in queue for cache in entry.caches]
        return {identity for cache in caches for identity, _ in footprint(cache)}

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        sizes = self._bytes_by_type()
        return {name: {"n_sequences": len(self._queues[name]), "n_bytes": sizes[name]} for name in TYPES}

    def stats(self) -> dict[str, Any]:
        """What mlx-lm does not count: entries that are lent now, copies that had to be made, misses by reason."""
        lent = sum(entry.lent for queue in self._queues.values() for entry in queue)
        return {"lent": lent, "copies": self.copies, "misses": dict(self.misses)}

    # Search

    def _candidates(self, model: Any, tokens: list[Any]) -> list[tuple[Entry, int]]:
        """Entries that could serve `tokens` and how many tokens of each, best first."""
        ids = token_ids(tokens)
        found = [(entry, common_prefix(entry.ids, ids)) for entry in self._entries(model)]
        last = max(0, len(tokens) - 1)
        candidates = []
        exact = [entry for entry, common in found if common == len(entry.ids) == len(ids)]
        if exact and not self.leave_one:
            return [(exact[0], len(tokens))]
        # mlx-lm never takes a prefix of one token.
        prefixes = [(entry, common) for entry, common in found if 1 < common == len(entry.ids) < len(ids)]
        shorter = max(prefixes, key=lambda pair: pair[1], default=None)
        most = max((common for _, common in found), default=0)
        if most > (shorter[1] if shorter else 0):
            longer = min((entry for entry, common in found[::-1] if common == most), key=lambda entry: len(entry.ids))
            if can_trim_prompt_cache(longer.caches):
                candidates.append((longer, min(last, most)))
        if shorter:
            candidates.append(shorter)
        if not candidates and found:
            self.misses["entries cannot be trimmed" if most else "nothing in common"] += 1
        return candidates

    def _entries(self, model: Any) -> list[Entry]:
        return list(self._by_model.get(model, ()))

    # Loans

    def _hand_out(self, entry: Entry, kept: int) -> list[Cache] | None:
        cut = len(entry.tokens) - kept
        if all(shareable(cache) for cache in entry.caches):
            caches = [share(cache) for cache in entry.caches]
            _trim(caches, [cut] * len(caches))
        elif entry.lent or 2 * kept < len(entry.tokens):
            # A loan of little would cost the entry most of what it holds.
            caches = self._copy(entry, cut)
        else:
            caches = self._lend(entry, cut)
        self._queues[entry.cache_type].remove(entry)
        self._queues[entry.cache_type].append(entry)
        return caches or None

    def _lend(self, entry: Entry, cut: int) -> list[Cache]:
        if cut:
            tokens = entry.tokens[: len(entry.tokens) - cut]
            for other in self._entries(entry.model):
                if other.tokens == tokens:
                    self._remove(other)
            _trim(entry.caches, [cut] * len(entry.caches))
            entry.set_tokens(tokens)
        caches = [share(cache) if shareable(cache) else lend(cache) for cache in entry.caches]
        entry.loan = Loan([twin for twin, cache in zip(caches, entry.caches, strict=True) if not shareable(cache)])
        return caches

    def _copy(self, entry: Entry, cut: int) -> list[Cache]:
        """Caches of its own for a second borrower; none if what the first has added cannot be taken off."""
        excess = [added + cut for added in entry.excess()]
        if any(n < 0 for n in excess) or (any(excess) and not can_trim_prompt_cache(entry.caches)):
            self.misses["lent to another request"] += 1
            return []
        self.copies += 1
        caches = [share(cache) if shareable(cache) else copy.deepcopy(cache) for cache in entry.caches]
        _trim(caches, excess)
        return caches

    def _end_loans(self, model: Any) -> None:
        """Entries whose borrower is gone are whole again, or are no entries any more."""
        for entry in self._entries(model):
            if entry.loan is None or entry.loan.open:
                continue
            entry.loan = None
            excess = entry.excess()
            if any(n < 0 for n in excess) or (any(excess) and not can_trim_prompt_cache(entry.caches)):
                self._remove(entry)
            else:
                _trim(entry.caches, excess)

    # Limits

    def _enforce(self) -> None:
        self.trim_to(n_sequences=self.max_size)
        if self.nbytes > self.max_bytes:
            # A short entry may be the last one in a slab that was made for a long conversation.
            for cache in (cache for queue in self._queues.values() for entry in queue for cache in entry.caches):
                compact(cache)
        self.trim_to(n_bytes=self.max_bytes)

    def _oldest(self) -> Entry:
        """The next one to go, as mlx-lm chooses: of a type only while there are not fewer of it than of the next."""
        queues = [self._queues[name] for name in TYPES]
        for queue, following in pairwise(queues):
            if queue and len(queue) >= len(following):
                return queue[0]
        return queues[-1][0]

    def _remove(self, entry: Entry) -> None:
        self._queues[entry.cache_type].remove(entry)
        entries = self._by_model[entry.model]
        entries.remove(entry)
        if not entries:
            del self._by_model[entry.model]

    def _bytes_by_type(self) -> dict[str, int]:
        seen: set[int] = set()
        return {name: _new_bytes(self._queues[name], seen) for name in TYPES}


def _new_bytes(entries: Iterable[Entry], seen: set[int]) -> int:
    total = 0
    for entry in entries:
        for cache in entry.caches:
            for identity, size in footprint(cache):
                if identity not in seen:
                    seen.add(identity)
                    total += size
    return total


def _trim(caches: list[Cache], counts: list[int]) -> None:
    for cache, count in zip(caches, counts, strict=True):
        if count:
            cache.trim(count)

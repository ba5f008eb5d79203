"""mlx-lm's LRUPromptCache with one copy of every conversation.

A stored prompt is the caches of one list of tokens. The index owns what is stored. `fetch_nearest_cache` hands caches
out without copying them (`loans` says how); a prompt that is lent stays listed and counted, and `insert_cache` with
what was lent moves it to its new key. `max_size` and `max_bytes` hold after every call; bytes that prompts share count
once.

The choice of a prompt is mlx-lm's: the same tokens; otherwise the shortest of those with the most tokens in common (if
they can be trimmed to these); otherwise the longest that is a prefix. Eviction takes assistant, user and system prompts
in mlx-lm's order; within a type, the least recently used goes first.
"""

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache

from .loans import Cache, Loan, compact, footprint, identity, keep, lend, length, share, shareable
from .slabs import SLABS, Slabs

TYPES = ("assistant", "user", "system")
NO_LIMIT = 1 << 63
Ids = np.ndarray[Any, Any]


@dataclass(eq=False)
class StoredPrompt:
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
        # An image is represented in the key by a unique number.
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
        self._queues: dict[str, list[StoredPrompt]] = {name: [] for name in TYPES}
        self._by_model: dict[Any, list[StoredPrompt]] = {}
        self.copies = 0
        self.misses: Counter[str] = Counter()
        SLABS.register(self)

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
        for stored, kept in self._candidates(model, tokens):
            if (caches := self._hand_out(stored, kept)) is not None:
                self._enforce()
                return caches, tokens[kept:]
        return None, tokens

    def insert_cache(
        self, model: Any, tokens: list[Any], prompt_cache: list[Cache], *, cache_type: str = "assistant"
    ) -> None:
        queue = self._queues[cache_type]
        if not prompt_cache:
            return
        given = {identity(cache) for cache in prompt_cache}
        for stored in self._prompts(model):
            returned = any(identity(cache) in given for cache in stored.caches)
            if returned or stored.tokens == tokens:
                self._remove(stored)
        stored = StoredPrompt(model, tokens, [keep(cache) for cache in prompt_cache], cache_type)
        if can_trim_prompt_cache(prompt_cache):
            # What is shorter can be had from this one.
            for other in self._prompts(model):
                if len(other.ids) < len(stored.ids) and common_prefix(other.ids, stored.ids) == len(other.ids):
                    self._remove(other)
        queue.append(stored)
        self._by_model.setdefault(model, []).append(stored)
        self._enforce()

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        count = NO_LIMIT if n_sequences is None else max(0, n_sequences)
        size = NO_LIMIT if n_bytes is None else max(0, n_bytes)
        while len(self) and (len(self) > count or self.nbytes > size):
            self._remove(self._oldest())

    def reclaim(self, slabs: Slabs, size: int) -> None:
        """Another slab is needed: what is cached gives way to what runs."""
        while len(self) and slabs.free < size:
            self._remove(self._oldest())

    def identities(self) -> set[int]:
        caches = [cache for queue in self._queues.values() for stored in queue for cache in stored.caches]
        return {key for cache in caches for key, _ in footprint(cache)}

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        sizes = self._bytes_by_type()
        return {name: {"n_sequences": len(self._queues[name]), "n_bytes": sizes[name]} for name in TYPES}

    def stats(self) -> dict[str, Any]:
        """What mlx-lm does not count: prompts that are lent now, copies that had to be made, misses by reason."""
        lent = sum(stored.lent for queue in self._queues.values() for stored in queue)
        return {"lent": lent, "copies": self.copies, "misses": dict(self.misses)}

    # Search

    def _candidates(self, model: Any, tokens: list[Any]) -> list[tuple[StoredPrompt, int]]:
        """Stored prompts that could serve `tokens` and how many tokens of each, best first."""
        ids = token_ids(tokens)
        found = [(stored, common_prefix(stored.ids, ids)) for stored in self._prompts(model)]
        last = max(0, len(tokens) - 1)
        candidates = []
        exact = [stored for stored, common in found if common == len(stored.ids) == len(ids)]
        if exact and not self.leave_one:
            return [(exact[0], len(tokens))]
        # mlx-lm never takes a prefix of one token.
        prefixes = [(stored, common) for stored, common in found if 1 < common == len(stored.ids) < len(ids)]
        shorter = max(prefixes, key=lambda pair: pair[1], default=None)
        most = max((common for _, common in found), default=0)
        if most > (shorter[1] if shorter else 0):
            longer = min(
                (stored for stored, common in found[::-1] if common == most), key=lambda stored: len(stored.ids)
            )
            if can_trim_prompt_cache(longer.caches):
                candidates.append((longer, min(last, most)))
        if shorter:
            candidates.append(shorter)
        if not candidates and found:
            self.misses["entries cannot be trimmed" if most else "nothing in common"] += 1
        return candidates

    def _prompts(self, model: Any) -> list[StoredPrompt]:
        return list(self._by_model.get(model, ()))

    # Loans

    def _hand_out(self, stored: StoredPrompt, kept: int) -> list[Cache] | None:
        cut = len(stored.tokens) - kept
        if all(shareable(cache) for cache in stored.caches):
            caches = [share(cache) for cache in stored.caches]
            _trim(caches, [cut] * len(caches))
        elif stored.lent or 2 * kept < len(stored.tokens):
            # A loan of little would cost the prompt most of what it holds.
            caches = self._copy(stored, cut)
        else:
            caches = self._lend(stored, cut)
        self._queues[stored.cache_type].remove(stored)
        self._queues[stored.cache_type].append(stored)
        return caches or None

    def _lend(self, stored: StoredPrompt, cut: int) -> list[Cache]:
        if cut:
            tokens = stored.tokens[: len(stored.tokens) - cut]
            for other in self._prompts(stored.model):
                if other.tokens == tokens:
                    self._remove(other)
            _trim(stored.caches, [cut] * len(stored.caches))
            stored.set_tokens(tokens)
        caches = [share(cache) if shareable(cache) else lend(cache) for cache in stored.caches]
        stored.loan = Loan([twin for twin, cache in zip(caches, stored.caches, strict=True) if not shareable(cache)])
        return caches

    def _copy(self, stored: StoredPrompt, cut: int) -> list[Cache]:
        """Caches of its own for a second borrower; none if what the first has added cannot be taken off."""
        excess = [added + cut for added in stored.excess()]
        if any(n < 0 for n in excess) or (any(excess) and not can_trim_prompt_cache(stored.caches)):
            self.misses["lent to another request"] += 1
            return []
        self.copies += 1
        caches = [share(cache) if shareable(cache) else copy.deepcopy(cache) for cache in stored.caches]
        _trim(caches, excess)
        return caches

    def _end_loans(self, model: Any) -> None:
        """Prompts whose borrower is gone are whole again, or are not stored any more."""
        for stored in self._prompts(model):
            if stored.loan is None or stored.loan.open:
                continue
            stored.loan = None
            excess = stored.excess()
            if any(n < 0 for n in excess) or (any(excess) and not can_trim_prompt_cache(stored.caches)):
                self._remove(stored)
            else:
                _trim(stored.caches, excess)

    # Limits

    def _enforce(self) -> None:
        self.trim_to(n_sequences=self.max_size)
        if self.nbytes > self.max_bytes:
            # A short prompt may be the last one in a slab that was made for a long conversation.
            for cache in (cache for queue in self._queues.values() for stored in queue for cache in stored.caches):
                compact(cache)
        self.trim_to(n_bytes=self.max_bytes)

    def _oldest(self) -> StoredPrompt:
        """The next one to go, as mlx-lm chooses: of a type only while there are not fewer of it than of the next."""
        queues = [self._queues[name] for name in TYPES]
        for queue, following in pairwise(queues):
            if queue and len(queue) >= len(following):
                return queue[0]
        return queues[-1][0]

    def _remove(self, stored: StoredPrompt) -> None:
        self._queues[stored.cache_type].remove(stored)
        prompts = self._by_model[stored.model]
        prompts.remove(stored)
        if not prompts:
            del self._by_model[stored.model]

    def _bytes_by_type(self) -> dict[str, int]:
        seen: set[int] = set()
        return {name: _new_bytes(self._queues[name], seen) for name in TYPES}


def _new_bytes(prompts: Iterable[StoredPrompt], seen: set[int]) -> int:
    total = 0
    for stored in prompts:
        for cache in stored.caches:
            for key, size in footprint(cache):
                if key not in seen:
                    seen.add(key)
                    total += size
    return total


def _trim(caches: list[Cache], counts: list[int]) -> None:
    for cache, count in zip(caches, counts, strict=True):
        if count:
            cache.trim(count)

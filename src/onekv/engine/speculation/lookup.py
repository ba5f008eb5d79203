"""Proposals by lookup: what followed the last tokens of a request where they occurred before.

    own      the request's prompt and answer, from its first proposal until `forget`; before them its prediction, if
             it has one, as it would follow the prompt
    shared   the tokens of ended requests with the same salt, and at startup those in a colder tier; one log per salt

A token of one salt is never proposed to another: no log has tokens of more than one salt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from ..request import Request
from .log import BREAK, WINDOW, Match, TokenLog, Tokens

# Tokens of one request that are known; 12 bytes each.
OWN_TOKENS = 1 << 17
# Maximum tokens per salt, apart from those of running requests, and maximum number of salts.
SHARED_TOKENS = 1 << 18
SALTS = 64
# What the logs of all salts take together at most.
SHARED_BYTES = 16 * 1024 * 1024
# Tokens before those that a request added: what came first after them is found, too.
CONTEXT = 8


class Earlier(Protocol):
    def take(self, salt: str) -> Sequence[Tokens]:
        """Parts of conversations under `salt`."""


class Lookup:
    """Used by one thread. Holds no request: what it knows of one ends with it at the latest."""

    def __init__(
        self,
        earlier: Earlier | None = None,
        own_tokens: int = OWN_TOKENS,
        shared_tokens: int = SHARED_TOKENS,
        salts: int = SALTS,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        """`earlier` has what colder tiers hold; it is asked once for each salt."""
        self._earlier, self._asked = earlier, set[str]()
        self._own_tokens = own_tokens
        self._own: WeakKeyDictionary[Request, TokenLog] = WeakKeyDictionary()
        self._learned: WeakSet[Request] = WeakSet()
        self._shared = Shared(shared_tokens, salts, shared_bytes)

    @property
    def nbytes(self) -> int:
        return sum(log.nbytes for log in self._own.values()) + self._shared.nbytes

    def propose(self, request: Request, limit: int) -> Match | None:
        """At most `limit` tokens that may come next: after the longest match, its own where another is no longer."""
        log = self._own.get(request)
        if log is None:
            log = self._own[request] = TokenLog(self._own_tokens)
        self._follow(request, log)
        suffix = log.tail()
        own = log.find(suffix, limit)
        if own is not None and own.length == WINDOW:
            return own
        self._ask(request.salt)
        shared = self._shared.find(request.salt, suffix, limit)
        if own is None or (shared is not None and shared.length > own.length):
            return shared
        return own

    def _ask(self, salt: str) -> None:
        if self._earlier is not None and salt not in self._asked:
            self._asked.add(salt)
            for tokens in self._earlier.take(salt):
                self.learn_tokens(salt, tokens)

    def _follow(self, request: Request, log: TokenLog) -> None:
        """What was added to the request since it was last looked at is added to its log."""
        start = 0
        if request.prediction:
            before = request.prompt[-CONTEXT:]
            start = len(before) + len(request.prediction) + 1
            if log.total < start:
                log.extend([*before, *request.prediction, BREAK])
        known = log.total - start - len(request.prompt)
        if known < 0:
            log.extend(request.prompt[log.total - start :])
            known = 0
        if len(request.tokens) - known == 1:
            log.append(request.tokens[-1])
        elif len(request.tokens) > known:
            log.extend(request.tokens[known:])

    def learn(self, request: Request) -> None:
        """A request has ended: what it added to what was cached is found by others of its salt. Once per request."""
        if request in self._learned:
            return
        self._learned.add(request)
        tokens = request.all_tokens
        if len(tokens) > request.cached_tokens:
            self.learn_tokens(request.salt, tokens[max(request.cached_tokens - CONTEXT, 0) :])

    def learn_tokens(self, salt: str, tokens: Sequence[int] | Tokens) -> None:
        """`tokens` were one conversation, or a part of one."""
        self._shared.add(salt, tokens)

    def forget(self, request: Request) -> None:
        """It gets no proposals any more."""
        self._own.pop(request, None)

    def clear(self) -> None:
        """Forget everything; a request that still runs is looked at anew."""
        self._own.clear()
        self._shared.clear()
        self._earlier = None


class Shared:
    """A log for each of the salts that were used last, within `most_bytes` in all."""

    def __init__(self, tokens: int, salts: int, most_bytes: int) -> None:
        while tokens > 1 and TokenLog.most_bytes(tokens) > most_bytes:
            # One log alone is within the bound.
            tokens //= 2
        self._tokens, self._salts, self._most_bytes = tokens, salts, most_bytes
        # The one used last is the last.
        self._logs: OrderedDict[str, TokenLog] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(log.nbytes for log in self._logs.values())

    def find(self, salt: str, suffix: bytes, limit: int) -> Match | None:
        log = self._logs.get(salt)
        if log is None:
            return None
        self._logs.move_to_end(salt)
        return log.find(suffix, limit)

    def add(self, salt: str, tokens: Sequence[int] | Tokens) -> None:
        if not len(tokens):
            return
        log = self._logs.get(salt)
        if log is None:
            log = self._logs[salt] = TokenLog(self._tokens)
        self._logs.move_to_end(salt)
        log.extend(tokens)
        log.append(BREAK)
        while len(self._logs) > self._salts or self.nbytes > self._most_bytes:
            self._logs.popitem(last=False)

    def clear(self) -> None:
        self._logs.clear()

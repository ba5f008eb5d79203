"""Which parts a store has: threads query it, and lookups are answered from what they found.

    find -> a Question, unless all of it is known -> asked in a thread -> answered, or late

Keys of a path are queried a few at a time, in order, until none of them is found: most of a prompt that nobody has seen
is never queried. Answers are valid for some seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..base import Address, Entry
from .common import REMEMBERED, Common, Recent, Threads, unforeseen
from .stores import Trouble

LOOKERS = 2
# Keys queried at a time: at first, then more.
FIRST, NEXT = 16, 120
# Seconds for which an answer is valid; seconds after which a late answer that was not asked for is dropped.
FRESH, FORGOTTEN = 5.0, 60.0


@dataclass(eq=False)
class Question:
    keys: tuple[bytes, ...]
    began: float
    ended: bool = False


class Lookups:
    def __init__(self, common: Common) -> None:
        self._common, self._setup = common, common.setup
        self._threads = Threads(common, LOOKERS, "onekv-remote-look")
        self._questions: dict[tuple[bytes, ...], Question] = {}
        # What is there of a node, if anything, and until when that is good.
        self._known: Recent[bytes, tuple[Entry | None, float]] = Recent(REMEMBERED)
        self._head = max(self._setup.sealer.head_size(image) for image in self._setup.images.values())
        # Without layers that read everything, a sequence may continue behind blocks that are not there.
        self._gaps = all(most is not None for most in self._setup.reads.values())

    def find(self, keys: Sequence[bytes], seconds: float) -> dict[bytes, Entry] | None:
        common, asked = self._common, tuple(keys)
        with common.lock:
            if common.closed or common.breaker.paused:
                return {}
            question = self._questions.get(asked)
            if question is None and not all(self._fresh(key) for key in asked):
                if common.too_short(len(asked) * self._setup.block_tokens):
                    common.counts.not_worth += 1
                    return {}
                question = self._questions[asked] = Question(asked, self._common.now())
                self._threads.do(lambda question=question: self._run(question))  # type: ignore[misc]
            if question is not None:
                until = question.began + common.limit(len(asked) * self._setup.block_tokens)
                patience = min(until, self._common.now() + seconds)
                common.wait(lambda: question.ended or common.breaker.paused, patience - self._common.now())
                if not (question.ended or common.breaker.paused) and self._common.now() < until:
                    return None
                # The answer of a thread that still waits for it is not used.
                self._questions.pop(asked, None)
                if not (question.ended or common.breaker.paused):
                    common.counts.late += 1
                    common.fail(f"a lookup took longer than {until - question.began:.2f} s")
                if common.breaker.paused:
                    return {}
            return self._worth(asked)

    def _fresh(self, key: bytes) -> bool:
        known = self._known.get(key)
        return known is not None and self._common.now() < known[1]

    def _worth(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """What is there, if reading it takes less than computing it. The lock is held."""
        now, found = self._common.now(), {}
        for key in keys:
            entry, _ = self._known.get(key, (None, 0.0))
            if entry is not None:
                parts = frozenset(part for part in entry.parts if self._common.gone.get((key, part), now) <= now)
                if parts:
                    found[key] = Entry(entry.address, parts)
        if found and not self._common.pace.worth(
            self._setup.bytes_of(len(found)), len(found) * self._setup.block_tokens
        ):
            self._common.counts.not_worth += 1
            return {}
        return found

    def address(self, key: bytes) -> Address | None:
        """Of a node that was found. The lock is held."""
        entry, _ = self._known.get(key, (None, 0.0))
        return entry.address if entry is not None else None

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """These, or all, have to be asked for again. The lock is held."""
        for key in list(self._known) if keys is None else keys:
            self._known.pop(key, None)

    def stop(self, seconds: float) -> None:
        self._threads.stop(seconds)

    # In a thread

    def _run(self, question: Question) -> None:
        problem = None
        try:
            self._ask(question.keys)
        except Trouble as trouble:
            problem = str(trouble)
        except Exception as error:  # noqa: BLE001
            # Nobody may wait forever for a thread that is gone.
            problem = unforeseen(error)
        common = self._common
        with common.lock:
            question.ended = True
            if problem is not None:
                self._questions.pop(question.keys, None)
                common.fail(problem)
            now = self._common.now()
            # The requests that asked for these are gone.
            for old in [each for each in self._questions.values() if each.ended and now - each.began > FORGOTTEN]:
                del self._questions[old.keys]
            common.changed.notify_all()

    def _ask(self, keys: Sequence[bytes]) -> None:
        first, size = 0, FIRST
        there = True
        while first < len(keys):
            some = keys[first : first + size]
            entries = self._entries(some) if there else [None] * len(some)
            there = self._gaps or any(entry is not None for entry in entries)
            until = self._common.now() + FRESH
            with self._common.lock:
                for key, entry in zip(some, entries, strict=True):
                    self._known.put(key, (entry, until))
            first, size = first + size, NEXT

    def _entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        setup, sealer = self._setup, self._setup.sealer
        parts = list(setup.images)
        names = [sealer.name(key, part) for key in keys for part in parts]
        began = self._common.now()
        heads = iter(setup.store.heads(names, self._head))
        with self._common.lock:
            self._common.pace.answered(self._common.now() - began)
        entries: list[Entry | None] = []
        for key in keys:
            found: dict[Address, set[int]] = {}
            for part in parts:
                head = next(heads)
                if head is not None:
                    address = sealer.address(head, setup.images[part])
                    if address is None or address.key != key:
                        self._common.is_wrong((key, part), "it does not begin like a block")
                    else:
                        found.setdefault(address, set()).add(part)
            # Two addresses for one key: one is wrong. What is read is verified, so either may be tried.
            best = max(found.items(), key=lambda each: len(each[1]), default=None)
            entries.append(Entry(best[0], frozenset(best[1])) if best is not None else None)
        return entries

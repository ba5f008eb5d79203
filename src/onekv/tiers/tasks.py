"""Tasks for the writer of a disk tier. A task knows how to run, and what to do when it is over.

    queued  ->  run    in the writer's thread, once; then `end`, whatever came of it
            ->  end    without having been run, if the tier has failed
            ->  drop   by a `Clear` that came after it

`run` may raise: the writer decides what that means for the tier. `end`, `join` and `drop` are called with the lock of
`Shared` held.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from threading import Event

from .index import WRITES
from .limited import LimitedStore
from .rows import Row
from .shared import NewPart, Shared


class Task(ABC):
    @abstractmethod
    def run(self, store: LimitedStore) -> None:
        """Do it."""

    @abstractmethod
    def end(self, shared: Shared) -> None:
        """It was done, or will not be."""

    def join(self, part: NewPart) -> bool:
        """Take a part along that is to be stored next; False if this task does not."""
        return False

    def drop(self, shared: Shared) -> bool:
        """All parts of the model are to go: whether there is nothing left to do, and what it had is given back."""
        return False


@dataclass(frozen=True)
class Write(Task):
    """Parts to be stored, together: their rows in one transaction, their files one after the other."""

    parts: list[NewPart]

    def run(self, store: LimitedStore) -> None:
        self._write(store, self.parts)

    def _write(self, store: LimitedStore, parts: list[NewPart]) -> None:
        there = store.index.rows(store.setup.model, [part.part for part in parts])
        for part, row in zip(parts, there, strict=True):
            part.stored = row is not None
        parts = [part for part in parts if not part.stored]
        if not parts:
            return
        problem: OSError | None = None
        may = False
        try:
            may = store.may_write(parts)
        except OSError as error:
            problem = error
        if may:
            store.put(parts)
        elif len(parts) > 1:
            # There is no room for all of them, but perhaps for some.
            for part in parts:
                self._write(store, [part])
        elif problem is not None:
            store.shared.refused(problem)
        elif store.overhead() + (size := parts[0].row.size) > (limit := store.setup.opened.limit):
            store.shared.once("limit", f"A block of {size} bytes does not fit the --disk-limit {limit}.")

    def end(self, shared: Shared) -> None:
        shared.counts.discarded += sum(not part.stored for part in self.parts)
        for part in self.parts:
            if shared.pending.get(part.part) is part:
                del shared.pending[part.part]
            shared.give_back(part)

    def join(self, part: NewPart) -> bool:
        if len(self.parts) == WRITES:
            return False
        self.parts.append(part)
        return True

    def drop(self, shared: Shared) -> bool:
        for part in self.parts:
            shared.give_back(part)
        return True


@dataclass(frozen=True)
class Remove(Task):
    """A part that was found damaged; another part of that name is left alone."""

    row: Row

    def run(self, store: LimitedStore) -> None:
        if store.index.row(self.row.name) == self.row:
            store.remove_if_allowed([(self.row.name, self.row.size)])

    def end(self, shared: Shared) -> None:
        shared.damaged.discard((self.row.name.key, self.row.name.part))


@dataclass(frozen=True)
class Drop(Task):
    """Parts that are no longer wanted, if they are there."""

    parts: list[tuple[bytes, int]]

    def run(self, store: LimitedStore) -> None:
        rows = store.index.rows(store.setup.model, self.parts)
        store.remove_if_allowed([(row.name, row.size) for row in rows if row is not None])

    def end(self, shared: Shared) -> None:
        shared.damaged.difference_update(self.parts)


@dataclass(frozen=True)
class Clear(Task):
    """All parts of the model are to go."""

    def run(self, store: LimitedStore) -> None:
        store.remove_if_allowed(store.index.of_model(store.setup.model))

    def end(self, shared: Shared) -> None:
        shared.clearing -= 1


@dataclass(frozen=True)
class Settle(Task):
    """Writes uses. Waiting for `reached` waits until everything before it is done."""

    reached: Event = field(default_factory=Event)

    def run(self, store: LimitedStore) -> None:
        store.write_uses()

    def end(self, shared: Shared) -> None:
        self.reached.set()

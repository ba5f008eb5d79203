"""What the writer of a disk tier is asked to do, and where."""

from dataclasses import dataclass
from threading import Event

from .folder import Folder
from .rows import Row, Use


@dataclass(frozen=True)
class Place:
    """Where the writer writes, and how much it may."""

    folder: Folder
    model: int
    hash: str
    block_tokens: int
    limit: int
    # Bytes per day (UTC), if there is a bound.
    budget: int | None
    # Whether there is a thread; else the caller's does a job when it is told to (`step`).
    threads: bool = True


@dataclass
class Write:
    """A part to be stored; `buffer` is what its file will be, until that is made."""

    row: Row
    buffer: memoryview | None
    use: Use
    # Whether the folder has it.
    stored: bool = False

    @property
    def part(self) -> tuple[bytes, int]:
        return self.row.name.key, self.row.name.part


@dataclass(frozen=True)
class Remove:
    """A part that was found damaged."""

    row: Row


@dataclass(frozen=True)
class Drop:
    """Parts that nobody wants any more, if they are there."""

    parts: list[tuple[bytes, int]]


@dataclass(frozen=True)
class Clear:
    """All parts of the model are to go."""


@dataclass(frozen=True)
class Barrier:
    """Someone waits until everything before it is done."""

    reached: Event


Task = Write | Remove | Drop | Clear | Barrier
# What is done at once.
Job = list[Write] | Remove | Drop | Clear | Barrier

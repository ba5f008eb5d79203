"""What the writer of a disk tier is asked to do."""

from dataclasses import dataclass
from threading import Event

from .base import Address
from .image import Image
from .index import Row, Use


@dataclass
class Write:
    """A part to be stored; `buffer` is its file, all but the header, until that is made."""

    address: Address
    part: int
    image: Image
    buffer: memoryview | None
    use: Use


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

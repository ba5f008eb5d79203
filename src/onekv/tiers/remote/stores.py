"""The interface of a store: values by name, put if absent. Several threads call it at once, never the engine's.

Every method may take as long as the timeouts that the store was opened with, and raises only `Trouble`.
"""

from collections.abc import Sequence
from typing import Protocol


class Trouble(Exception):
    """The store could not be reached, or failed."""

    def __init__(self, text: str, refused: bool = False) -> None:
        """`refused`: it responds, but this was not permitted, or there was no room for it."""
        super().__init__(text)
        self.refused = refused


class Store(Protocol):
    def heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        """The first `size` bytes of each value, in few round trips; None where there is none."""

    def get(self, name: str, size: int) -> memoryview | None:
        """A value, and no more than its first `size` bytes; None if there is none."""

    def put(self, name: str, value: memoryview) -> bool:
        """Store a value, unless there is one: then False."""

    def delete(self, name: str) -> None:
        """Remove a value, if there is one."""

    def close(self) -> None:
        """Close connections."""

"""Rows of the index. Nothing in them is trusted before it is validated: here, and nowhere else.

The index is a file that may be damaged, and SQLite returns whatever its cells hold: NULL, text where a number belongs,
a number of any size. A value that this tier would never write raises IndexDamaged.
"""

import sqlite3
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from .base import STATES, Address
from .image import KEY_BYTES, TOKEN_BYTES

# Bytes, and uses on the clock: sums and successors of such numbers are still numbers of SQLite.
MOST = 2**53
MOST_PARTS = 2**16
MOST_TOKENS = 2**16
HASH_DIGITS = 32
CHECKSUM_BYTES = 16


class IndexDamaged(sqlite3.DatabaseError):
    """The file is a database, but not this index, not of this version, or with rows that this tier does not write."""


class Status(IntEnum):
    WRITING = 0
    READY = 1
    LEAVING = 2


class Name(NamedTuple):
    """A part of any model."""

    model: int
    key: bytes
    part: int


@dataclass(frozen=True)
class Row:
    """A part that is there."""

    name: Name
    address: Address
    size: int
    checksum: bytes


@dataclass(frozen=True)
class Use:
    """When a part was used: on the clock, and in seconds since 1970."""

    clock: int
    at: float


@dataclass(frozen=True)
class NewRow:
    """A part to be stored. `partial`: it has fewer tokens than a block."""

    row: Row
    partial: bool
    use: Use


@dataclass(frozen=True)
class Totals:
    """Of all models: parts that are groups' blocks, bytes of all parts, and the clock."""

    blocks: int
    bytes: int
    clock: int


@dataclass(frozen=True)
class ModelUse:
    """What a folder has of one model. Times are seconds since 1970, None if there is nothing."""

    id: int
    name: str
    hash: str
    # Nodes of which there is something, and how many parts they have here.
    blocks: int
    parts: int
    bytes: int
    # When the oldest part was stored, and when one was last used.
    created: float | None
    used: float | None


def whole(value: object, least: int = 0, most: int = MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _damaged(value, "a number")
    return value


def blob(value: object, least: int, most: int) -> bytes:
    if type(value) is not bytes or not least <= len(value) <= most:
        raise _damaged(value, "bytes")
    return value


def text(value: object) -> str:
    if type(value) is not str:
        raise _damaged(value, "text")
    return value


def time(value: object) -> float:
    if type(value) is not float or not 0 <= value <= MOST:
        raise _damaged(value, "a time")
    return value


def model_hash(value: object) -> str:
    """It becomes part of a path."""
    if len(name := text(value)) != HASH_DIGITS or name.strip("0123456789abcdef"):
        raise _damaged(value, "the hash of a model")
    return name


def name(model: object, key: object, part: object) -> Name:
    return Name(whole(model, 1), blob(key, 1, KEY_BYTES), whole(part, STATES, MOST_PARTS))


def address(key: object, parent: object, start: object, tokens: object) -> Address:
    content = blob(tokens, TOKEN_BYTES, MOST_TOKENS * TOKEN_BYTES)
    if len(content) % TOKEN_BYTES:
        raise _damaged(tokens, "tokens")
    return Address(blob(key, 1, KEY_BYTES), blob(parent, 0, KEY_BYTES), whole(start), content)


def row(model: object, key: object, part: object, *more: object) -> Row:
    """`more`: parent, start, tokens, size and checksum."""
    parent, start, tokens, size, checksum = more
    where = address(key, parent, start, tokens)
    return Row(name(model, key, part), where, whole(size, 1), blob(checksum, CHECKSUM_BYTES, CHECKSUM_BYTES))


def _damaged(value: object, meant: str) -> IndexDamaged:
    return IndexDamaged(f"a row has {repr(value)[:40]} in place of {meant}")

"""Turns that a server remembers (`server/turns.py`), in one file of the disk cache's folder for each model.

    <key, 32 bytes> <length, 4> <token ids> <checksum, 8>      one after the other, the most recent last

A record is appended when a turn has been generated; when the file is twice as large as what is still remembered, it is
rewritten and renamed. A kill leaves at most half a record: reading ends where the checksum does not match, and
everything before that is sound. The folder's lock keeps other processes away. Turns that cannot be written do not
survive a restart, which is logged once; it is a cache.
"""

import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

log = logging.getLogger("onekv.disk")

KEY = 32
_LENGTH = struct.Struct("<I")
_CHECKSUM = 8
# The approximate memory of a turn in addition to its ids: its key, and its entry in a table.
OVERHEAD = 256
# A file up to this size is never rewritten.
LEAST = 1 << 20


class TurnsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        # Whether the disk has taken everything so far.
        self._works = True

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and ids; of those that come twice the last counts."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._give_up(error)
            return
        for key, ids in _records(data):
            self._size += len(_record(key, ids))
            yield key, ids
        if lost := len(data) - self._size:
            log.warning("%s: the last %d bytes cannot be read and are dropped", self._path.name, lost)
            self._try(lambda: os.truncate(self._path, self._size))

    def add(self, key: bytes, ids: bytes) -> None:
        record = _record(key, ids)
        self._size += len(record)
        self._try(lambda: self._append(record))

    def is_long(self, remembered: int) -> bool:
        """Whether it is much larger than the bytes that are still remembered."""
        return self._size > 2 * max(remembered, LEAST)

    def write(self, turns: Iterable[tuple[bytes, bytes]]) -> None:
        """Only `turns`, from now on."""
        data = b"".join(_record(key, ids) for key, ids in turns)
        self._size = len(data)
        self._try(lambda: self._replace(data))

    def _append(self, record: bytes) -> None:
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb") as file:
            file.write(record)

    def _replace(self, data: bytes) -> None:
        temporary = self._path.with_name(self._path.name + ".tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, self._path)

    def _try(self, change: Callable[[], None]) -> None:
        if self._works:
            try:
                change()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._works = False
        log.warning("turns are not kept across restarts: %s (%s)", self._path.name, error.strerror)


def _record(key: bytes, ids: bytes) -> bytes:
    head = key + _LENGTH.pack(len(ids)) + ids
    return head + xxhash.xxh3_64_digest(head)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """As long as they are sound."""
    start = 0
    while start + KEY + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, start + KEY)
        end = start + KEY + _LENGTH.size + length
        if xxhash.xxh3_64_digest(data[start:end]) != data[end : end + _CHECKSUM]:
            return
        yield data[start : start + KEY], data[start + KEY + _LENGTH.size : end]
        start = end + _CHECKSUM

"""The index of the disk tier: one SQLite database for all models of a folder.

A part's row has one of three states, each committed before the next thing happens on disk:

    WRITING  (row)  -> file made under a temporary name -> renamed ->  READY  (row)
    READY           ->  LEAVING  (row)  -> file removed -> row deleted

So a kill at any instant leaves files only where a row says WRITING or LEAVING, and the next open removes those without
looking at any other file. The database is in WAL mode with synchronous=NORMAL: nothing is flushed to disk per block.
After a power cut a row may promise a file that did not get there; the checksum in the row tells.

`used` is a clock that goes on over restarts: the least is evicted first.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from .base import Address
from .files import FILES, Files

SCHEMA = 1
PAGE = 4096
# The write-ahead log goes back into the database after this many pages.
CHECKPOINT_PAGES = 256
# Rows that one transaction changes at most: it bounds what one adds to the log.
BATCH = 32
# Parts that are written together: one transaction before their files are made, and one after.
WRITES = 8
# Later than any use.
LATEST = 2**63 - 1
# Names in one query.
_QUERY = 500

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE models (id INTEGER PRIMARY KEY, hash TEXT UNIQUE, fingerprint TEXT, name TEXT, created REAL);
CREATE TABLE parts (
    model INTEGER, key BLOB, part INTEGER, parent BLOB, start INTEGER, tokens BLOB, partial INTEGER,
    size INTEGER, checksum BLOB, state INTEGER, used INTEGER, used_at REAL, created REAL,
    PRIMARY KEY (model, key, part)
) WITHOUT ROWID;
CREATE INDEX by_use ON parts (used, state, part, size);
CREATE INDEX by_parent ON parts (model, parent) WHERE partial;
CREATE INDEX unsettled ON parts (state) WHERE state <> 1;
CREATE TABLE written (day TEXT PRIMARY KEY, bytes INTEGER) WITHOUT ROWID;
"""


class State(IntEnum):
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
    """A part to be stored. `partial`: it has less tokens than a block."""

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


class IndexDamaged(sqlite3.DatabaseError):
    """The file is a database, but not this index or not of this version."""


class DiskIndex:
    """One connection, for one thread."""

    def __init__(self, path: Path, any_thread: bool = False, read_only: bool = False) -> None:
        """Open what is there. With `any_thread` the caller sees to it that threads use it one at a time.

        Raises sqlite3.OperationalError if it cannot be opened, another sqlite3.DatabaseError if it is not our index.
        """
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=not any_thread)
        try:
            self._prepare()
        except sqlite3.Error:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA temp_store = MEMORY")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        self._db.execute(f"PRAGMA journal_size_limit = {CHECKPOINT_PAGES * PAGE * 2}")
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            raise IndexDamaged("it has no tables")
        row = self._db.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        if row is None or row[0] != str(SCHEMA):
            raise IndexDamaged(f"it is of version {row and row[0]}, not {SCHEMA}")

    @staticmethod
    def create(path: Path, files: Files = FILES) -> None:
        """A new index, there as a whole or not at all."""
        new = path.with_name(path.name + ".tmp")
        for ending in ("", "-journal", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                files.unlink(new.with_name(new.name + ending))
        db = sqlite3.connect(new, isolation_level=None)
        try:
            files.chmod(new, 0o600)
            db.execute(f"PRAGMA page_size = {PAGE}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                for statement in filter(str.strip, _TABLES.split(";")):
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
        finally:
            db.close()
        files.rename(new, path)

    def close(self) -> None:
        self._db.close()

    def checkpoint(self) -> None:
        """Everything into the database itself; the log is empty after it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def shrink(self) -> None:
        """Give pages that are not used back to the file system."""
        self._db.execute("PRAGMA incremental_vacuum").fetchall()
        self.checkpoint()

    def nbytes(self) -> int:
        """What the database takes once the log is in it."""
        return int(self._db.execute("PRAGMA page_count").fetchone()[0]) * PAGE

    # Models

    def model(self, hash: str, fingerprint: str, name: str, now: float) -> int:
        """The number of a model; it is added if it is new."""
        self._db.execute(
            "INSERT INTO models (hash, fingerprint, name, created) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (hash) DO UPDATE SET name = excluded.name WHERE name <> excluded.name",
            (hash, fingerprint, name, now),
        )
        return int(self._db.execute("SELECT id FROM models WHERE hash = ?", (hash,)).fetchone()[0])

    def hashes(self) -> dict[int, str]:
        """The folders of all models."""
        return dict(self._db.execute("SELECT id, hash FROM models").fetchall())

    def remove_models(self, models: Iterable[int]) -> None:
        self._db.executemany("DELETE FROM models WHERE id = ?", [(model,) for model in models])

    def uses(self) -> list[ModelUse]:
        """What there is of each model, the one used last first."""
        rows = self._db.execute(
            "SELECT id, name, hash, count(DISTINCT key), count(key), ifnull(sum(size), 0),"
            " min(parts.created), max(used_at)"
            " FROM models LEFT JOIN parts ON model = id AND state = 1 GROUP BY id ORDER BY max(used_at) DESC"
        ).fetchall()
        return [ModelUse(*row) for row in rows]

    # Questions

    def find(self, model: int, keys: Sequence[bytes]) -> Iterator[tuple[Address, int]]:
        """The parts of these nodes that are ready."""
        remaining = iter(dict.fromkeys(keys))
        while some := list(islice(remaining, _QUERY)):
            marks = ",".join("?" * len(some))
            rows = self._db.execute(
                "SELECT key, parent, start, tokens, part FROM parts"
                f" WHERE model = ? AND key IN ({marks}) AND state = 1",
                (model, *some),
            ).fetchall()
            yield from ((Address(*row[:4]), row[4]) for row in rows)

    def tails(self, model: int, parent: bytes) -> list[tuple[Address, int]]:
        """The parts of partial blocks that follow `parent` and are ready."""
        rows = self._db.execute(
            "SELECT key, parent, start, tokens, part FROM parts INDEXED BY by_parent"
            " WHERE model = ? AND parent = ? AND partial AND state = 1 ORDER BY used DESC",
            (model, parent),
        ).fetchall()
        return [(Address(*row[:4]), row[4]) for row in rows]

    def ready(self, name: Name) -> bool:
        found = self._db.execute("SELECT state FROM parts WHERE model = ? AND key = ? AND part = ?", name).fetchone()
        return found is not None and found[0] == State.READY

    def row(self, name: Name) -> Row | None:
        """What is known of a part that is ready."""
        return self.rows(name.model, [(name.key, name.part)])[0]

    def rows(self, model: int, parts: Sequence[tuple[bytes, int]]) -> list[Row | None]:
        """What is known of parts, of those that are ready."""
        found: dict[tuple[bytes, int], Row] = {}
        remaining = iter(dict.fromkeys(key for key, _ in parts))
        while some := list(islice(remaining, _QUERY)):
            rows = self._db.execute(
                "SELECT key, parent, start, tokens, part, size, checksum FROM parts"
                f" WHERE model = ? AND key IN ({','.join('?' * len(some))}) AND state = 1",
                (model, *some),
            ).fetchall()
            for key, parent, start, tokens, part, size, checksum in rows:
                found[key, part] = Row(Name(model, key, part), Address(key, parent, start, tokens), size, checksum)
        return [found.get(part) for part in parts]

    def oldest(self, count: int, before: int = LATEST) -> list[tuple[Name, int]]:
        """The parts that were not used for longest, and not since `before`, and their sizes."""
        rows = self._db.execute(
            "SELECT model, key, part, size FROM parts WHERE state = 1 AND used < ? ORDER BY used LIMIT ?",
            (before, count),
        ).fetchall()
        return [(Name(*row[:3]), row[3]) for row in rows]

    def unsettled(self) -> list[tuple[Name, int]]:
        """Parts that were being written or removed when the process was killed."""
        rows = self._db.execute(
            "SELECT model, key, part, size FROM parts INDEXED BY unsettled WHERE state <> 1"
        ).fetchall()
        return [(Name(*row[:3]), row[3]) for row in rows]

    def of_model(self, model: int) -> list[tuple[Name, int]]:
        rows = self._db.execute("SELECT model, key, part, size FROM parts WHERE model = ?", (model,)).fetchall()
        return [(Name(*row[:3]), row[3]) for row in rows]

    def totals(self) -> Totals:
        blocks, size = self._db.execute(
            "SELECT sum(part >= 0), sum(size) FROM parts INDEXED BY by_use WHERE state = 1"
        ).fetchone()
        clock = self._db.execute("SELECT max(used) FROM parts").fetchone()[0]
        return Totals(blocks or 0, size or 0, clock or 0)

    def written(self, day: str) -> int:
        """Bytes that were written on that day."""
        row = self._db.execute("SELECT bytes FROM written WHERE day = ?", (day,)).fetchone()
        return int(row[0]) if row is not None else 0

    # Changes, by one thread alone

    def begin(self, new: Sequence[NewRow]) -> None:
        """Files will be made."""
        rows = []
        for each in new:
            row, node, use = each.row, each.row.address, each.use
            about = (node.parent, node.start, node.tokens, each.partial, row.size, row.checksum)
            rows.append((*row.name, *about, State.WRITING, use.clock, use.at, use.at))
        self._change("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def finish(self, rows: Sequence[Row], day: str) -> None:
        """The files are there under their names."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "UPDATE parts SET state = 1 WHERE model = ? AND key = ? AND part = ?", [row.name for row in rows]
            )
            self._db.execute(
                "INSERT INTO written VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET bytes = bytes + excluded.bytes",
                (day, sum(row.size for row in rows)),
            )

    def leave(self, names: Sequence[Name]) -> None:
        """Their files will be removed."""
        self._change("UPDATE parts SET state = 2 WHERE model = ? AND key = ? AND part = ?", names)

    def stay(self, names: Sequence[Name]) -> None:
        """Their files could not be removed."""
        self._change("UPDATE parts SET state = 1 WHERE model = ? AND key = ? AND part = ?", names)

    def forget(self, names: Sequence[Name]) -> None:
        """Their files are removed."""
        self._change("DELETE FROM parts WHERE model = ? AND key = ? AND part = ?", names)

    def touch(self, model: int, uses: Sequence[tuple[bytes, Use]]) -> None:
        self._change(
            "UPDATE parts SET used = max(used, ?), used_at = max(used_at, ?) WHERE model = ? AND key = ?",
            [(use.clock, use.at, model, key) for key, use in uses],
        )

    def _change(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        for start in range(0, len(rows), BATCH):
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(statement, rows[start : start + BATCH])

"""The index of the disk tier: one SQLite database for all models of a folder.

A part's row has one of three statuses, each committed before the next thing happens on disk:

    WRITING  (row)  -> file made under a temporary name -> renamed ->  READY  (row)
    READY           ->  LEAVING  (row)  -> file removed -> row deleted

So a kill at any instant leaves files only where a row says WRITING or LEAVING, and the next open removes those. The
database is in WAL mode with synchronous=NORMAL: nothing is flushed to disk per block. After a power failure a row may
refer to a file that was not written, which its checksum detects; or the last changes are lost, and a file has no row.
So an index that was not closed (`close_use`) is compared with the folder; otherwise it is opened without that.

`used` is a clock that continues across restarts: the lowest is evicted first.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from . import rows as read
from .base import Address
from .rows import IndexDamaged, ModelUse, Name, NewRow, Row, Status, Totals, Use
from .schema import PAGE, SCHEMA, tables

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
Each = TypeVar("Each")


class DiskIndex:
    """One connection, for one thread."""

    def __init__(self, path: Path, any_thread: bool = False, read_only: bool = False) -> None:
        """Open an existing index. With `any_thread`, the caller ensures that only one thread uses it at a time.

        Raises sqlite3.OperationalError if it cannot be opened, another sqlite3.DatabaseError if it is not our index.
        """
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=not any_thread)
        # Bytes that are no text are damage, too, and not an error of another type.
        self._db.text_factory = lambda data: data.decode("utf-8", "replace")
        try:
            self._prepare()
        except sqlite3.Error:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._ask("PRAGMA synchronous = NORMAL")
        self._ask("PRAGMA temp_store = MEMORY")
        self._ask("PRAGMA trusted_schema = OFF")
        self._ask("PRAGMA cell_size_check = ON")
        self._ask(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        self._ask(f"PRAGMA journal_size_limit = {CHECKPOINT_PAGES * PAGE * 2}")
        if not self._ask("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
            raise IndexDamaged("it has no tables")
        version = self._ask("SELECT value FROM meta WHERE name = 'schema'")
        if version != [(str(SCHEMA),)]:
            raise IndexDamaged(f"its version is {version[0][0] if version else None}, not {SCHEMA}")
        if set(self._ask("SELECT type, name, sql FROM sqlite_master")) != tables():
            raise IndexDamaged("its tables are not those of its version")
        if self._ask("PRAGMA journal_mode") != [("wal",)] or self._ask("PRAGMA page_size") != [(PAGE,)]:
            raise IndexDamaged("it is a database of another kind")

    def check(self) -> None:
        """Checks that the rows add up. Raises sqlite3.DatabaseError. Other damage is detected when it is read."""
        self._ask("BEGIN")
        try:
            counted = self._ask("SELECT parts, bytes FROM total")
            for rows in ("parts INDEXED BY by_use", "parts NOT INDEXED"):
                if self._ask(f"SELECT count(*), ifnull(sum(size), 0) FROM {rows}") != counted:
                    raise IndexDamaged("its rows do not match its counts")
            self.hashes()
            self.totals()
        finally:
            # SQLite has ended it itself after some errors.
            with suppress(sqlite3.Error):
                self._ask("ROLLBACK")

    def _ask(self, question: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
        with _understood():
            return self._db.execute(question, values).fetchall()

    def _first(self, question: str, values: Sequence[object] = ()) -> tuple[object, ...]:
        if rows := self._ask(question, values):
            return rows[0]
        raise IndexDamaged("a row is missing")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _understood(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db

    def close(self) -> None:
        self._db.close()

    def checkpoint(self) -> None:
        """Write the log back into the database; the log is empty afterwards."""
        self._ask("PRAGMA wal_checkpoint(TRUNCATE)")

    def shrink(self) -> None:
        """Return unused pages to the file system."""
        self._ask("PRAGMA incremental_vacuum")
        self.checkpoint()

    def open_use(self) -> bool:
        """The folder will be changed, until `close_use`; returns whether the previous user got that far."""
        closed = not self._ask("SELECT value FROM meta WHERE name = 'open'")
        self._ask("INSERT OR REPLACE INTO meta VALUES ('open', 'yes')")
        # Into the database itself: the log may be lost.
        self.checkpoint()
        return closed

    def close_use(self) -> None:
        self._ask("DELETE FROM meta WHERE name = 'open'")
        self.checkpoint()

    def nbytes(self) -> int:
        """What the database takes once the log is in it."""
        return read.whole(self._first("PRAGMA page_count")[0]) * PAGE

    # Models

    def model(self, hash: str, fingerprint: str, name: str, now: float) -> int:
        """The number of a model; it is added if it is new."""
        self._ask(
            "INSERT INTO models (hash, fingerprint, name, created) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (hash) DO UPDATE SET name = excluded.name WHERE name <> excluded.name",
            (hash, fingerprint, name, now),
        )
        return read.whole(self._first("SELECT id FROM models WHERE hash = ?", (hash,))[0], 1)

    def hashes(self) -> dict[int, str]:
        """The folders of all models."""
        rows = self._ask("SELECT id, hash FROM models")
        return {read.whole(id, 1): read.model_hash(hash) for id, hash in rows}

    def remove_models(self, models: Iterable[int]) -> None:
        with self._transaction() as db:
            db.executemany("DELETE FROM models WHERE id = ?", [(model,) for model in models])

    def uses(self) -> list[ModelUse]:
        """What there is of each model, the one used last first."""
        rows = self._ask(
            "SELECT id, name, hash, count(DISTINCT key), count(key), ifnull(sum(size), 0),"
            " min(parts.created), max(used_at)"
            " FROM models LEFT JOIN parts ON model = id AND state = 1 GROUP BY id ORDER BY max(used_at) DESC"
        )
        return [
            ModelUse(
                read.whole(id, 1),
                read.text(name),
                read.model_hash(hash),
                *map(read.whole, (blocks, parts, size)),
                *(None if at is None else read.time(at) for at in (created, used)),
            )
            for id, name, hash, blocks, parts, size, created, used in rows
        ]

    # Questions

    def find(self, model: int, keys: Sequence[bytes]) -> Iterator[tuple[Address, int]]:
        """The parts of these nodes that are ready."""
        for row in self._of("key, parent, start, tokens, part", model, keys):
            yield read.address(*row[:4]), read.name(model, row[0], row[4]).part

    def tails(self, model: int, parent: bytes) -> list[tuple[Address, int]]:
        """The parts of partial blocks that follow `parent` and are ready."""
        rows = self._ask(
            "SELECT key, parent, start, tokens, part FROM parts INDEXED BY by_parent"
            " WHERE model = ? AND parent = ? AND partial AND state = 1 ORDER BY used DESC",
            (model, parent),
        )
        return [(read.address(*row[:4]), read.name(model, row[0], row[4]).part) for row in rows]

    def recent(self, model: int, count: int) -> list[Address]:
        """The nodes of the parts that were used last, the last one first, of `count` parts that are ready."""
        # `by_use` alone determines which they are: rows of other models are not looked up.
        rows = self._ask(
            "SELECT key, parent, start, tokens FROM"
            " (SELECT model, key, part, used AS last FROM parts INDEXED BY by_use"
            " WHERE state = 1 AND model = ? ORDER BY used DESC LIMIT ?)"
            " JOIN parts USING (model, key, part) ORDER BY last DESC",
            (model, count),
        )
        return list(dict.fromkeys(read.address(*row) for row in rows))

    def _of(self, columns: str, model: int, keys: Iterable[bytes]) -> Iterator[tuple[object, ...]]:
        """The rows of these nodes that are ready."""
        remaining = iter(dict.fromkeys(keys))
        while some := list(islice(remaining, _QUERY)):
            marks = ",".join("?" * len(some))
            where = f"WHERE model = ? AND key IN ({marks}) AND state = 1"
            yield from self._ask(f"SELECT {columns} FROM parts {where}", (model, *some))

    def status(self, name: Name) -> Status | None:
        """None if there is no such part."""
        for row in self._ask("SELECT state FROM parts WHERE model = ? AND key = ? AND part = ?", name):
            return Status(read.whole(row[0], 0, max(Status)))
        return None

    def row(self, name: Name) -> Row | None:
        """What is known of a part that is ready."""
        return self.rows(name.model, [(name.key, name.part)])[0]

    def rows(self, model: int, parts: Sequence[tuple[bytes, int]]) -> list[Row | None]:
        """What is known of parts, of those that are ready."""
        found: dict[tuple[bytes, int], Row] = {}
        for key, part, *more in self._of("key, part, parent, start, tokens, size, checksum", model, dict(parts)):
            row = read.row(model, key, part, *more)
            found[row.name.key, row.name.part] = row
        return [found.get(part) for part in parts]

    def oldest(self, count: int, before: int = LATEST, without: Sequence[int] = ()) -> list[tuple[Name, int]]:
        """The parts that were not used for longest, and not since `before`, and their sizes; none of some models."""
        marks = ",".join("?" * len(without))
        which = f"state = 1 AND used < ? AND model NOT IN ({marks}) ORDER BY used LIMIT ?"
        return self._names(which, (before, *without, count))

    def shares(self) -> list[tuple[int, int, float]]:
        """What there is of each model: its number, bytes, and when it was used last."""
        rows = self._ask("SELECT model, sum(size), max(used_at) FROM parts WHERE state = 1 GROUP BY model")
        return [(read.whole(model, 1), read.whole(size), read.time(used)) for model, size, used in rows]

    def unsettled(self) -> list[tuple[Name, int]]:
        """Parts that were being written or removed when the process was killed."""
        return self._names("state <> 1", index="unsettled")

    def of_model(self, model: int) -> list[tuple[Name, int]]:
        return self._names("model = ?", (model,))

    def _names(self, which: str, values: Sequence[object] = (), index: str | None = None) -> list[tuple[Name, int]]:
        """The names and sizes of some parts."""
        table = f"parts INDEXED BY {index}" if index else "parts"
        rows = self._ask(f"SELECT model, key, part, size FROM {table} WHERE {which}", values)
        return [(read.name(*row[:3]), read.whole(row[3], 1)) for row in rows]

    def totals(self) -> Totals:
        blocks, size = self._first(
            "SELECT ifnull(sum(part >= 0), 0), ifnull(sum(size), 0) FROM parts INDEXED BY by_use WHERE state = 1"
        )
        (clock,) = self._first("SELECT ifnull(max(used), 0) FROM parts")
        return Totals(read.whole(blocks), read.whole(size), read.whole(clock))

    def written(self, day: str) -> int:
        """Bytes that were written on that day."""
        for row in self._ask("SELECT bytes FROM written WHERE day = ?", (day,)):
            return read.whole(row[0])
        return 0

    # Changes, by one thread alone

    def begin(self, new: Sequence[NewRow]) -> None:
        """Files will be made."""
        rows = []
        for each in new:
            row, node, use = each.row, each.row.address, each.use
            about = (node.parent, node.start, node.tokens, each.partial, row.size, row.checksum)
            rows.append((*row.name, *about, Status.WRITING, use.clock, use.at, use.at))
        for some in _batches(rows):
            with self._transaction() as db:
                self._delete(db, [(row[0], row[1], row[2]) for row in some])
                db.executemany("INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", some)
                self._count(db, len(some), sum(row[7] for row in some))

    def finish(self, rows: Sequence[Row], day: str) -> None:
        """The files are there under their names."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE parts SET state = 1 WHERE model = ? AND key = ? AND part = ?", [row.name for row in rows]
            )
            db.execute(
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
        for some in _batches(names):
            with self._transaction() as db:
                self._delete(db, some)

    def touch(self, model: int, uses: Sequence[tuple[bytes, Use]]) -> None:
        self._change(
            "UPDATE parts SET used = max(used, ?), used_at = max(used_at, ?) WHERE model = ? AND key = ?",
            [(use.clock, use.at, model, key) for key, use in uses],
        )

    def _change(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        for some in _batches(rows):
            with self._transaction() as db:
                db.executemany(statement, some)

    def _delete(self, db: sqlite3.Connection, names: Sequence[tuple[object, ...]]) -> None:
        """Those of the rows that are there."""
        parts = size = 0
        for name in names:
            for row in self._ask("SELECT size FROM parts WHERE model = ? AND key = ? AND part = ?", name):
                parts, size = parts + 1, size + read.whole(row[0], 1)
                db.execute("DELETE FROM parts WHERE model = ? AND key = ? AND part = ?", name)
        if parts:
            self._count(db, -parts, -size)

    def _count(self, db: sqlite3.Connection, parts: int, size: int) -> None:
        db.execute("UPDATE total SET parts = parts + ?, bytes = bytes + ?", (parts, size))


def _batches(rows: Sequence[Each]) -> Iterator[Sequence[Each]]:
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]


@contextmanager
def _understood() -> Iterator[None]:
    """Damage that is reported as something else: a message that is not text, a length beyond all memory, or statements
    that do not fit the tables, since the statements are right.
    """
    try:
        yield
    except (UnicodeDecodeError, MemoryError) as error:
        raise IndexDamaged(f"{type(error).__name__}: {error}") from error
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR:
            raise
        raise IndexDamaged(str(error)) from error

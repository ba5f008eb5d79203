"""The tables of the disk tier's index, and a new index with them. What they mean: see `index`."""

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from .base import STATES
from .files import FILES, Files
from .image import KEY_BYTES
from .rows import CHECKSUM_BYTES, HASH_DIGITS, MOST, MOST_PARTS

SCHEMA = 2
PAGE = 4096

# The column `state` is a row's status: under another name, old folders would be of another version, and emptied.
# `total` counts what `parts` holds a second time, in the same transactions: rows that were changed or lost behind the
# tier's back do not add up to it.
_TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE models (
    id INTEGER PRIMARY KEY CHECK (id > 0),
    hash TEXT NOT NULL UNIQUE CHECK (typeof(hash) = 'text' AND length(hash) = {HASH_DIGITS}),
    fingerprint TEXT NOT NULL CHECK (typeof(fingerprint) = 'text'), name TEXT NOT NULL CHECK (typeof(name) = 'text'),
    created REAL NOT NULL CHECK (typeof(created) = 'real')
);
CREATE TABLE parts (
    model INTEGER NOT NULL CHECK (typeof(model) = 'integer' AND model > 0),
    key BLOB NOT NULL CHECK (typeof(key) = 'blob' AND length(key) BETWEEN 1 AND {KEY_BYTES}),
    part INTEGER NOT NULL CHECK (typeof(part) = 'integer' AND part BETWEEN {STATES} AND {MOST_PARTS}),
    parent BLOB NOT NULL CHECK (typeof(parent) = 'blob' AND length(parent) <= {KEY_BYTES}),
    start INTEGER NOT NULL CHECK (typeof(start) = 'integer' AND start BETWEEN 0 AND {MOST}),
    tokens BLOB NOT NULL CHECK (typeof(tokens) = 'blob'),
    partial INTEGER NOT NULL CHECK (partial IN (0, 1)),
    size INTEGER NOT NULL CHECK (typeof(size) = 'integer' AND size BETWEEN 1 AND {MOST}),
    checksum BLOB NOT NULL CHECK (typeof(checksum) = 'blob' AND length(checksum) = {CHECKSUM_BYTES}),
    state INTEGER NOT NULL CHECK (state IN (0, 1, 2)),
    used INTEGER NOT NULL CHECK (typeof(used) = 'integer' AND used BETWEEN 0 AND {MOST}),
    used_at REAL NOT NULL CHECK (typeof(used_at) = 'real'), created REAL NOT NULL CHECK (typeof(created) = 'real'),
    PRIMARY KEY (model, key, part)
) WITHOUT ROWID;
CREATE INDEX by_use ON parts (used, state, part, size);
CREATE INDEX by_parent ON parts (model, parent) WHERE partial;
CREATE INDEX unsettled ON parts (state) WHERE state <> 1;
CREATE TABLE written (
    day TEXT PRIMARY KEY NOT NULL, bytes INTEGER NOT NULL CHECK (typeof(bytes) = 'integer' AND bytes >= 0)
) WITHOUT ROWID;
CREATE TABLE total (
    id INTEGER PRIMARY KEY CHECK (id = 1), parts INTEGER NOT NULL CHECK (typeof(parts) = 'integer' AND parts >= 0),
    bytes INTEGER NOT NULL CHECK (typeof(bytes) = 'integer' AND bytes >= 0)
);
"""


def create(path: Path, files: Files = FILES, ready: Callable[[], None] = lambda: None) -> None:
    """A new index, there as a whole or not at all. `ready` is called before it takes the place of an old one."""
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
            _make_tables(db)
            db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
            db.execute("INSERT INTO total VALUES (1, 0, 0)")
    finally:
        db.close()
    ready()
    files.rename(new, path)


@cache
def tables() -> set[tuple[object, ...]]:
    """What a new index has in its table of tables."""
    db = sqlite3.connect(":memory:")
    _make_tables(db)
    try:
        return set(db.execute("SELECT type, name, sql FROM sqlite_master").fetchall())
    finally:
        db.close()


def _make_tables(db: sqlite3.Connection) -> None:
    for statement in filter(str.strip, _TABLES.split(";")):
        db.execute(statement)

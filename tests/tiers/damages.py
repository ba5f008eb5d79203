"""Ways to damage a disk cache: each changes a folder, with what it needs to choose."""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from disk_parts import files

Damage = Callable[[Path, random.Random], None]

# Of an index that earlier damage has made unreadable. A message with damaged bytes in it raises UnicodeDecodeError.
UNREADABLE = (sqlite3.Error, UnicodeDecodeError, MemoryError)

# Damage to files


def flip(root: Path, choose: random.Random) -> None:
    for path in _some(root, choose):
        data = bytearray(path.read_bytes())
        if data:
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            path.write_bytes(data)


def truncate(root: Path, choose: random.Random) -> None:
    for path in _some(root, choose):
        os.truncate(path, choose.randrange(path.stat().st_size + 1))


def swap(root: Path, choose: random.Random) -> None:
    some = _some(root, choose)
    for one, other in zip(some[::2], some[1::2], strict=False):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)


def remove(root: Path, choose: random.Random) -> None:
    for path in _some(root, choose):
        path.unlink()


def remove_folders(root: Path, choose: random.Random) -> None:
    if folders := [path for path in root.glob("*/*") if path.is_dir() and not path.is_symlink()]:
        shutil.rmtree(choose.choice(folders))


def replace(root: Path, choose: random.Random) -> None:
    """Something else in place of a file: a folder, a link, a pipe."""
    for path in _some(root, choose):
        path.unlink()
        kind = choose.randrange(4)
        if kind == 0:
            path.mkdir()
        elif kind == 1:
            path.symlink_to("/dev/zero")
        elif kind == 2:
            path.symlink_to(root / "index.db")
        else:
            os.mkfifo(path)


def foreign(root: Path, choose: random.Random) -> None:
    """Files of others, some of which look like ours. They are no more than what is removed for them."""
    for path in _some(root, choose):
        size = choose.randrange(path.stat().st_size + 1)
        path.unlink()
        name = choose.choice([f"{path.parent.name}{choose.randrange(16**6):06x}-0.safetensors", "mine.txt", "x.tmp"])
        path.with_name(name).write_bytes(choose.randbytes(size))


def _some(root: Path, choose: random.Random) -> list[Path]:
    there = [path for path in files(root) if not path.is_symlink()]
    return choose.sample(there, min(len(there), choose.randint(1, 12)))


# Damage to the index


def noise(name: str) -> Damage:
    def damage(root: Path, choose: random.Random) -> None:
        path = root / name
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("r+b") as file:
            size = path.stat().st_size
            for _ in range(choose.choice((1, 3, 30))):
                # The first page and the rest are hit alike.
                file.seek(choose.randrange(min(size, 4096)) if choose.random() < 0.3 else choose.randrange(size))
                file.write(choose.randbytes(choose.choice((1, 8, 200)))[: size - file.tell()])

    return damage


def cut(name: str) -> Damage:
    def damage(root: Path, choose: random.Random) -> None:
        if (path := root / name).is_file():
            os.truncate(path, choose.randrange(path.stat().st_size + 1))

    return damage


def lose(name: str) -> Damage:
    def damage(root: Path, choose: random.Random) -> None:
        (root / name).unlink(missing_ok=True)

    return damage


def garbage(root: Path, choose: random.Random) -> None:
    (root / "index.db").write_bytes(choose.randbytes(choose.choice((0, 100, 50_000))))


COLUMNS = {
    "parts": [
        *("model", "key", "part", "parent", "start", "tokens", "partial"),
        *("size", "checksum", "state", "used", "used_at", "created"),
    ],
    "models": ["id", "hash", "fingerprint", "name", "created"],
    "written": ["day", "bytes"],
    "meta": ["name", "value"],
    "total": ["parts", "bytes"],
}
VALUES = (
    *("NULL", "'text'", "x'ff00'", "x''", "''", "1.5", "-1", "0", "1", "2", "3", "1e300", "CAST(x'fffe' AS TEXT)"),
    *("9223372036854775807", "-9223372036854775808", "4611686018427387904", "zeroblob(3000)", "'../../../x'"),
)


def hostile(root: Path, choose: random.Random) -> None:
    """Values that the tier does not write, in some rows or all."""
    table = choose.choice(["parts", "parts", "parts", *COLUMNS])
    where = choose.choice(["1", "abs(random()) % 3 = 0"])
    set_values(root, table, choose.choice(COLUMNS[table]), choose.choice(VALUES), where)


def set_values(root: Path, table: str, column: str, value: str, where: str = "1") -> None:
    """Whatever the table allows: its constraints are taken away for as long as it takes."""
    with suppress(*UNREADABLE):
        schema = execute(root, "SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        plain = [(f"CREATE TABLE {name} ({_plain(sql)}", name) for name, sql in schema if "(" in str(sql)]
        _write_schema(root, plain)
        try:
            execute(root, f"UPDATE OR REPLACE {table} SET {column} = {value} WHERE {where}")
        finally:
            _write_schema(root, [(sql, name) for name, sql in schema])


def _plain(sql: str) -> str:
    """The columns of a CREATE TABLE without NOT NULL and CHECK."""
    rest, found = sql.split("(", 1)[1].replace(" NOT NULL", ""), ""
    while " CHECK " in rest:
        before, rest = rest.split(" CHECK ", 1)
        depth = end = 0
        for end, letter in enumerate(rest):  # noqa: B007
            depth += (letter == "(") - (letter == ")")
            if not depth:
                break
        found, rest = found + before, rest[end + 1 :]
    return found + rest


def _write_schema(root: Path, tables: list[tuple[str, str]]) -> None:
    db = sqlite3.connect(root / "index.db", isolation_level=None, timeout=1)
    try:
        db.execute("PRAGMA writable_schema = ON")
        db.executemany("UPDATE sqlite_master SET sql = ? WHERE name = ?", tables)
    finally:
        db.close()


def execute(root: Path, statement: str) -> list[tuple[str, str]]:
    db = sqlite3.connect(root / "index.db", isolation_level=None, timeout=1)
    try:
        return db.execute(statement).fetchall()
    finally:
        db.close()


def statement(text: str) -> Damage:
    def damage(root: Path, choose: random.Random) -> None:
        with suppress(*UNREADABLE):
            execute(root, text)

    return damage


def lose_rows(root: Path, choose: random.Random) -> None:
    with suppress(*UNREADABLE):
        execute(root, f"DELETE FROM {choose.choice(list(COLUMNS))} WHERE abs(random()) % 2")


def wrong_schema(root: Path, choose: random.Random) -> None:
    text = choose.choice(
        [
            "UPDATE meta SET value = '1'",
            "ALTER TABLE parts RENAME COLUMN used TO older",
            "CREATE TABLE other (x)",
            "CREATE TRIGGER t AFTER UPDATE ON parts BEGIN DELETE FROM parts; END",
            "PRAGMA user_version = 77",
        ]
    )
    statement(text)(root, choose)


def lose_table(root: Path, choose: random.Random) -> None:
    statement(f"DROP TABLE {choose.choice(list(COLUMNS))}")(root, choose)


def lose_index(root: Path, choose: random.Random) -> None:
    statement(f"DROP INDEX {choose.choice(['by_use', 'by_parent', 'unsettled'])}")(root, choose)


def tag(root: Path, choose: random.Random) -> None:
    path = root / "CACHEDIR.TAG"
    if choose.random() < 0.5:
        path.unlink(missing_ok=True)
    else:
        noise(path.name)(root, choose)


ANYTIME: dict[str, Damage] = {
    "bits of files flipped": flip,
    "files cut": truncate,
    "files swapped": swap,
    "files removed": remove,
    "folders removed": remove_folders,
    "files replaced by other things": replace,
    "foreign files": foreign,
    "noise in index.db": noise("index.db"),
    "noise in index.db-wal": noise("index.db-wal"),
    "noise in index.db-shm": noise("index.db-shm"),
    "index.db cut": cut("index.db"),
    "index.db garbage": garbage,
    "index.db lost": lose("index.db"),
    "hostile values": hostile,
    "rows lost": lose_rows,
    "wrong schema": wrong_schema,
    "table lost": lose_table,
    "index of a table lost": lose_index,
    "noise in lock": noise("lock"),
    "lock lost": lose("lock"),
    "tag damaged": tag,
}
# A file that SQLite has mapped must not become shorter: the system ends the process for it.
CLOSED = {
    **ANYTIME,
    "index.db-wal cut": cut("index.db-wal"),
    "index.db-wal lost": lose("index.db-wal"),
    "index.db-shm cut": cut("index.db-shm"),
}

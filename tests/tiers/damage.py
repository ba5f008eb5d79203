"""Damage a disk cache at random, closed and in use; it must never give wrong bytes, hang, or take more than its limit.

    python tests/tiers/damage.py [--rounds 1000] [--seed N]

Each round: a folder is used, damaged in one to three ways (before it is opened, or while it is open), and used again.
What is read is compared with what was stored. The folder's size is looked at after every call of the tier to the
system. A round that takes longer than its deadline ends the process with the stacks of all threads. When it is closed
and opened again, the cache works.
"""

import argparse
import faulthandler
import logging
import os
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from disk_parts import MB, address, content, fetch, files, image, offer, open_tier

from onekv.errors import SettingError
from onekv.tiers.base import STATES
from onekv.tiers.disk import DiskTier
from onekv.tiers.files import Files, Item, Where
from onekv.tiers.maintain import verify

LIMIT = 3 * MB + 256 * 1024
NODES = 60
PARTS = (0, STATES)
DEADLINE = 120
# A use of the cache takes this many steps.
STEPS = 12
_ONE = image().size


class Watched(Files):
    """The real files, and the size of the folder after every call that changes something."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Bytes that somebody else has put there.
        self.foreign = 0
        self.most = 0

    def look(self) -> None:
        size = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with suppress(OSError):
                    size += os.lstat(f"{folder}/{name}").st_size
        self.most = max(self.most, size - self.foreign)

    def write(self, handle: int, data: memoryview) -> int:
        count = super().write(handle, data)
        self.look()
        return count

    def rename(self, old: Where, new: Where) -> None:
        super().rename(old, new)
        self.look()

    def unlink(self, path: Where) -> None:
        super().unlink(path)
        self.look()

    def open(self, path: Where, flags: int) -> int:
        handle = super().open(path, flags)
        self.look()
        return handle

    def size(self, where: Where | int) -> int:
        found = super().size(where)
        self.look()
        return found

    def items(self, folder: Where) -> list[Item]:
        self.look()
        return super().items(folder)


# Use


def use(tier: DiskTier, choose: random.Random, threads: bool) -> int:
    """Ask and tell the cache all it can be asked and told; how many parts were read, all of them right."""
    read = 0
    for _ in range(STEPS):
        for _ in range(6):
            offer(tier, _node(choose), choose.choice(PARTS), wait=choose.random() < 0.5)
        tier.touch([_node(choose).key for _ in range(5)])
        read += read_some(tier, [_node(choose).key for _ in range(8)])
        for entry in tier.tails(b"p" * 16):
            assert isinstance(entry.address.start, int)
        if choose.random() < 0.1:
            tier.drop([_node(choose).key])
        if choose.random() < 0.05:
            tier.clear()
        if not threads:
            tier.work(choose.randrange(4))
        tier.stats()
    tier.flush()
    return read


def _node(choose: random.Random) -> object:
    number = choose.randrange(NODES)
    return address(number, 16 if number % 4 else 5)


def read_some(tier: DiskTier, keys: Sequence[bytes]) -> int:
    parts = [(key, part) for key, entry in tier.find(keys).items() for part in entry.parts]
    found = fetch(tier, *parts)
    for (key, part), data in found.items():
        assert data is None or data == content(key, part, len(data))[: len(data)], "wrong bytes"
    return sum(data is not None for data in found.values())


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


def noise(name: str) -> Callable[[Path, random.Random], None]:
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


def cut(name: str) -> Callable[[Path, random.Random], None]:
    def damage(root: Path, choose: random.Random) -> None:
        if (path := root / name).is_file():
            os.truncate(path, choose.randrange(path.stat().st_size + 1))

    return damage


def lose(name: str) -> Callable[[Path, random.Random], None]:
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
    *("9223372036854775807", "-9223372036854775808", "4611686018427387904", "zeroblob(100000)", "'../../../x'"),
)


def hostile(root: Path, choose: random.Random) -> None:
    """Values that the tier does not write, in some rows or all."""
    table = choose.choice(["parts", "parts", "parts", *COLUMNS])
    where = choose.choice(["1", "abs(random()) % 3 = 0"])
    set_values(root, table, choose.choice(COLUMNS[table]), choose.choice(VALUES), where)


def set_values(root: Path, table: str, column: str, value: str, where: str = "1") -> None:
    """Whatever the table allows: its constraints are taken away for as long as it takes."""
    with suppress(sqlite3.Error):
        schema = execute(root, "SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        plain = [(f"CREATE TABLE {name} ({_plain(sql)}", name) for name, sql in schema]
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


def statement(text: str) -> Callable[[Path, random.Random], None]:
    def damage(root: Path, choose: random.Random) -> None:
        with suppress(sqlite3.Error):
            execute(root, text)

    return damage


def lose_rows(root: Path, choose: random.Random) -> None:
    with suppress(sqlite3.Error):
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


ANYTIME: dict[str, Callable[[Path, random.Random], None]] = {
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


def make_round(root: Path, choose: random.Random, counts: Counter[tuple[str, str]]) -> None:
    """Use, damage, use, close, open, use."""
    threads = choose.random() < 0.5
    disk = Watched(root)
    tier = open_tier(root, LIMIT, threads=threads, files=disk)
    use(tier, choose, threads)
    in_use = choose.random() < 0.5
    kinds = choose.sample(list(ANYTIME if in_use else CLOSED), choose.choice((1, 1, 1, 2, 3)))
    if not in_use:
        # With the log as a kill leaves it, or written back.
        tier.kill() if not threads and choose.random() < 0.7 else tier.close()
    for kind in kinds:
        (ANYTIME if in_use else CLOSED)[kind](root, choose)
    happened = "as if nothing was"
    if not in_use:
        try:
            tier = open_tier(root, LIMIT, threads=threads, files=disk)
        except SettingError:
            assert "tag damaged" in kinds, kinds
            happened = "refused"
            shutil.rmtree(root)
            tier = open_tier(root, LIMIT, threads=threads, files=disk)
        if tier.stats().corrupt:
            happened = "emptied"
    emptied = tier.stats().corrupt
    use(tier, choose, threads)
    stats = tier.stats()
    if stats.failed is not None:
        happened = "out of use" if emptied == 0 else "emptied, out of use"
    elif stats.corrupt > emptied:
        happened = f"{happened}, blocks lost" if emptied else "blocks lost"
    tier.close()
    disk.look()
    again(root, choose, disk)
    for kind in kinds:
        counts[f"{kind}, {'in use' if in_use else 'closed'}", happened] += 1
    assert disk.most <= LIMIT, f"{disk.most} bytes of {LIMIT} in the folder; {kinds}, {happened}"


def again(root: Path, choose: random.Random, disk: Watched) -> None:
    """It works again: what is stored is there, and after that nothing is wrong."""
    if not (root / "CACHEDIR.TAG").exists() or (root / "CACHEDIR.TAG").read_bytes()[:10] != b"Signature:":
        shutil.rmtree(root)
    try:
        tier = open_tier(root, LIMIT, threads=False, files=disk)
    except SettingError:
        # The tag was damaged further behind.
        shutil.rmtree(root)
        tier = open_tier(root, LIMIT, threads=False, files=disk)
    tier.clear()
    tier.flush()
    assert tier.stats().failed is None, tier.stats()
    new = address(1000)
    assert offer(tier, new)
    tier.flush()
    assert read_some(tier, [new.key]) == 1, tier.stats()
    tier.close()
    verify(root)
    assert verify(root).sound


def run(rounds: int, seed: int) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    logging.disable(logging.CRITICAL)
    for number in range(rounds):
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        with tempfile.TemporaryDirectory() as place:
            try:
                make_round(Path(place) / "cache", random.Random(f"{seed} {number}"), counts)
            except BaseException:
                print(f"seed {seed}, round {number}", file=sys.stderr)
                raise
    faulthandler.cancel_dump_traceback_later()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    counts = run(arguments.rounds, arguments.seed)
    for kind in sorted({kind for kind, _ in counts}):
        results = {happened: count for (other, happened), count in sorted(counts.items()) if other == kind}
        print(f"{kind:45}" + ", ".join(f"{happened}: {count}" for happened, count in results.items()))
    print(f"{arguments.rounds} rounds: no wrong bytes, no hang, the limit held, and each cache worked again")


if __name__ == "__main__":
    main()

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
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from damages import ANYTIME, CLOSED
from disk_parts import MB, address, content, fetch, offer, open_tier

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


# A round


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
        happened = "disabled" if emptied == 0 else "emptied, disabled"
    elif stats.corrupt > emptied:
        happened = f"{happened}, blocks lost" if emptied else "blocks lost"
    tier.close()
    disk.look()
    again(root, disk, refused="tag damaged" in kinds)
    for kind in kinds:
        counts[f"{kind}, {'in use' if in_use else 'closed'}", happened] += 1
    assert disk.most <= LIMIT, f"{disk.most} bytes of {LIMIT} in the folder; {kinds}, {happened}"


def again(root: Path, disk: Watched, refused: bool = False) -> None:
    """It works again: what is stored is there, and after that nothing is wrong."""
    try:
        tier = open_tier(root, LIMIT, threads=False, files=disk)
    except SettingError:
        if not refused:
            raise
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

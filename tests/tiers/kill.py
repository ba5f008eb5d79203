"""Kill a process that uses a disk cache, at random moments; what is left must be sound.

    python tests/tiers/kill.py [--rounds 200] [--seed 0]

Each round: a child opens the folder and offers, fetches, touches and clears until it is killed (SIGKILL); then the
limit holds, the cache opens, has no file without a row, gives only right bytes, and verifies.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from disk_parts import MB, address, content, fetch, files, offer, open_tier

from onekv.tiers.base import STATES
from onekv.tiers.disk import DiskTier
from onekv.tiers.maintain import verify

LIMIT = 4 * MB
NODES = 100
PARTS = (0, STATES)


def work(root: Path, seed: int) -> None:
    """Use the cache until the end, and read only right bytes meanwhile."""
    choose = random.Random(seed)
    tier = open_tier(root, LIMIT)
    while True:
        for _ in range(10):
            offer(tier, address(choose.randrange(NODES)), choose.choice(PARTS), wait=choose.random() < 0.5)
        tier.touch([address(choose.randrange(NODES)).key for _ in range(20)])
        check_content(tier, [address(choose.randrange(NODES)).key for _ in range(5)])
        if choose.random() < 0.02:
            tier.clear()


def check_content(tier: DiskTier, keys: list[bytes]) -> int:
    """Read what there is of these nodes; how many parts that were."""
    parts = [(key, part) for key, entry in tier.find(keys).items() for part in entry.parts]
    for (key, part), data in fetch(tier, *parts).items():
        assert data is None or data == content(key, part, len(data))[: len(data)], "wrong bytes"
    assert tier.stats().corrupt == 0 and tier.stats().failed is None, tier.stats()
    return len(parts)


def check(root: Path) -> int:
    """What must be true of a folder whose process was killed; how many parts it has."""
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert size <= LIMIT, f"{size} bytes in the folder"
    tier = open_tier(root, LIMIT)
    found = check_content(tier, [address(number).key for number in range(NODES)])
    left = len(files(root))
    assert left == found, f"{left} files for {found} parts"
    tier.close()
    report = verify(root)
    assert report.sound and report.checked == found, report
    return found


def kill_once(root: Path, seed: int, delay: float) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(root, seed)
        finally:
            os._exit(1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    return check(root) if root.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    choose = random.Random(arguments.seed)
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder:
        found = [
            kill_once(Path(folder) / "cache", choose.randrange(10**9), choose.uniform(0, 0.25))
            for _ in range(arguments.rounds)
        ]
    print(f"{arguments.rounds} kills, {sum(found)} parts found after them, all sound")


if __name__ == "__main__":
    main()

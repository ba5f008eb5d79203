"""How fast the disk tier writes and reads, against plain files of the same size on the same disk.

python tests/tiers/measure.py [FOLDER]
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
from disk_parts import address, files, image, open_tier

from onekv.tiers.base import Target

SIZE = 2_900_000
COUNT = 60
TURNS = 7


def compare(what: str, prepare: Callable[[], None], works: list[Callable[[], None]]) -> None:
    """Medians over turns in which each is measured once."""
    rates: dict[str, list[float]] = {work.__name__: [] for work in works}
    for _ in range(TURNS):
        for work in works:
            prepare()
            start = time.perf_counter()
            work()
            rates[work.__name__].append(COUNT * SIZE / (time.perf_counter() - start) / 1e6)
    for name, values in rates.items():
        print(f"{what:12} {name:20} {median(values):6.0f} MB/s   ({min(values):.0f} to {max(values):.0f})")


def forget(paths: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        measure(Path(folder))


def measure(folder: Path) -> None:
    data = os.urandom(SIZE)
    plain = [folder / f"plain{number}" for number in range(COUNT)]
    buffer = bytearray(image(SIZE).size)
    target = np.empty(SIZE, np.uint8)
    source = np.frombuffer(data, np.uint8)
    # As a block lies in the pool: in 180 pieces.
    pieces = target[: SIZE // 180 * 180].reshape(180, -1)

    def write_plain() -> None:
        for path in plain:
            with path.open("wb", buffering=0) as file:
                file.write(data)

    def fill(view: memoryview) -> None:
        np.frombuffer(view, np.uint8)[:] = source

    def write_tier() -> None:
        for number in range(COUNT):
            assert tier.offer(address(number), 0, fill, wait=True)
        tier.flush()

    def read_plain() -> None:
        for path in files(folder / "cache"):
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)

    def read_plain_and_copy() -> None:
        for path in files(folder / "cache"):
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)
            target[:] = np.frombuffer(buffer, np.uint8, SIZE)

    def place(data: memoryview) -> None:
        pieces[:] = np.frombuffer(data, np.uint8, pieces.size).reshape(pieces.shape)

    def read_tier() -> None:
        parts = [(address(number).key, 0) for number in range(COUNT)]
        tier.expect(parts)
        assert all(tier.read([Target(*part, place) for part in parts]))

    def empty() -> None:
        """The same disk for each: nothing on it, nothing for it to do."""
        tier.clear()
        tier.flush()
        for path in plain:
            path.unlink(missing_ok=True)
        os.sync()

    tier = open_tier(folder / "cache", 10**9, 10 * SIZE, images={0: image(SIZE)})
    compare("write", empty, [write_plain, write_tier])
    empty()
    write_tier()
    os.sync()
    reads = [read_plain, read_plain_and_copy, read_tier]
    compare("read, warm", lambda: None, reads)
    compare("read, cold", lambda: forget(files(folder / "cache")), reads)
    tier.close()


if __name__ == "__main__":
    main()

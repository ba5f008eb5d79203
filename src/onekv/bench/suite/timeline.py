"""Memory of a server's process over time.

From inside, if the contender runs on MLX: the figures that `watched` writes for MLX and for the process (its
footprint). From outside, for all contenders: resident memory, which is used if there is no footprint.
Phases are marked by the scenario; each phase has a peak.
"""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..clients import resident

SAMPLE_S = 0.1


def resident_by_ps(pid: int) -> int | None:
    """Like `resident`, even where there is no /proc."""
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return int(shown) * 1024 if shown else None


@dataclass
class Phase:
    name: str
    begin: float
    end: float = 0.0


@dataclass
class Timeline:
    """Of one server; over a restart, of both of its processes."""

    # Times in seconds since the epoch, and bytes.
    process: list[tuple[float, int]] = field(default_factory=list)
    # Time, active, cached, peak.
    mlx: list[tuple[float, int, int, int]] = field(default_factory=list)
    footprint: list[tuple[float, int]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    # Bytes of the process when it was ready.
    rest: int | None = None
    # Who is watched, once it has been started.
    pid: int | None = None

    @property
    def taken(self) -> list[tuple[float, int]]:
        """What the process took, by the better count."""
        return self.footprint or self.process

    def started(self, pid: int) -> None:
        self.pid = pid

    def ready(self) -> None:
        """The server has answered its first request: some load the weights for that."""
        self.rest = self.taken[-1][1] if self.taken else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        phase = Phase(name, time.time())
        self.phases.append(phase)
        try:
            yield
        finally:
            phase.end = time.time()

    @contextmanager
    def watching(self, written: Path) -> Iterator[None]:
        """Sample the process, as soon as it is `started`, until the block is left, and then read what it has `written`
        of itself.
        """
        self.pid, stop = None, threading.Event()

        def sample() -> None:
            while not stop.is_set():
                pid = self.pid
                if pid is not None and (size := resident(pid) or resident_by_ps(pid)) is not None:
                    self.process.append((time.time(), size))
                stop.wait(SAMPLE_S)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.read(written)
            written.unlink(missing_ok=True)

    def read(self, written: Path) -> None:
        """Add what has been written since this was read last."""
        if written.exists():
            last = self.mlx[-1][0] if self.mlx else 0.0
            # The last line may not be whole yet.
            samples = [json.loads(line) for line in written.read_text().split("\n")[:-1]]
            new = [each for each in samples if each[0] > last]
            self.mlx += [(at, active, cached, peak) for at, active, cached, peak, _ in new]
            self.footprint += [(at, size) for at, *_, size in new]

    def peak(self, phase: str | None = None) -> int | None:
        """The most that the process took, in that phase or at all; None if it was not watched."""
        return max((size for at, size in self.taken if self._overlaps(at, at, phase)), default=None)

    def mlx_peak(self, phase: str | None = None) -> int | None:
        """The most that MLX had allocated, in that phase or at all; None if that is not known.

        A sample has the peak since the one before it; those count whose time overlaps the phase.
        """
        pairs = zip(self.mlx, self.mlx[1:], strict=False)
        return max((each[3] for before, each in pairs if self._overlaps(before[0], each[0], phase)), default=None)

    def growth(self) -> int | None:
        """The peak of the process, less what it took when it was `ready`."""
        peak = self.peak()
        return peak - self.rest if peak is not None and self.rest is not None else None

    def _overlaps(self, begin: float, end: float, name: str | None) -> bool:
        return name is None or any(
            each.begin <= end and begin <= (each.end or end) for each in self.phases if each.name == name
        )

    def as_json(self) -> dict[str, object]:
        """Times in seconds since the first sample."""
        times = (
            [at for at, *_ in self.process + self.footprint]
            + [at for at, *_ in self.mlx]
            + [each.begin for each in self.phases]
        )
        zero = min(times, default=0.0)
        return {
            "process": [[round(at - zero, 2), size] for at, size in self.process],
            "footprint": [[round(at - zero, 2), size] for at, size in self.footprint],
            "mlx": [[round(at - zero, 2), *sizes] for at, *sizes in self.mlx],
            "phases": [[each.name, round(each.begin - zero, 2), round(each.end - zero, 2)] for each in self.phases],
        }

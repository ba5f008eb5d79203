"""`onekv sim`: runs seeds and reports the result; the script of a failed seed is minimized and written to a file."""

import argparse
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from ..errors import SettingError
from ..interrupts import pool_of
from .config import Config
from .coverage import table
from .script import Operation, Outcome, run_script, run_seed, shrink
from .tiers import memory_folder

# Seconds between two lines of progress if there is no terminal.
TELL = 60.0


def run(arguments: argparse.Namespace) -> int:
    if arguments.replay is not None:
        return _show(replay(Path(arguments.replay)))
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    last = f" to {seed + arguments.seeds - 1}" if arguments.seeds > 1 else ""
    print(f"seed {seed}{last}, {arguments.steps:,} steps each")
    failed = simulate(seed, arguments.seeds, arguments.steps, arguments.seconds, arguments.processes)
    if failed is None:
        return 0
    return _report(failed)


def simulate(seed: int, seeds: int, steps: int, seconds: float | None, processes: int) -> Outcome | None:
    """Run seeds one after the other, show how far it is and what was reached; the first that fails, if one does."""
    counts: Counter[str] = Counter()
    turns = done = 0
    begun = told = time.monotonic()
    # One folder for all, which goes with this process, however its workers end.
    with (
        tempfile.TemporaryDirectory(prefix=f"onekv-sim-{os.getpid()}-", dir=memory_folder()) as folder,
        tqdm(total=seeds * steps, unit="step", unit_scale=True, disable=None) as bar,
    ):
        try:
            for outcome in _outcomes(range(seed, seed + seeds), steps, processes, folder):
                counts += outcome.counts + outcome.struck
                turns, done = turns + outcome.turns, done + 1
                bar.update(outcome.turns)
                if bar.disable and time.monotonic() > told + TELL:
                    # No terminal to draw a bar on.
                    told = time.monotonic()
                    print(
                        f"{turns:,} steps, {done:,} seeds, {turns / (told - begun):,.0f} steps per second", flush=True
                    )
                if outcome.problem is not None:
                    return outcome
                if seconds is not None and time.monotonic() - begun > seconds:
                    break
        except KeyboardInterrupt:
            bar.close()
            _summarize(counts, turns, done, time.monotonic() - begun)
            raise
    _summarize(counts, turns, done, time.monotonic() - begun)
    return None


def _summarize(counts: Counter[str], turns: int, seeds: int, seconds: float) -> None:
    print(table(counts))
    rate = turns / max(seconds, 1e-9)
    print(
        f"\n{turns:,} steps over {seeds:,} seeds in {seconds:.0f} s ({rate:,.0f} per second): no violation", flush=True
    )


def _outcomes(seeds: range, steps: int, processes: int, folder: str) -> Iterator[Outcome]:
    if processes == 1:
        with _remembering() as interrupts:
            for seed in seeds:
                outcome = run_seed(seed, steps, folder)
                # Before its verdict: a seed that was interrupted may have failed by that.
                if interrupts:
                    raise KeyboardInterrupt
                yield outcome
        return
    with pool_of(processes) as pool:
        yield from pool.imap_unordered(_work, [(seed, steps, folder) for seed in seeds], chunksize=1)


@contextmanager
def _remembering() -> Iterator[list[int]]:
    """Interrupts so far. Python drops the exception of one that comes while an object is finalized, and some libraries
    make another one of it.
    """
    interrupts: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _work(task: tuple[int, int, str]) -> Outcome:
    outcome = run_seed(*task)
    # Without what was made from it, some of which cannot be sent.
    outcome.config = replace(outcome.config)
    if outcome.problem is None:
        outcome.script = []
    return outcome


def _report(outcome: Outcome) -> int:
    """Say what went wrong, and leave a short script of it."""
    assert outcome.problem is not None
    print(
        f"\nseed {outcome.seed} failed after {outcome.turns:,} steps: {outcome.problem}\n  {outcome.config.describe()}"
    )
    print(f"making its {len(outcome.script):,} operations fewer ...", flush=True)
    script = shrink(outcome.config, outcome.script, outcome.problem)
    file = Path(f"onekv-sim-{outcome.seed}.json")
    save(file, outcome.config, script)
    _show(replay(file))
    print(f"{len(script)} operations are left, in {file}; `onekv sim --replay {file}` runs them", file=sys.stderr)
    return 1


def _show(outcome: Outcome) -> int:
    print(outcome.config.describe())
    for name, a, b in outcome.script:
        print(f"  {name:<20} {a:>11} {b:>11}")
    if outcome.problem is None:
        print("no violation")
        return 0
    print(outcome.trace)
    print(outcome.problem)
    return 1


def save(file: Path, config: Config, script: list[Operation]) -> None:
    """With its configuration, so that it stays the same run whatever seeds will choose one day."""
    file.write_text(json.dumps({"config": asdict(config), "operations": script}, separators=(",", ":")) + "\n")


def replay(file: Path) -> Outcome:
    """Run a script that was saved. Raises SettingError if the file is not one."""
    try:
        kept = json.loads(file.read_text())
        config = Config.from_json(kept["config"])
        script = [(str(name), int(a), int(b)) for name, a, b in kept["operations"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"--replay is {str(file)!r}, which cannot be read as a script ({error})") from error
    return run_script(config, script)

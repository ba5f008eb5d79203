"""The simulation: fresh seeds every time, scripts that once failed, and planted mistakes that it must find.

`ONEKV_SIM_SEED` fixes the first of the fresh seeds and `ONEKV_SIM_SECONDS` says for how long they are tried.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest

import mutations
from onekv.sim import command
from onekv.sim.command import replay, save
from onekv.sim.config import make_config
from onekv.sim.coverage import TOPICS, table
from onekv.sim.script import run_script, run_seed, shrink
from onekv.sim.tiers import memory_folder

KEPT = sorted((Path(__file__).parent / "sim").glob("*.json"))
# The seeds at which mutations are found soon, where it is not the first.
FOUND_AT = {
    "a store's block is used without verification": 5085,
    "a hash without its parent": 5001,
    "a checksum is not checked": 5001,
    "a part that could not be read counts as read": 5001,
    "a snapshot counts at a shorter length": 5005,
    "a state from the wrong boundary": 5002,
    "a pinned tail is taken over": 5003,
    "the disk limit is not enforced": 5065,
    "a failed request's blocks are not closed": 5002,
    "a disk block goes to its neighbour's place": 5001,
    "a loaded sequence has one token less": 5001,
    "a batch keeps the states of the one before": 5002,
}


def test_fresh_seeds():
    seed = int(os.environ.get("ONEKV_SIM_SEED", secrets.randbits(31)))
    until = time.monotonic() + float(os.environ.get("ONEKV_SIM_SECONDS", "60"))
    turns = 0
    print(f"simulation from seed {seed}")
    while time.monotonic() < until:
        outcome = run_seed(seed, 2000)
        assert outcome.problem is None, f"onekv sim --seed {seed} --steps 2000: {outcome.problem}\n{outcome.trace}"
        turns += outcome.turns
        seed += 1
    print(f"{turns} steps, to seed {seed - 1}")
    assert turns


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_what_once_failed_does_not_any_more(file):
    outcome = replay(file)
    assert outcome.problem is None, outcome.trace


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        # A tier that could not be told that parts will not be read kept the remote tier's buffers.
        (60000032, 4000),
        # A folder with a damaged index is left as it is, and a lower limit applies from the next start on.
        (80000355, 760),
        # Killed between the folder's opening and the first look at it.
        (90000001, 4000),
    ],
)
def test_a_seed_that_once_failed_does_not_any_more(seed, steps):
    outcome = run_seed(seed, steps)
    assert outcome.problem is None, outcome.trace


def test_a_seed_replays_exactly():
    first, second = run_seed(11, 500), run_seed(11, 500)
    assert first.problem is None
    assert (first.turns, first.counts, first.struck) == (second.turns, second.counts, second.struck)
    again = run_script(make_config(Random(11)), first.script)
    assert (again.turns, again.counts) == (first.turns, first.counts)


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_planted_mistake_is_found(name):
    seed = FOUND_AT.get(name, mutations.SEED)
    _, _, problem = mutations.find(name, 20_000, seed)
    assert problem is not None


def test_a_failing_script_is_made_short_and_kept(tmp_path):
    name = "a tail's copy is the wrong way round"
    with mutations.planted(mutations.MUTATIONS[name]):
        outcome = run_seed(mutations.SEED, 600)
        assert outcome.problem is not None
        script = shrink(outcome.config, outcome.script, outcome.problem, tries=60)
        assert len(script) < len(outcome.script) or len(script) <= 6
        file = tmp_path / "kept.json"
        save(file, outcome.config, script)
        assert replay(file).problem is not None
    assert replay(file).problem is None


def test_the_table_shows_what_was_not_reached():
    outcome = run_seed(3, 200)
    text = table(outcome.counts + outcome.struck)
    for names in TOPICS.values():
        for name in names:
            assert name in text


def onekv(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "onekv", "sim", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, check=False)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_command_says_what_it_did(tmp_path, processes):
    done = onekv("--seed", "5", "--seeds", "2", "--steps", "100", "--processes", processes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed 5 to 6, 100 steps each" in done.stdout
    assert "over 2 seeds" in done.stdout
    assert "no violation" in done.stdout
    assert not list(tmp_path.iterdir())


def interrupt(process: subprocess.Popen[str]) -> str:
    """Until it ends, what it has said. One signal in about fifty does not reach Python's handler, on a busy machine."""
    for _ in range(12):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[1]
    process.kill()
    raise AssertionError("it goes on")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_interrupted_it_leaves_nothing(tmp_path, processes):
    command = [sys.executable, "-u", "-m", "onekv", "sim", "--seeds", "1000", "--steps", "300"]
    process = subprocess.Popen(
        [*command, "--processes", processes], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    folder = Path(memory_folder() or tempfile.gettempdir())

    def worlds() -> list[Path]:
        return list(folder.glob(f"onekv-sim-{process.pid}-*/*"))

    while not worlds() and process.poll() is None:
        time.sleep(0.05)
    errors = interrupt(process)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not worlds()


def test_interrupted_it_says_what_was_reached(monkeypatch, capsys):
    def outcomes(*given):
        yield run_seed(5, 40)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_outcomes", outcomes)
    with pytest.raises(KeyboardInterrupt):
        command.simulate(5, 10, 40, None, 1)
    out = capsys.readouterr().out
    assert "steps over 1 seeds" in out and "prefilling -> running" in out


@pytest.mark.parametrize("becomes", ["nothing", "a failure"])
def test_an_interrupt_that_does_not_arrive_is_remembered(tmp_path, becomes):
    script = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from onekv.sim import command

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))

stock, seeds = command.run_seed, []
def run_seed(seed, *rest):
    seeds.append(seed)
    Finalized()
    outcome = stock(seed, *rest)
    if sys.argv[1] == "a failure":
        outcome.problem = "ImportError: cannot import name"
    return outcome

command.run_seed = run_seed
try:
    command.simulate(1, 50, 5, None, 1)
except KeyboardInterrupt:
    sys.exit(len(seeds))
"""
    command = [sys.executable, "-c", script, becomes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "ignored" in done.stderr and done.returncode == 1, done.stderr


def test_a_file_that_is_no_script_is_told(tmp_path):
    (tmp_path / "other.json").write_text("[1, 2]")
    for name in ("other.json", "missing.json"):
        done = onekv("--replay", name, cwd=tmp_path)
        assert done.returncode == 1
        assert "--replay" in done.stderr
        assert "Traceback" not in done.stderr

"""Kill an engine with a disk cache at random moments: no wrong token, a sound cache, the limit holds.

python tests/kill_engine.py [--rounds 200] [--seed N]

Each round: a process answers prompts that evict each other, checks every answer against one that was computed without
any cache, and is killed (SIGKILL); then the folder is verified. Folders live on over the rounds.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)

# isort: split
import numpy as np

from onekv.engine import Engine, Request
from onekv.tiers.maintain import verify
from stock import engine_of, small_llama

LIMIT = 12 * 2**20
ANSWER = 4


def prompts() -> list[list[int]]:
    """Conversations of 150 to 330 tokens, some with the same beginning: together more than memory or disk hold."""
    choose = np.random.default_rng(1)
    starts = [choose.integers(0, 128, 140).tolist() for _ in range(5)]
    return [
        starts[i % 5] + choose.integers(0, 128, int(n)).tolist() for i, n in enumerate(choose.integers(10, 190, 15))
    ]


def make_engine(folder: Path | None, policy: str) -> Engine:
    model = small_llama(8, num_hidden_layers=4, intermediate_size=64, num_key_value_heads=8, head_dim=32)
    disk = (
        {"disk_cache": str(folder), "disk_limit": LIMIT, "disk_policy": policy} if folder else {"prefix_cache": False}
    )
    return engine_of(model, kv_memory="8MB", block_size=16, max_batch=3, prefill_chunk=64, **disk)


def answer(engine: Engine, some: list[list[int]]) -> list[list[int]]:
    requests = [Request(prompt, ANSWER) for prompt in some]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return [request.tokens for request in requests]


def work(folder: Path, expected: list[list[int]], seed: int) -> None:
    """Answer until the end."""
    choose = random.Random(seed)
    engine = make_engine(folder, choose.choice(["write_back", "write_through"]))
    print("ready", flush=True)
    while True:
        some = [choose.randrange(len(expected)) for _ in range(choose.randint(1, 3))]
        found = answer(engine, [prompts()[index] for index in some])
        stats = engine.prefix.tiers[0].stats()
        if found != [expected[index] for index in some] or stats.corrupt or stats.failed:
            print(f"wrong: {found} for {some}; {stats}", flush=True)
            sys.exit(3)


def kill_once(folder: Path, answers: Path, seed: int, delay: float) -> int:
    command = [sys.executable, __file__, "--work", str(folder), "--answers", str(answers), "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        said = child.stdout.read()
    assert child.returncode == -signal.SIGKILL, said
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size <= LIMIT, f"{size} bytes in the folder"
    report = verify(folder)
    # What was being written is left over by a kill; nothing that the index calls ready is damaged or gone.
    assert report.corrupt == report.missing == 0, report
    assert verify(folder).sound
    return report.checked


def run(rounds: int, seed: int) -> int:
    """How many blocks were found whole after the kills."""
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        answers = Path(place) / "answers.json"
        engine = make_engine(None, "write_back")
        answers.write_text(json.dumps([answer(engine, [prompt])[0] for prompt in prompts()]))
        folder = Path(place) / "cache"
        return sum(kill_once(folder, answers, choose.randrange(10**9), choose.uniform(0, 2)) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--answers", type=Path)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, json.loads(arguments.answers.read_text()), arguments.seed)
    print(f"seed {arguments.seed}")
    print(f"{arguments.rounds} kills; {run(arguments.rounds, arguments.seed)} blocks found whole")


if __name__ == "__main__":
    main()

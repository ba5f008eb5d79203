"""Damage the disk cache of an engine at random, closed and in use: no wrong token, no hang, no more than the limit.

    python tests/tiers/damage_engine.py [--rounds 50] [--seed N]

Each round: an engine answers prompts that evict each other, its folder is damaged (see `damages`), and the answers are
compared with those that were computed without any cache. Folders live on over the rounds.
"""

import argparse
import faulthandler
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)

# isort: split
from damage import DEADLINE, Watched
from damages import ANYTIME, CLOSED

from kill_engine import LIMIT, answer, make_engine, prompts
from onekv.config import Settings
from onekv.engine import Engine
from onekv.errors import SettingError
from onekv.memory.plan import make_plan
from onekv.tiers.opening import open_tier, stored_as
from stock import CALIBRATION, small_llama


def open_engine(folder: Path, disk: Watched, choose: random.Random) -> Engine:
    """As in `kill_engine`, over files that are watched."""
    model = small_llama(8, num_hidden_layers=4, intermediate_size=64, num_key_value_heads=8, head_dim=32)
    policy = choose.choice(["write_back", "write_through"])
    settings = Settings(
        kv_memory="8MB",
        block_size=16,
        max_batch=3,
        prefill_chunk=64,
        disk_cache=str(folder),
        disk_limit=LIMIT,
        disk_policy=policy,
    )
    plan = make_plan(model, settings, None, CALIBRATION)
    stored = stored_as(model, plan)
    tier = open_tier(settings, plan, stored, "a model", files=disk, threads=choose.random() < 0.5)
    return Engine(model, plan, set(), settings, [tier])


def use(engine: Engine, expected: list[list[int]], choose: random.Random) -> None:
    for _ in range(4):
        some = [choose.randrange(len(expected)) for _ in range(choose.randint(1, 3))]
        found = answer(engine, [prompts()[index] for index in some])
        assert found == [expected[index] for index in some], f"wrong tokens: {found} for {some}"


def make_round(
    folder: Path, expected: list[list[int]], choose: random.Random, counts: Counter[tuple[str, str]]
) -> None:
    disk = Watched(folder)
    engine = open_engine(folder, disk, choose)
    use(engine, expected, choose)
    in_use = choose.random() < 0.5
    kinds = choose.sample(list(ANYTIME if in_use else CLOSED), choose.choice((1, 1, 2)))
    if not in_use:
        engine.close()
    for kind in kinds:
        (ANYTIME if in_use else CLOSED)[kind](folder, choose)
    if not in_use:
        try:
            engine = open_engine(folder, disk, choose)
        except SettingError:
            assert "tag damaged" in kinds, kinds
            shutil.rmtree(folder)
            engine = open_engine(folder, disk, choose)
    use(engine, expected, choose)
    engine.check_integrity()
    stats = engine.prefix.tiers[0].stats()
    engine.close()
    disk.look()
    happened = "disabled" if stats.failed else "blocks lost, or emptied" if stats.corrupt else "as if nothing was"
    for kind in kinds:
        counts[f"{kind}, {'in use' if in_use else 'closed'}", happened] += 1
    assert disk.most <= LIMIT, f"{disk.most} bytes of {LIMIT} in the folder; {kinds}, {happened}"
    if "tag damaged" in kinds:
        shutil.rmtree(folder)


def run(rounds: int, seed: int) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    logging.disable(logging.CRITICAL)
    engine = make_engine(None, "write_back")
    expected = [answer(engine, [prompt])[0] for prompt in prompts()]
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds):
            faulthandler.dump_traceback_later(DEADLINE, exit=True)
            try:
                make_round(Path(place) / "cache", expected, random.Random(f"{seed} {number}"), counts)
            except BaseException:
                print(f"seed {seed}, round {number}", file=sys.stderr)
                raise
    faulthandler.cancel_dump_traceback_later()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    for (kind, happened), count in sorted(run(arguments.rounds, arguments.seed).items()):
        print(f"{kind:45}{happened}: {count}")
    print(f"{arguments.rounds} rounds: no wrong token, no hang, the limit held")


if __name__ == "__main__":
    main()

"""A run as a list of operations: generated from a seed, executed, and minimized if it fails.

An operation is a name and two numbers. These are taken modulo the number of choices at that moment, so every list of
operations can be executed, and the same list with the same configuration always does the same.
"""

import logging
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from .client import Client, letter
from .config import Config, make_config, vary
from .faults import (
    ASKED_SITES,
    DISK_SITES,
    ENGINE_SITES,
    REMOTE_SITES,
    Kill,
    damage_file,
    damage_index,
    noise_in_index,
)
from .model import Violation
from .world import World

Operation = tuple[str, int, int]
# How often each is chosen.
WEIGHTS = {
    "turn": 44,
    "new": 5,
    "continue": 8,
    "fork": 6,
    "repeat": 4,
    "cancel": 4,
    "work": 20,
    "wait": 2,
    "unpin": 2,
    "clear": 0.4,
    "probe": 1,
    "stats": 0.5,
    "break the engine": 3,
    "break the disk": 4,
    "damage a file": 1,
    "damage the index": 0.5,
    "noise in the index": 0.1,
    "neighbour": 3,
    "kill": 0.12,
    "restart": 0.15,
    "break what is asked": 1.5,
    "break the upkeep": 1,
}


# And these, if there is a shared store.
REMOTE_WEIGHTS = {"break the store": 3, "damage a value": 1}


def operations(random: Random, remote: bool) -> Iterator[Operation]:
    """Each seed has its own mixture: what is rare in most is frequent in some, and meets other things there."""
    chosen = WEIGHTS | (REMOTE_WEIGHTS if remote else {})
    names, weights = list(chosen), [weight * random.choice((0.2, 1, 1, 4)) for weight in chosen.values()]
    while True:
        yield random.choices(names, weights)[0], random.getrandbits(30), random.getrandbits(30)


@dataclass
class Outcome:
    """What a script led to: `problem` is the first line of what went wrong, if something did."""

    seed: int | None
    config: Config
    turns: int
    script: list[Operation]
    counts: Counter[str]
    struck: Counter[str]
    problem: str | None = None
    trace: str = ""


def do(world: World, operation: Operation) -> None:
    """Carry out one operation; a kill in it ends the process, and another one starts."""
    name, a, b = operation
    try:
        _ACTIONS[name](world, a, b)
    except Kill:
        world.die()


def run_seed(seed: int, turns: int, folder: str | None = None) -> Outcome:
    """Simulate at least `turns` turns of the engine's thread, with files in `folder`, or else in memory."""
    random = Random(seed)
    config = make_config(random)
    done: list[Operation] = []

    def record() -> Iterator[Operation]:
        for operation in operations(random, config.remote is not None):
            done.append(operation)
            yield operation

    return _run(config, seed, record(), turns, done, folder)


def run_script(config: Config, script: list[Operation]) -> Outcome:
    return _run(config, None, iter(script), None, script)


def _run(
    config: Config,
    seed: int | None,
    script: Iterator[Operation],
    turns: int | None,
    done: list[Operation],
    folder: str | None = None,
) -> Outcome:
    quiet = logging.getLogger("onekv")
    level = quiet.level
    # Faults are the point here, and each is logged with its traceback.
    quiet.setLevel(logging.CRITICAL + 1)
    world: World | None = None
    problem, trace = None, ""
    try:
        world = World(config, folder)
        for operation in script:
            do(world, operation)
            if turns is not None and world.turns >= turns:
                break
        world.close()
    except (Violation, Exception) as error:  # noqa: BLE001  whatever it is, it is the result
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        trace = traceback.format_exc()
    finally:
        if world is not None:
            world.dispose()
        quiet.setLevel(level)
    return Outcome(
        seed,
        config,
        world.turns if world else 0,
        done,
        world.counts if world else Counter(),
        world.faults.struck if world else Counter(),
        problem,
        trace,
    )


def shrink(config: Config, script: list[Operation], problem: str, tries: int = 400) -> list[Operation]:
    """A shorter script that fails in the same way: parts are taken out, large ones first, as long as that works."""
    size = len(script) // 2
    while size and tries:
        start = 0
        while start < len(script) and tries:
            shorter = script[:start] + script[start + size :]
            tries -= 1
            if _kind(run_script(config, shorter).problem) == _kind(problem):
                script = shorter
            else:
                start += size
        size //= 2
    return script


def _kind(problem: str | None) -> str | None:
    """What makes two problems the same: not the numbers and addresses in them."""
    return None if problem is None else re.sub(r"0x[0-9a-f]+|[0-9]+", "", problem)[:60]


# Operations


def _turn(world: World, a: int, b: int) -> None:
    for _ in range(1 + a % 6):
        world.turn()


def _ask(world: World, salt: str, prompt: list[int], a: int) -> None:
    """Submit a request, some of which are special."""
    options = Random(a)
    client = Client(
        world.faults,
        prompt or [1],
        options.choice((1, 2, 4, 7, 12)),
        salt,
        pin=options.random() < 0.08,
        constrained=options.random() < 0.15,
        logprobs=options.random() < 0.1,
        stop=letter(options.randrange(1, 5)) + letter(options.randrange(1, 5)) if options.random() < 0.1 else None,
        cancel_after=options.randint(1, 5) if options.random() < 0.08 else None,
    )
    client.cancel = lambda: world.thread.cancel([client.job])
    world.submit(client)


def _tokens(seed: int, most: int) -> list[int]:
    """Few different ones: prompts often begin alike."""
    random = Random(seed)
    return [random.randint(1, 3) for _ in range(random.randint(1, most))]


def _new(world: World, a: int, b: int) -> None:
    _ask(world, ("", "", "other")[b % 3], _tokens(b % 4096, 30), a)


def _talk(world: World, b: int) -> tuple[str, list[int]]:
    return world.talks[b % len(world.talks)] if world.talks else ("", [1, 2])


def _continue(world: World, a: int, b: int) -> None:
    salt, tokens = _talk(world, b)
    _ask(world, salt, [*tokens, *_tokens(a % 1024, 9)], a)


def _fork(world: World, a: int, b: int) -> None:
    salt, tokens = _talk(world, b)
    _ask(world, salt, [*tokens[: a % (len(tokens) + 1)], *_tokens(b % 1024, 9)], a)


def _repeat(world: World, a: int, b: int) -> None:
    salt, tokens = _talk(world, b)
    _ask(world, salt, tokens[: max(1, len(tokens) - a % 3)], a)


def _cancel(world: World, a: int, b: int) -> None:
    if world.clients:
        client = world.clients[a % len(world.clients)]
        client.cancelled = True
        client.cancel()


def _work(world: World, a: int, b: int) -> None:
    world.work(1 + a % 4)


def _wait(world: World, a: int, b: int) -> None:
    world.clock.seconds += (0.02, 0.5, 2.0, 7.0)[a % 4]


def _unpin(world: World, a: int, b: int) -> None:
    if world.pins:
        tokens, salt = world.pins[a % len(world.pins)]
        world.call(lambda engine: engine.prefix.unpin(tokens, salt))


def _clear(world: World, a: int, b: int) -> None:
    world.call(lambda engine: engine.clear_cache())


def _probe(world: World, a: int, b: int) -> None:
    salt, tokens = _talk(world, b)
    world.call(lambda engine: engine.prefix.probe(tokens, salt))


def _stats(world: World, a: int, b: int) -> None:
    world.call(lambda engine: [tier.stats() for tier in engine.prefix.tiers])


def _break_engine(world: World, a: int, b: int) -> None:
    world.faults.arm(ENGINE_SITES[a % len(ENGINE_SITES)], 1 + b % 12)


def _break_asked(world: World, a: int, b: int) -> None:
    world.faults.arm(ASKED_SITES[a % len(ASKED_SITES)], 1 + b % 12)


def _break_upkeep(world: World, a: int, b: int) -> None:
    world.faults.arm("upkeep", 1 + b % 12)


def _break_disk(world: World, a: int, b: int) -> None:
    world.faults.arm(DISK_SITES[a % len(DISK_SITES)], 1 + b % 40)


def _damage_file(world: World, a: int, b: int) -> None:
    world.counts["file damaged"] += damage_file(world.folder / "kv", a, b)


def _damage_index(world: World, a: int, b: int) -> None:
    world.counts["row damaged"] += damage_index(world.folder / "kv" / "index.db", a, b)


def _noise(world: World, a: int, b: int) -> None:
    world.counts["noise in the index"] += noise_in_index(world.folder / "kv" / "index.db", a)


def _neighbour(world: World, a: int, b: int) -> None:
    if world.config.disk_limit is not None:
        world.neighbour.act(world.config.disk_limit, a, b)


def _break_store(world: World, a: int, b: int) -> None:
    world.faults.arm(REMOTE_SITES[a % len(REMOTE_SITES)], 1 + b % 20)


def _damage_value(world: World, a: int, b: int) -> None:
    world.counts["value damaged"] += world.store.damage(a, b)


def _kill(world: World, a: int, b: int) -> None:
    raise Kill


def _restart(world: World, a: int, b: int) -> None:
    world.restart(vary(world.config, Random(a)))


_ACTIONS: dict[str, Callable[[World, int, int], None]] = {
    "turn": _turn,
    "new": _new,
    "continue": _continue,
    "fork": _fork,
    "repeat": _repeat,
    "cancel": _cancel,
    "work": _work,
    "wait": _wait,
    "unpin": _unpin,
    "clear": _clear,
    "probe": _probe,
    "stats": _stats,
    "break the engine": _break_engine,
    "break what is asked": _break_asked,
    "break the upkeep": _break_upkeep,
    "break the disk": _break_disk,
    "damage a file": _damage_file,
    "damage the index": _damage_index,
    "noise in the index": _noise,
    "neighbour": _neighbour,
    "break the store": _break_store,
    "damage a value": _damage_value,
    "kill": _kill,
    "restart": _restart,
}

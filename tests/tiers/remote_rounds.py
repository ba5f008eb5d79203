"""Random rounds of faults of a store, under two LLMs that share it: no wrong token, no failed request, and it recovers.

    PYTHONPATH=src:tests:tests/tiers python tests/tiers/remote_rounds.py --rounds 200 --seed 1

A round: something happens to the store, conversations go on over it, it is over, and both LLMs use the store again.
"""

import argparse
import random
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)

# isort: split
from remote_parts import (
    BLOCK,
    SECRET,
    SlowLink,
    Valkey,
    ask,
    flush,
    llm_of,
    prompt_of,
    reading_is_worth_it,
    remote,
    until,
)
from tqdm import tqdm

from onekv.tiers.remote import health
from onekv.tiers.remote.seal import SEAL, Sealer

TIMEOUT = "300ms"


def damage(valkey: Valkey, chance: random.Random) -> None:
    """Bits, lengths and places of some values."""
    client, names = valkey.client(), valkey.names()
    for name in chance.sample(names, min(len(names), 5)):
        value = bytearray(client.get(name) or b"")
        what = chance.randrange(5)
        if what == 0 and value:
            value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        elif what == 1:
            value = value[: chance.randrange(len(value) + 1)]
        elif what == 2:
            value = bytearray(client.get(chance.choice(names)) or b"")
        elif what == 3:
            value += b"more"
        else:
            client.delete(name)
            continue
        client.set(name, bytes(value))


def forge(valkey: Valkey, chance: random.Random) -> None:
    """Other content, sealed by who knows all but the secret."""
    client, names = valkey.client(), valkey.names()
    for name in chance.sample(names, min(len(names), 5)):
        value = bytearray(client.get(name) or b"")
        if len(value) > SEAL + 64:
            value[-SEAL - 64 : -SEAL] = chance.randbytes(64)
            Sealer(name.decode().split("/")[2], "not " + SECRET, BLOCK).seal(name.decode(), memoryview(value))
            client.set(name, bytes(value))


class Writer:
    """Another writer of the same blocks: removes some and puts them again, over and over, while others write them."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, valkey: Valkey, chance: random.Random) -> None:
        client, chance = valkey.client(), random.Random(chance.random())
        self._over.clear()

        def write() -> None:
            blocks = {name: value for name in valkey.names() if (value := client.get(name)) is not None}
            while blocks and not self._over.wait(0.001):
                name = chance.choice(list(blocks))
                client.delete(name)
                client.set(name, blocks[name], nx=True)

        self._thread = threading.Thread(target=write)
        self._thread.start()

    def end(self, valkey: Valkey) -> None:
        assert self._thread is not None
        self._over.set()
        self._thread.join()


def restart(valkey: Valkey) -> None:
    valkey.stop()
    valkey.start()


# What happens, and what ends it.
Fault = tuple[Callable[[Valkey, random.Random], object], Callable[[Valkey], object]]
WRITER = Writer()
FAULTS: dict[str, Fault] = {
    "nothing": (lambda valkey, chance: None, lambda valkey: None),
    "damage": (damage, lambda valkey: None),
    "forged": (forge, lambda valkey: None),
    "another writer": (WRITER.begin, WRITER.end),
    "killed": (lambda valkey, chance: valkey.stop(), lambda valkey: valkey.start()),
    "restarted": (lambda valkey, chance: restart(valkey), lambda valkey: None),
    "hangs": (lambda valkey, chance: valkey.signal(signal.SIGSTOP), lambda valkey: valkey.signal(signal.SIGCONT)),
    "emptied": (lambda valkey, chance: valkey.client().flushall(), lambda valkey: None),
    "full": (
        lambda valkey, chance: valkey.client().config_set("maxmemory", 1),
        lambda valkey: valkey.client().config_set("maxmemory", 0),
    ),
    "closed": (
        lambda valkey, chance: valkey.client().config_set("requirepass", "another"),
        lambda valkey: valkey.client("another").config_set("requirepass", ""),
    ),
    "stalls": (
        lambda valkey, chance: valkey.client().execute_command("CLIENT", "PAUSE", 2000, "ALL"),
        lambda valkey: until(lambda: valkey.client().ping()),
    ),
}


def rounds(valkey: Valkey, seed: int, count: int, progress: bool = False) -> Counter[str]:
    """So many rounds; raises if anything is wrong. How often each fault came, and what both tiers counted."""
    happened: Counter[str] = Counter()
    # A round takes seconds, not minutes.
    health.FIRST_PAUSE, health.LONGEST_PAUSE = 0.2, 1.0
    chance = random.Random(seed)
    link = SlowLink(valkey.port)
    faults: dict[str, Fault] = {
        **FAULTS,
        # Every call takes two seconds.
        "slow": (lambda valkey, chance: setattr(link, "seconds", 2.0), lambda valkey: setattr(link, "seconds", 0.0)),
    }
    url = valkey.url(TIMEOUT).replace(str(valkey.port), str(link.port))
    chats = [prompt_of(number, 80) for number in range(4)]
    with llm_of(url=url) as first, llm_of(url=url) as second, llm_of(prefix_cache=False) as alone:
        for number in tqdm(range(count), disable=None if progress else True, unit="round"):
            name = chance.choice(list(faults))
            begin, end = faults[name]
            happened[name] += 1
            before = chance.random() < 0.5
            if before:
                begin(valkey, chance)
            for _ in range(3):
                llm = chance.choice([first, second])
                reading_is_worth_it(llm)
                if chance.random() < 0.7:
                    llm.engine.prefix.forget()
                chat = chance.randrange(len(chats))
                chats[chat] += prompt_of(chance.randrange(10**6), chance.randrange(1, 30))
                answer, _ = ask(llm, chats[chat], 4)
                assert answer == ask(alone, chats[chat], 4)[0], f"round {number} of seed {seed} ({name}): a wrong token"
                chats[chat] = (chats[chat] + answer)[:] if len(chats[chat]) < 250 else prompt_of(chat + number, 80)
                if not before:
                    before = True
                    begin(valkey, chance)
            end(valkey)
            flush(first)
            for llm in (first, second):
                until(lambda llm=llm: "paused" not in str(remote(llm).failed))
        # After all of it, one reads what the other has written.
        prompt = prompt_of(seed + 10**6, 100)

        def shared() -> bool:
            ask(first, prompt, 2)
            flush(first)
            second.engine.prefix.forget()
            reading_is_worth_it(second)
            return ask(second, prompt, 2)[1] >= 96

        until(shared)
        # So that rounds in which nothing was found out do not pass for good ones.
        for what in ("hits", "corrupt", "forged", "pauses", "late"):
            happened[f"({what})"] = sum(getattr(remote(llm), what) for llm in (first, second))
    link.close()
    return happened


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Valkey(Path(folder))
        try:
            counts = rounds(server, arguments.seed, arguments.rounds, progress=True)
            print(f"{arguments.rounds} rounds, nothing wrong: {', '.join(f'{n} {what}' for what, n in counts.items())}")
        finally:
            server.stop()

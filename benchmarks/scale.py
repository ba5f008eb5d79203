"""Many servers over one store: what is found where, and what goes through the store. Figures of docs/scale.md.

    python benchmarks/scale.py [--servers 1 10 100] [--requests 80] [--seed 1] [--json FILE]

No model runs. Every server is the real prefix cache over a real pool (index, eviction, leases) with the real remote
tier behind it, which looks up, seals, writes and reads as it does in a server; only the KV is small (four bytes per
token), the store is a dict that evicts the least recently used value, and time is that of the simulation. A server
answers one request at a time, and reads whatever the store has: whether that is worth it is calculated in
docs/scale.md, from the figures that are printed here.

The load: conversations, of which `ACTIVE` per server are going on at any time. A turn is that of a random one of them.
All begin with a system prompt, which has the k-th place in popularity with a probability in proportion to 1/k. Every
case sees the same conversations in the same order:

    affinity    each conversation has its server, as a proxy that hashes a header sees to
    random      each request goes to any server
    none, twice, all    without a store, or what is written there (--remote-write)
"""

import argparse
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import onekv  # noqa: F401  # Before mlx: it finds it a faster library.
from onekv.memory.kv import KVMemory
from onekv.memory.layout import Group, KVLayer, Layout, Rule
from onekv.prefix.cache import PrefixCache
from onekv.prefix.find import NotKnownYet
from onekv.prefix.lease import Lease
from onekv.tables import table
from onekv.tiers.files import Clock
from onekv.tiers.image import images_of
from onekv.tiers.remote.common import Setup
from onekv.tiers.remote.seal import Sealer
from onekv.tiers.remote.tier import RemoteTier

# isort: split
import mlx.core as mx

BLOCK = 64
# Of an 8B model with 32 layers and 8 KV heads of 128 in 16 bits: keys and values.
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
# Blocks of a server's pool (4 GiB of such KV), and of the store for each server (16 GiB).
POOL, STORED = 512, 2048
# Conversations that are going on, per server; seconds between two requests of one server.
ACTIVE, SECONDS = 16, 1.0
# System prompts: how many, and the range of their lengths. Turns of a conversation, tokens of a question and an answer:
# means of geometric distributions.
PROMPTS, SHORTEST, LONGEST = 64, 256, 2048
TURNS, QUESTION, ANSWER = 6, 120, 250
# No more than this in a conversation: then it ends.
CONTEXT = 16384
VOCABULARY = 50000
CASES = [("affinity", "none"), ("affinity", "twice"), ("random", "none"), ("random", "twice"), ("random", "all")]
# The share of requests that only fills the caches.
WARM_UP = 0.5
# Bytes per second that one Valkey or Redis server moves: docs/scale.md, four threads, rounded.
NODE = 1.5e9
# Cases that are multiplied to sizes that cannot be simulated.
MULTIPLIED = [("affinity", "twice"), ("random", "all")]


class Now(Clock):
    """Time that passes only when told to."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class DictStore:
    """The store of all servers, of so many values; the least recently used one is evicted."""

    def __init__(self, values: int) -> None:
        self._limit = values
        self.values: OrderedDict[str, bytes] = OrderedDict()
        self.puts = self.evicted = self.asked = 0
        self.gets: Counter[str] = Counter()

    def heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        self.asked += len(names)
        return [self.values[name][:size] if name in self.values else None for name in names]

    def get(self, name: str, size: int) -> memoryview | None:
        if name not in self.values:
            return None
        self.values.move_to_end(name)
        self.gets[name] += 1
        return memoryview(bytearray(self.values[name][:size]))

    def put(self, name: str, value: memoryview) -> bool:
        if name in self.values or not name.endswith(".safetensors"):
            return False
        self.values[name] = bytes(value)
        self.puts += 1
        if len(self.values) > self._limit:
            self.values.popitem(last=False)
            self.evicted += 1
        return True

    def delete(self, name: str) -> None:
        assert not name.endswith(".safetensors"), "nothing is wrong with any value"

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Tokens:
    """Of prompts: all, and where they came from."""

    prompt: int = 0
    pool: int = 0
    store: int = 0

    @property
    def computed(self) -> int:
        return self.prompt - self.pool - self.store


class Server:
    def __init__(self, store: DictStore, write: str, clock: Clock) -> None:
        layout = Layout((Group(Rule(), (KVLayer("layer", 1, 1, 1, mx.float16),)),), (), (), VOCABULARY, 1)
        memory = KVMemory(layout, (POOL,), BLOCK, CONTEXT, kernels=False)
        images = images_of(layout, BLOCK)
        sealer = Sealer("0" * 32, "a secret of all servers", BLOCK)
        setup = Setup(store, "the store", sealer, images, BLOCK, {0: None}, None, write, clock, threads=False)
        room = 64 * images[0].size
        self.tier = RemoteTier(setup, room, room, 1e12) if write != "none" else None
        self.cache = PrefixCache(memory, "scale", 0, [self.tier] if self.tier is not None else [], now=clock.monotonic)
        self.tokens = Tokens()

    def answer(self, prompt: list[int], answer: list[int]) -> None:
        lease, from_store = self._open(prompt, len(prompt) + len(answer))
        self.tokens.prompt += len(prompt)
        self.tokens.store += from_store
        self.tokens.pool += lease.sequence.length - from_store
        # What the model would do.
        rest = len(prompt) + len(answer) - lease.sequence.length
        lease.grow(rest)
        lease.sequence.length += rest
        lease.finish(prompt + answer)
        while self.cache.unshared:
            self.cache.share(1.0)
            self._work()

    @property
    def _read(self) -> int:
        """Blocks read from the store so far."""
        return self.tier.stats().hits if self.tier is not None else 0

    def _open(self, prompt: list[int], length: int) -> tuple[Lease, int]:
        """A lease that has loaded, and how many of its tokens the store had."""
        while True:
            read = self._read
            try:
                lease = self.cache.open(prompt, length)
            except NotKnownYet:
                self._work()
                continue
            came = [True]
            while lease.loading is not None:
                self._work()
                came = [whole for _, whole in self.cache.load([lease], 1.0)]
            # If not, something was evicted from the store after it had been looked up.
            if all(came):
                return lease, (self._read - read) * BLOCK

    def _work(self) -> None:
        """What the tier's threads would do."""
        while self.tier is not None and self.tier.work():
            pass


@dataclass(eq=False)
class Conversation:
    number: int
    tokens: list[int]
    turns: int


def conversations(random: np.random.Generator, active: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Requests without end: which conversation, its prompt, its answer."""

    def tokens(count: int) -> list[int]:
        return random.integers(0, VOCABULARY, count).tolist()

    systems = [tokens(int(length)) for length in random.integers(SHORTEST, LONGEST + 1, PROMPTS)]
    popularity = 1 / np.arange(1, PROMPTS + 1)
    popularity /= popularity.sum()
    begun = 0

    def begin() -> Conversation:
        nonlocal begun
        begun += 1
        system = systems[int(random.choice(PROMPTS, p=popularity))]
        return Conversation(begun, list(system), int(random.geometric(1 / TURNS)))

    going_on = [begin() for _ in range(active)]
    while True:
        place = int(random.integers(active))
        talk = going_on[place]
        prompt = talk.tokens + tokens(int(random.geometric(1 / QUESTION)))
        answer = tokens(int(random.geometric(1 / ANSWER)))
        yield talk.number, prompt, answer
        talk.tokens, talk.turns = prompt + answer, talk.turns - 1
        if not talk.turns or len(talk.tokens) > CONTEXT // 2:
            going_on[place] = begin()


def simulate(
    count: int, requests: int, routing: str, write: str, seed: int, stored: int = STORED, warm: float = WARM_UP
) -> dict[str, Any]:
    """`requests` per server; the figures are of those after the first, a share of `warm`."""
    clock, store = Now(), DictStore(stored * count)
    servers = [Server(store, write, clock) for _ in range(count)]
    load, route = conversations(np.random.default_rng(seed), ACTIVE * count), np.random.default_rng(seed + 1)
    warm_up = int(requests * count * warm)
    before = (0, 0, 0)
    for done in range(requests * count):
        if done == warm_up:
            for server in servers:
                server.tokens = Tokens()
            before, store.gets = (store.puts, store.evicted, store.asked), Counter()
        number, prompt, answer = next(load)
        servers[number % count if routing == "affinity" else int(route.integers(count))].answer(prompt, answer)
        clock.seconds += SECONDS / count
    for server in servers:
        server.cache.check_integrity()
    measured = requests * count - warm_up
    puts, evicted, asked = (
        now - then for now, then in zip((store.puts, store.evicted, store.asked), before, strict=True)
    )
    gets = store.gets.total()
    per_server = BLOCK * TOKEN_BYTES / (measured / count * SECONDS)
    return {
        "servers": count,
        "routing": routing,
        "write": write,
        "requests": measured,
        "prompt_tokens": sum(server.tokens.prompt for server in servers),
        "pool_tokens": sum(server.tokens.pool for server in servers),
        "store_tokens": sum(server.tokens.store for server in servers),
        "computed_tokens": sum(server.tokens.computed for server in servers),
        "evicted_from_pools": sum(server.cache.stats().evicted_blocks for server in servers),
        "puts": puts,
        "gets": gets,
        "keys_asked_for": asked,
        "keys_evicted": evicted,
        "keys": len(store.values),
        "keys_read": len(store.gets),
        "hottest_key_gets": max(store.gets.values(), default=0),
        "bytes_in_per_server_s": puts * per_server / count,
        "bytes_out_per_server_s": gets * per_server / count,
    }


def row(result: dict[str, Any]) -> list[str]:
    shares = [result[f"{source}_tokens"] / result["prompt_tokens"] for source in ("pool", "store", "computed")]
    rates = [result[f"bytes_{way}_per_server_s"] / 1e6 for way in ("in", "out")]
    return [
        str(result["servers"]),
        f"{result['routing']}, {result['write']}",
        *(f"{share:.1%}" for share in shares),
        *(f"{rate:.0f} MB/s" for rate in rates),
        f"{result['keys_asked_for'] / result['requests']:.0f}",
        f"{result['hottest_key_gets'] / result['gets']:.2%}" if result["gets"] else "",
    ]


def multiplied(results: Sequence[dict[str, Any]], servers: int) -> list[list[str]]:
    """So many servers, each with the traffic that one has in the largest simulation."""
    most = max(result["servers"] for result in results)
    at = {(result["routing"], result["write"]): result for result in results if result["servers"] == most}
    rows = []
    for routing, write in MULTIPLIED:
        result, without = at[routing, write], at[routing, "none"]
        into, out = (servers * result[f"bytes_{way}_per_server_s"] for way in ("in", "out"))
        rate = servers / SECONDS / result["requests"]
        rows.append(
            [
                f"{servers:,}",
                f"{routing}, {write}",
                f"{into / 1e9:,.1f} GB/s",
                f"{out / 1e9:,.1f} GB/s",
                f"{math.ceil((into + out) / NODE):,}",
                f"{result['keys_asked_for'] * rate:,.0f}",
                f"{result['hottest_key_gets'] * rate * BLOCK * TOKEN_BYTES / 1e6:,.0f} MB/s",
                f"{(without['computed_tokens'] - result['computed_tokens']) * rate:,.0f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--requests", type=int, default=80, help="per server; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    # On one server there is nothing to route.
    results = [
        simulate(count, arguments.requests, routing, write, arguments.seed)
        for count in arguments.servers
        for routing, write in CASES
        if count > 1 or routing == "affinity"
    ]
    columns = ["servers", "routing, store", "pool", "store", "computed", "in", "out", "asked", "hottest key"]
    print(table([row(result) for result in results], columns))
    print("Shares of all prompt tokens; into and out of the store per server; keys asked for per request;")
    print(f"share of the hottest key in all reads. {time.perf_counter() - began:.0f} s")
    if max(arguments.servers) > 1:
        columns = ["servers", "routing, store", "in", "out", "nodes", "keys asked/s", "hottest key", "tokens saved/s"]
        print("\nMultiplied:")
        print(table([*multiplied(results, 100), *multiplied(results, 10000)], columns))
    if arguments.json is not None:
        names = ("BLOCK", "TOKEN_BYTES", "POOL", "STORED", "ACTIVE", "SECONDS", "PROMPTS", "SHORTEST", "LONGEST")
        names += ("TURNS", "QUESTION", "ANSWER", "CONTEXT", "WARM_UP")
        load = {name.lower(): globals()[name] for name in names}
        recorded = {"seed": arguments.seed, "requests_per_server": arguments.requests, "load": load, "results": results}
        arguments.json.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Endurance test: sends thousands of requests of all kinds to a small server, then checks that nothing was left behind.

The server has a pool for about 2,000 tokens in blocks of 16, 8 concurrent sequences and a short queue, so that blocks
are evicted, requests wait, and some are told to retry later. The clients send a seeded mixture of chat, completions and
messages with shared prefixes, streamed or not, some with logprobs, stop strings, two answers or a JSON schema. About
10 % close the connection in the middle of an answer, and about 5 % send something that must be rejected. Every request
must have its expected outcome; otherwise the run fails, and also on any of these:

    while it runs    a block that is lost or counted twice, more bytes in the pool than --kv-memory
    at the end       a request that is left over, a block that is not free after the cache was cleared, a snapshot,
                     MLX's active memory more than one block's size away from its value after the warm-up,
                     more Python objects than after the warm-up by more than 100 (what libraries cache) plus one for
                     every twenty requests, not counting those of idle threads
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OneKVError
from ..models import DEFAULT_MODEL
from ..units import format_size, parse_size
from .clients import ServerProcess, events, http, onekv_server, save
from .mixture import MAX_BODY, Call, Mixture, Reply

if TYPE_CHECKING:
    import httpx2

MAX_BATCH, BLOCK_SIZE = 8, 16
# The pool by model: about 2,000 tokens. `tiny` has random weights and is quick, so that many requests take little time.
KV_MEMORY = {"tiny": "34MiB", DEFAULT_MODEL: "96MiB"}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CHECK_EVERY = 200
# Enough that every kind of request was there, and what libraries load or cache for it.
WARM_UP = (120, 200)
SETTLE_S = 60.0
LOOKS, LOOK_S = 6, 0.3
# What a thread that waits for work has; how many there are depends on the moment, and they are not counted.
THREAD_OBJECTS = 36
# A request that is rejected this often with "retry later" is starved.
MOST_TRIES = 100


def run(arguments: argparse.Namespace) -> int:
    """1 if anything was wrong."""
    report = soak(arguments.requests, arguments.clients, arguments.seed, arguments.model)
    print(report.text())
    for problem in report.wrong:
        print(f"wrong: {problem}", file=sys.stderr)
    if arguments.json:
        from .decode import about

        text = json.dumps({**about(arguments.model), **vars(report)}, indent=2)
        Path(arguments.json).write_text(text + "\n")
    return 1 if report.wrong else 0


@dataclass
class Report:
    requests: int
    clients: int
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tokens: int = 0
    evicted_blocks: int = 0
    # Of the prompts' tokens, how many were cached.
    hit_rate: float = 0.0
    active: dict[str, int] = field(default_factory=dict)
    resident: dict[str, int | None] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def text(self) -> str:
        outcomes = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(self.outcomes.items()))
        rows = {
            "requests": f"{self.requests} of {self.clients} clients; {outcomes}",
            "time": f"{self.seconds:.0f} s, {self.requests / self.seconds:.1f} requests/s",
            "generated tokens": f"{self.tokens}, {self.tokens / self.seconds:.1f}/s",
            "prompt tokens cached": f"{self.hit_rate:.0%}",
            "evicted blocks": str(self.evicted_blocks),
            "MLX active memory": _steps({name: format_size(size) for name, size in self.active.items()}),
            "process in memory": _steps({n: format_size(s) for n, s in self.resident.items() if s is not None}),
            "Python objects": _steps(self.objects),
            "wrong": str(len(self.wrong)),
        }
        return "\n".join(f"{name:<22}{value}" for name, value in rows.items())


def _steps(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def soak(requests: int, clients: int, seed: int = 0, model: str = "tiny") -> Report:
    """Start a server, send it everything, stop it."""
    http()
    kv_memory = KV_MEMORY[model]
    # Every client's request has a place in the batch or the queue, but not every second answer of one.
    waiting = max(0, clients - MAX_BATCH) + 2
    flags = {
        "--kv-memory": kv_memory,
        "--max-batch": MAX_BATCH,
        "--block-size": BLOCK_SIZE,
        "--max-waiting": waiting,
        "--max-body": MAX_BODY,
        # Guesses make steps of further widths now and then, each with thousands of objects for as long as it runs.
        "--speculate": "off",
    }
    with tempfile.TemporaryDirectory() as folder:
        name = save_tiny(Path(folder)) if model == "tiny" else model
        with onekv_server(name, *(str(part) for item in flags.items() for part in item)) as server:
            return asyncio.run(_Soak(server, requests, clients, seed, parse_size(kv_memory)).run())


def save_tiny(folder: Path, seed: int = 0, **changes: Any) -> str:
    """A small model with random weights, by `seed`, and the default model's tokenizer, in mlx-lm's format.

    `changes` are made to its config.
    """
    import mlx.core as mx
    from mlx_lm.models import llama

    from ..models import load_model

    tokenizer = load_model(DEFAULT_MODEL, lazy=True).tokenizer
    config = {**TINY, "vocab_size": len(tokenizer), "eos_token_id": sorted(tokenizer.eos_token_ids), **changes}
    mx.random.seed(seed)
    save(folder, llama.Model(llama.ModelArgs.from_dict(config)), config, tokenizer)
    return str(folder)


@dataclass(frozen=True)
class _State:
    """The server with nothing to do and nothing cached."""

    stats: dict[str, Any]
    objects: int
    resident: int | None
    counted: dict[str, float]


class _Soak:
    def __init__(self, server: ServerProcess, requests: int, clients: int, seed: int, budget: int) -> None:
        self._budget = budget
        self._server, self._mixture = server, Mixture(seed, server.model)
        self._clients, self._left, self._sent = clients, 0, 0
        self._check_every = max(1, min(CHECK_EVERY, requests // 3))
        self._report = Report(requests, clients)

    async def run(self) -> Report:
        report = self._report
        least, most = WARM_UP
        await self._drive(min(most, max(least, 2 * self._clients, report.requests // 10)))
        report.outcomes.clear()
        self._sent = 0
        before = await self._settle()
        begin = time.perf_counter()
        await self._drive(report.requests)
        report.seconds = time.perf_counter() - begin
        after = await self._settle()
        self._compare(before, after)
        return report

    async def _drive(self, requests: int) -> None:
        """Send that many, from all clients at once."""
        self._left = requests
        limits = http().Limits(max_connections=None)
        async with http().AsyncClient(timeout=600, limits=limits, base_url=self._server.url) as client:
            await asyncio.gather(*(self._client(client) for _ in range(self._clients)))

    async def _client(self, client: "httpx2.AsyncClient") -> None:
        while self._left > 0:
            self._left -= 1
            call = self._mixture.next()
            outcome = await self._send(client, call)
            self._report.outcomes[outcome] += 1
            self._sent += 1
            if self._sent % self._check_every == 0:
                await self._check()

    async def _send(self, client: "httpx2.AsyncClient", call: Call) -> str:
        """What came of it; what should not have is in the report."""
        for _ in range(MOST_TRIES):
            try:
                status, problem, later = await asyncio.wait_for(self._once(client, call), call.patience)
            except TimeoutError:
                return "closed"
            except http().TransportError as error:
                process = self._server.process
                if process is not None and process.poll() is not None:
                    last = self._server.log.read_text()[-2000:]
                    raise OneKVError(f"the server ended; its log ends with:\n{last}") from None
                return self._wrong(call, f"{type(error).__name__}: {error}")
            if status != 429:
                expected = status == call.status and problem is None
                return str(status) if expected else self._wrong(call, f"status {status}: {problem}")
            if later is None:
                return self._wrong(call, "status 429 without Retry-After")
            self._report.outcomes["429, then tried again"] += 1
            await asyncio.sleep(later)
        return self._wrong(call, f"{MOST_TRIES} times 429")

    async def _once(self, client: "httpx2.AsyncClient", call: Call) -> tuple[int, str | None, float | None]:
        """Status, what is wrong with the answer, and after how many seconds to try again."""
        headers = {"Authorization": f"Bearer {call.key}", "Content-Type": "application/json"}
        async with client.stream("POST", call.path, content=call.body, headers=headers) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode(errors="replace")
                problem = None if answer.status_code == call.status else said[:500]
                later = answer.headers.get("Retry-After")
                return answer.status_code, problem, float(later) if later is not None else None
            reply = Reply()
            if answer.headers["Content-Type"].startswith("text/event-stream"):
                async for event in events(answer):
                    reply.add(event)
            else:
                reply.add(json.loads(await answer.aread()))
        return 200, call.check(reply), None

    def _wrong(self, call: Call, what: str) -> str:
        self._report.wrong.append(f"{call.kind} to {call.path}: {what}; it was sent {call.body[:300]!r}")
        return "wrong"

    # The server's own figures

    async def _check(self) -> dict[str, Any]:
        """While requests run: everything adds up, and within the budget."""
        stats: dict[str, Any] = await asyncio.to_thread(self._server.get, "/admin/cache")
        objects = (await asyncio.to_thread(self._server.get, "/admin/integrity"))["objects"]
        active, pool = stats["memory"]["active"], stats["memory"]["pool"]
        if pool > self._budget:
            self._report.wrong.append(f"the pool has {pool} bytes; the budget is {self._budget}")
        print(
            f"{self._sent} requests, {len(self._report.wrong)} wrong, {stats['requests']['running']} run, "
            f"{stats['requests']['waiting']} wait, active memory {format_size(active)}, {objects} objects",
            file=sys.stderr,
            flush=True,
        )
        return stats

    async def _settle(self) -> _State:
        """Wait until nothing runs, and clear the cache."""
        deadline = time.monotonic() + SETTLE_S
        while any((await self._check())["requests"].values()):
            if time.monotonic() > deadline:
                self._report.wrong.append(f"requests were still there {SETTLE_S:.0f} s after the last client left")
                break
            await asyncio.sleep(1)
        server = self._server
        cleared = http().delete(f"{server.url}/admin/cache", headers=server.headers, timeout=60)
        if cleared.status_code != 200:
            self._report.wrong.append(f"the cache cannot be cleared: {cleared.text[:500]}")
        metrics = http().get(f"{server.url}/metrics", headers=server.headers, timeout=60).text
        counted = {name: float(value) for name, value in re.findall(r"^onekv_(\w+)_tokens_total (\S+)$", metrics, re.M)}
        # The first of these may itself make things that stay; and what closes connections takes a moment.
        counts = []
        for _ in range(LOOKS):
            found = server.get("/admin/integrity")
            counts.append(found["objects"] - THREAD_OBJECTS * found["threads"])
            await asyncio.sleep(LOOK_S)
        objects = min(counts)
        return _State(server.get("/admin/cache"), objects, server.resident("VmRSS"), counted)

    def _compare(self, before: _State, after: _State) -> None:
        report, wrong = self._report, self._report.wrong
        counted = {name: after.counted[name] - before.counted[name] for name in after.counted}
        report.tokens = int(counted["generated"])
        report.hit_rate = counted["cached"] / max(1, counted["prompt"])
        prefix = after.stats["prefix"]
        report.evicted_blocks = prefix["evicted_blocks"] - before.stats["prefix"]["evicted_blocks"]
        start, end = before.stats["memory"]["active"], after.stats["memory"]["active"]
        report.active = {"start": start, "peak": after.stats["memory"]["peak"], "end": end}
        report.resident = {"start": before.resident, "peak": self._server.resident(), "end": after.resident}
        report.objects = {"start": before.objects, "end": after.objects}
        for pool in after.stats["pools"]:
            if pool["free"] != pool["blocks"] or pool["held"] or pool["reserved"]:
                wrong.append(f"blocks are still in use after the cache was cleared: {pool}")
        if prefix["nodes"] or prefix["snapshots"] or prefix["snapshot_bytes"]:
            wrong.append(f"the prefix cache is not empty after it was cleared: {prefix}")
        if abs(end - start) > sum(pool["block_bytes"] for pool in after.stats["pools"]):
            wrong.append(f"active memory was {start} bytes at the start and is {end} at the end")
        if after.objects - before.objects > 100 + report.requests // 20:
            wrong.append(f"there were {before.objects} Python objects at the start and are {after.objects} at the end")

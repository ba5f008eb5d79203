"""OneKV's server compared with mlx_lm.server, over HTTP, on the same weights and the same machine, in one run.

The model is saved once in mlx-lm's format, in the dtype that OneKV runs it in, so both sides have the same weights,
tokenizer and chat template; each must give the same greedy answer to a short prompt before it is measured. Each
measurement has a fresh server process, so nothing is cached from the one before; the two sides take turns and never run
at the same time. mlx_lm.server runs unchanged, with its defaults and with OneKV's BLAS. OneKV has a pool of 384 MiB,
which is enough for both cases.

    agent    one conversation of many turns: a system prompt of about 1,200 tokens, about 200 tokens of new text a turn,
             30 generated; every turn sends all of the conversation, with the answers that this server gave
    chats    conversations that start together and share a system prompt of about 1,000 tokens; two turns each, about 60
             tokens of new text a turn, 64 generated

All answers are streamed and greedy. Times are measured by the client. Memory:

    KV       OneKV: the maximum number of blocks held by running requests or the prefix cache, times their size. mlx-lm:
             MLX's active memory minus the weights, ignoring what lasts less than a second (the minimum of every second,
             and the maximum of these): its caches, but not the activations of a step
    peak     MLX's own peak minus the weights: OneKV's whole pool, which is allocated at startup, and activations
    used     the same, minus the blocks of OneKV's pool that were never used: KV and activations of both
    process  the maximum resident memory of the process, including weights and code
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OneKVError
from ..units import format_size
from .clients import Answer, ServerProcess, chat, http, mlx_lm_server, onekv_server, percentile, save, words

if TYPE_CHECKING:
    import httpx2

KV_MEMORY = "384MiB"
SIDES = ("OneKV", "mlx-lm")
# How mlx_lm.server is started: OneKV is imported first, and with it the BLAS that MLX then loads.
PEER = "from onekv.bench.serve import peer; peer()"
WINDOW_S, SAMPLE_S = 1.0, 0.02
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Memory:
    """Bytes. `pool` is what is allocated for KV whether or not it is used."""

    kv: int
    peak: int
    pool: int


@dataclass(frozen=True)
class Figures:
    """One case on one side: seconds, tokens, bytes."""

    total: float
    first_mean: float
    first_p95: float
    tokens_per_s: float
    generated: float
    prompt_tokens: float
    kv: float
    peak: float
    used: float
    process: float | None


# What is shown of them: name, field, whether more is better.
SHOWN = (
    ("total time, s", "total", False),
    ("first token, mean, s", "first_mean", False),
    ("first token, p95, s", "first_p95", False),
    ("generated tokens/s", "tokens_per_s", True),
    ("memory: KV", "kv", False),
    ("memory: peak", "peak", False),
    ("memory: used", "used", False),
    ("memory: process", "process", False),
)


def run(arguments: argparse.Namespace) -> None:
    from .decode import about

    http()
    results: dict[str, list[dict[str, Figures]]] = {name: [] for name in arguments.case or CASES}
    with tempfile.TemporaryDirectory() as folder:
        weights = _convert(arguments.model, Path(folder))
        bench = _Bench(arguments, Path(folder), weights)
        for number in range(arguments.rounds):
            # Whoever is first in one round is second in the next.
            sides = SIDES if number % 2 == 0 else SIDES[::-1]
            for name, rounds in results.items():
                rounds.append({side: bench.measure(side, name, number + 1) for side in sides})
    print(_table(results))
    if arguments.json:
        how = {name: getattr(arguments, name) for name in ("turns", "clients", "rounds")}
        cases = {name: _summary(rounds) for name, rounds in results.items()}
        text = json.dumps({**about(arguments.model), **how, "kv_memory": KV_MEMORY, "results": cases}, indent=2)
        Path(arguments.json).write_text(text + "\n")


def _convert(model: str, folder: Path) -> int:
    """Save `model` as mlx-lm reads it; gives the bytes of its weights."""
    from ..models import load_model

    print(f"saving {model} in mlx-lm's format ...", file=sys.stderr, flush=True)
    loaded = load_model(model)
    save(folder, loaded.model, dict(loaded.config), loaded.tokenizer)
    return int(json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"])


# The two cases


async def agent(client: "httpx2.AsyncClient", server: ServerProcess, arguments: argparse.Namespace) -> list[Answer]:
    text = random.Random("agent")
    messages: Messages = [{"role": "system", "content": "You are a careful assistant. " + words(text, 1200)}]
    answers = []
    for turn in range(arguments.turns):
        question = f"Result {turn + 1} of the tool: {words(text, 180)} What is the next step?"
        answers.append(await _turn(client, server, messages, question, 30))
    return answers


async def chats(client: "httpx2.AsyncClient", server: ServerProcess, arguments: argparse.Namespace) -> list[Answer]:
    system = "You are a helpful assistant. " + words(random.Random("chats"), 1000)

    async def conversation(number: int) -> list[Answer]:
        text = random.Random(f"chat {number}")
        messages: Messages = [{"role": "system", "content": system}]
        return [
            await _turn(client, server, messages, f"{words(text, 50)} Tell a story about that.", 64) for _ in range(2)
        ]

    conversations = await asyncio.gather(*(conversation(number) for number in range(arguments.clients)))
    return [answer for answers in conversations for answer in answers]


async def _turn(
    client: "httpx2.AsyncClient", server: ServerProcess, messages: Messages, question: str, max_tokens: int
) -> Answer:
    """Ask, and add question and answer to `messages`."""
    messages.append({"role": "user", "content": question})
    answer = await chat(client, server, messages, max_tokens)
    messages.append({"role": "assistant", "content": answer.text})
    return answer


Case = Callable[["httpx2.AsyncClient", ServerProcess, argparse.Namespace], Awaitable[list[Answer]]]
CASES: dict[str, Case] = {"agent": agent, "chats": chats}


# Measuring


class _Bench:
    def __init__(self, arguments: argparse.Namespace, folder: Path, weights: int) -> None:
        self._arguments, self._folder, self._weights = arguments, folder, weights
        # What the first server says to a short prompt; all others must say the same.
        self._expected: str | None = None

    def measure(self, side: str, case: str, number: int) -> Figures:
        """One case on a fresh server."""
        with self._server(side) as (server, memory):
            figures = asyncio.run(self._measure(server, memory, CASES[case]))
        print(
            f"round {number}, {case}, {side}: {figures.total:.1f} s, first token after {figures.first_mean:.2f} s, "
            f"{figures.tokens_per_s:.1f} tokens/s, {figures.prompt_tokens:.0f} prompt tokens, "
            f"{figures.generated:.0f} generated, KV {format_size(figures.kv)}",
            file=sys.stderr,
            flush=True,
        )
        return figures

    @contextmanager
    def _server(self, side: str) -> Iterator[tuple[ServerProcess, Callable[[], Memory]]]:
        """A server, and how to learn what it has used so far."""
        if side == "OneKV":
            with onekv_server(self._arguments.model, "--kv-memory", KV_MEMORY) as server:
                yield server, lambda: _onekv_memory(server)
        else:
            written = self._folder / "memory.json"
            written.unlink(missing_ok=True)
            with mlx_lm_server(PEER, str(written), "--model", str(self._folder), "--log-level", "WARNING") as server:
                yield server, lambda: _mlx_lm_memory(written, self._weights)

    async def _measure(self, server: ServerProcess, memory: Callable[[], Memory], case: Case) -> Figures:
        async with http().AsyncClient(timeout=600) as client:
            await self._check(client, server)
            sampling = asyncio.create_task(_sample(memory))
            begin = time.perf_counter()
            answers = await case(client, server, self._arguments)
            total = time.perf_counter() - begin
            # Once more, with everything at rest.
            await asyncio.sleep(2 * WINDOW_S)
            sampling.cancel()
            most = await sampling
        firsts = [answer.first for answer in answers]
        generated = sum(answer.generated for answer in answers)
        return Figures(
            total,
            statistics.mean(firsts),
            percentile(firsts, 0.95),
            generated / total,
            generated,
            sum(answer.prompt_tokens for answer in answers),
            most.kv,
            most.peak,
            most.peak - most.pool + most.kv if most.pool else most.peak,
            server.resident(),
        )

    async def _check(self, client: "httpx2.AsyncClient", server: ServerProcess) -> None:
        """The greedy answer is everyone's; this also warms the server up."""
        answer = await chat(client, server, [{"role": "user", "content": "Name three colours."}], 16)
        self._expected = self._expected or answer.text
        if answer.text != self._expected:
            raise OneKVError(
                f"the two servers do not run the same model: to a short prompt one answered {self._expected!r}, "
                f"the other {answer.text!r}"
            )


async def _sample(memory: Callable[[], Memory]) -> Memory:
    """The most of each figure, until this is cancelled."""
    most = await asyncio.to_thread(memory)
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(WINDOW_S)
            now = await asyncio.to_thread(memory)
            most = replace(now, kv=max(now.kv, most.kv), peak=max(now.peak, most.peak))
    return most


def _onekv_memory(server: ServerProcess) -> Memory:
    stats = server.get("/admin/cache")
    kv = sum((pool["blocks"] - pool["free"]) * pool["block_bytes"] for pool in stats["pools"])
    memory = stats["memory"]
    return Memory(kv, memory["peak"] - memory["weights"], memory["pool"])


def _mlx_lm_memory(written: Path, weights: int) -> Memory:
    figures = json.loads(written.read_text())
    return Memory(figures["floor"] - weights, figures["peak"] - weights, 0)


def peer() -> None:
    """mlx_lm.server with the rest of the command line; the first argument is a file for what MLX uses."""
    import threading

    from mlx_lm.server import main

    written = Path(sys.argv.pop(1))
    _write_memory(written, 0)
    threading.Thread(target=_watch, args=[written], daemon=True).start()
    main()


def _watch(written: Path) -> None:
    import mlx.core as mx

    highest = 0
    while True:
        floor, end = mx.get_active_memory(), time.monotonic() + WINDOW_S
        while time.monotonic() < end:
            time.sleep(SAMPLE_S)
            floor = min(floor, mx.get_active_memory())
        highest = max(highest, floor)
        _write_memory(written, highest)


def _write_memory(written: Path, floor: int) -> None:
    import mlx.core as mx

    unfinished = written.with_suffix(".new")
    unfinished.write_text(json.dumps({"floor": floor, "peak": mx.get_peak_memory()}))
    unfinished.replace(written)


# Reporting


def _summary(rounds: list[dict[str, Figures]]) -> dict[str, Any]:
    """Medians of both sides, and medians of the rounds' ratios, above 1 where OneKV is better."""
    ours, theirs = ([asdict(each[side]) for each in rounds] for side in SIDES)
    ratios = {}
    for _, field, more_is_better in SHOWN:
        pairs = [(a[field], b[field]) for a, b in zip(ours, theirs, strict=True)]
        if all(a and b for a, b in pairs):
            ratios[field] = statistics.median(a / b if more_is_better else b / a for a, b in pairs)
    return {"onekv": _medians(ours), "mlx_lm": _medians(theirs), "ratio": ratios, "rounds": [ours, theirs]}


def _medians(rounds: list[dict[str, Any]]) -> dict[str, float | None]:
    known = {field: [each[field] for each in rounds if each[field] is not None] for field in rounds[0]}
    return {field: statistics.median(values) if values else None for field, values in known.items()}


def _table(results: dict[str, list[dict[str, Figures]]]) -> str:
    from ..tables import table

    rows = []
    for case, rounds in results.items():
        summary = _summary(rounds)
        for name, field, _ in SHOWN:
            shown = [_shown(name, summary[side][field]) for side in ("onekv", "mlx_lm")]
            ratio = summary["ratio"].get(field)
            rows.append([f"{case}: {name}", *shown, f"{ratio:.2f}x" if ratio is not None else "-"])
    return table(rows, ["", *SIDES, "ratio"])


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return format_size(value) if name.startswith("memory") else f"{value:.2f}"

"""A short request that arrives during a long prompt: OneKV's server compared with mlx_lm.server, over HTTP, in one run.

Both load the same folder: the model as OneKV runs it, in mlx-lm's format. If its context is shorter than the long
prompt, the folder's config claims a sufficient one: the answers are then meaningless, but the cost is the same. Each
side has a fresh server process, with nothing cached; they never run at the same time. A server first answers the short
prompt alone. Then the long one is sent, and some seconds later another short one, while the long one is still being
prefilled. Answers are streamed and greedy; times are measured by the client, from the start of each request.

Meanwhile OneKV's /health is polled for the duration of the engine's current step. This shows when steps began, and how
long the chunk of the long prompt took that was in flight when the short request was sent. The short request's time to
first token is also given as a multiple of that chunk. mlx_lm.server does not report its steps.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OneKVError, SettingError
from .clients import ServerProcess, chat, http, mlx_lm_server, onekv_server, save, words
from .serve import PEER, SIDES

if TYPE_CHECKING:
    import httpx2

TIMEOUT_S = 3600.0
SHORT, GENERATED = 40, 16
LEAST = 1024
# For the template and for answers.
MARGIN = 512
# How often the engine's step is read.
ASK_S = 0.02


@dataclass(frozen=True)
class Met:
    """One side: seconds, and tokens of the prompts."""

    short_alone_first: float
    short_alone_total: float
    short_first: float
    short_total: float
    long_first: float
    long_total: float
    short_prompt: int
    long_prompt: int
    # Of the steps from the one in flight when the short request was sent to the one that gave its first token; none
    # where the server does not tell.
    steps: tuple[float, ...] = ()


# What is shown of them.
SHOWN = (
    ("short alone: first token, s", "short_alone_first"),
    ("short alone: total, s", "short_alone_total"),
    ("short beside long: first token, s", "short_first"),
    ("short beside long: total, s", "short_total"),
    ("long: first token, s", "long_first"),
    ("long: total, s", "long_total"),
)


def run(arguments: argparse.Namespace) -> None:
    from .decode import about

    http()
    if arguments.tokens < LEAST:
        raise SettingError(f"--tokens is {arguments.tokens}; a long prompt has at least {LEAST}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own, context = _convert(arguments.model, folder, arguments.tokens)
        met = {side: _met(side, folder, arguments) for side in SIDES}
    ours, theirs = (met[side] for side in SIDES)
    print(_table(ours, theirs))
    chunk_s = ours.steps[0]
    chunks = ours.short_first / chunk_s
    seconds = ", ".join(f"{step:.2f}" for step in ours.steps)
    size = arguments.prefill_chunk
    print(f"\nOneKV's chunk in flight when the short request came, of up to {size} tokens: {chunk_s:.2f} s")
    print(f"short beside long, first token: {chunks:.2f} of these chunks; steps meanwhile, s: {seconds}")
    if arguments.json:
        how = {"tokens": arguments.tokens, "after_s": arguments.after, "prefill_chunk": arguments.prefill_chunk}
        how |= {"context_of_model": own, "context": context, "chunk_in_flight_s": chunk_s, "short_first_chunks": chunks}
        found = {**about(arguments.model), **how, "onekv": asdict(ours), "mlx_lm": asdict(theirs)}
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


def _convert(model: str, folder: Path, tokens: int) -> tuple[int, int]:
    """Save `model` as both sides read it; gives its context as it was, and as the folder has it."""
    from ..models import load_model

    print(f"saving {model} in mlx-lm's format ...", file=sys.stderr, flush=True)
    loaded = load_model(model)
    config = dict(loaded.config)
    own = int(config.get("max_position_embeddings") or 0)
    # Words may be more tokens than they are counted as.
    config["max_position_embeddings"] = max(own, tokens * 5 // 4 + MARGIN)
    save(folder, loaded.model, config, loaded.tokenizer)
    return own, config["max_position_embeddings"]


def _met(side: str, folder: Path, arguments: argparse.Namespace) -> Met:
    print(f"{side}: a prompt of about {arguments.tokens} tokens ...", file=sys.stderr, flush=True)
    with _server(side, folder, arguments.prefill_chunk) as server:
        return asyncio.run(_measure(server, arguments.tokens, arguments.after, watched=side == SIDES[0]))


@contextmanager
def _server(side: str, folder: Path, prefill_chunk: int) -> Iterator[ServerProcess]:
    if side == SIDES[0]:
        flags = ("--max-batch", "2", "--prefill-chunk", str(prefill_chunk))
        with onekv_server(str(folder), *flags) as server:
            yield server
    else:
        written = str(folder / "memory.json")
        with mlx_lm_server(PEER, written, "--model", str(folder), "--log-level", "WARNING") as server:
            yield server


async def _measure(server: ServerProcess, tokens: int, after: float, watched: bool) -> Met:
    text = random.Random("meet")

    def asked(count: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{words(text, count)} What comes next?"}]

    async with http().AsyncClient(timeout=TIMEOUT_S) as client:
        # The first request also loads and compiles what is used for the first time.
        await chat(client, server, asked(SHORT), GENERATED)
        alone = await chat(client, server, asked(SHORT), GENERATED)
        async with _watched(client, server) if watched else nullcontext(Begins()) as begins:
            long = asyncio.create_task(chat(client, server, asked(tokens), GENERATED))
            await asyncio.sleep(after)
            if long.done():
                raise OneKVError(f"the long prompt was answered within {after} s: raise --tokens or lower --after")
            sent = time.perf_counter()
            short = await chat(client, server, asked(SHORT), GENERATED)
        answer = await long
    if answer.first < after:
        raise OneKVError(f"the long prompt was stored within {after} s: raise --tokens or lower --after")
    return Met(
        alone.first,
        alone.total,
        short.first,
        short.total,
        answer.first,
        answer.total,
        short.prompt_tokens,
        answer.prompt_tokens,
        begins.between(sent, sent + short.first),
    )


class Begins:
    """When steps began, by this process's clock, as a server's answers tell it."""

    def __init__(self) -> None:
        # The earliest and the latest moment of each at which it may have begun.
        self._known: list[tuple[float, float]] = []

    def add(self, asked: float, told: float, age: float) -> None:
        """A server that was asked at one moment, and whose answer was there at another, is in a step of this age."""
        earliest, latest = asked - age, told - age
        if self._known and earliest <= self._known[-1][1]:
            # The same step, or one that looks the same; several answers show its beginning more exactly.
            before = self._known.pop()
            earliest, latest = max(earliest, before[0]), min(latest, before[1])
        self._known.append((earliest, max(earliest, latest)))

    def between(self, begin: float, end: float) -> tuple[float, ...]:
        """Seconds of the steps from the one that was under way at `begin` to that at `end`, which is cut there."""
        begins = [(earliest + latest) / 2 for earliest, latest in self._known]
        first = max((at for at in begins if at <= begin), default=begin)
        places = [*(at for at in begins if first <= at < end), end]
        return tuple(later - earlier for earlier, later in pairwise(places))


@asynccontextmanager
async def _watched(client: "httpx2.AsyncClient", server: ServerProcess) -> AsyncIterator[Begins]:
    """When steps of the server begin while the block runs."""
    begins = Begins()

    async def watch() -> None:
        while True:
            asked = time.perf_counter()
            answer = await client.get(f"{server.url}/health")
            begins.add(asked, time.perf_counter(), answer.json()["engine"]["for_s"])
            await asyncio.sleep(ASK_S)

    watching = asyncio.create_task(watch())
    try:
        yield begins
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def _table(ours: Met, theirs: Met) -> str:
    from ..tables import table

    pairs = [(name, getattr(ours, field), getattr(theirs, field)) for name, field in SHOWN]
    rows = [[name, f"{own:.2f}", f"{other:.2f}", f"{other / own:.2f}x"] for name, own, other in pairs]
    return table(rows, [f"long prompt of {ours.long_prompt} tokens", *SIDES, "ratio"])

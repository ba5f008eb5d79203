"""A day in the life of a server with more models than fit: what must never happen does not, and its cost is reported.

Four small models with random weights: `a` is pinned, either `b` or `c` fits in addition, `d` can never be loaded.
Clients hold conversations with all of them, in random order, whose prompts grow from turn to turn; some close the
connection in the middle of an answer. The server runs in this process, so that its memory can be sampled every 10 ms.
The run fails on

    an answer that was cut off, or whose tokens differ from those of the model on its own
    a request for `d` that is not rejected with the numbers
    more bytes counted, more of MLX's memory in use, or a larger process, than --memory
    a conversation that continues after its model was unloaded and reloaded, with less than 95 % of its tokens cached
    after the last model was unloaded: MLX memory that is still in use, or a footprint of the process that is more than
    5 % larger than before the first load

"Before the first load" means after a warm-up in which each model has answered once, so that libraries are imported and
loops are compiled.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..units import format_size
from .clients import LOCAL, http
from .soak import save_tiny

if TYPE_CHECKING:
    import httpx2

    from ..server.models.registry import Models

NAMES, REFUSED = "abc", "d"
CONVERSATIONS, TURNS, TURN_TOKENS, GENERATED = 4, 6, 96, 12
VOCABULARY = 40_000
CANCELLED = 0.15
LEAST_CACHED = 0.95
# What models leave behind: odds and ends in MLX's memory, no weights and no pool; and of the process's footprint.
LEFT, MOST_GROWTH = 2**20, 0.05
SAMPLE_S = 0.01
TIMEOUT_S = 600.0


def run(arguments: argparse.Namespace) -> int:
    """1 if anything was wrong."""
    report = day(arguments.requests, arguments.clients, arguments.seed, progress=True)
    print(report.text())
    for problem in report.wrong:
        print(f"wrong: {problem}", file=sys.stderr)
    if arguments.json:
        from .decode import about

        Path(arguments.json).write_text(json.dumps({**about("tiny"), **vars(report)}, indent=2) + "\n")
    return 1 if report.wrong else 0


@dataclass
class Report:
    requests: int
    clients: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    # Turns of conversations whose model had been unloaded since the one before, and the least share that was cached.
    resumed: int = 0
    least_cached: float = 1.0
    # Bytes.
    limit: int = 0
    counted: int = 0
    active: int = 0
    process: int = 0
    active_left: int = 0
    footprint_before: int = 0
    footprint_after: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def footprint_growth(self) -> float:
        return self.footprint_after / self.footprint_before - 1

    def text(self) -> str:
        outcomes = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(self.outcomes.items()))
        loads = ", ".join(f"{name} {count}" for name, count in sorted(self.loads.items()))
        rows = {
            "requests": f"{self.requests} of {self.clients} clients in {self.seconds:.0f} s; {outcomes}",
            "loads": f"{loads}; one every {self.seconds / max(1, self.loads.total()):.1f} s",
            "resumed after a swap": f"{self.resumed} turns, at least {self.least_cached:.1%} cached",
            "--memory": format_size(self.limit),
            "counted, at most": format_size(self.counted),
            "MLX in use, at most": f"{format_size(self.active)}; after the last unload {format_size(self.active_left)}",
            "process": f"at most {format_size(self.process)}; {format_size(self.footprint_before)} before, "
            f"{format_size(self.footprint_after)} after ({self.footprint_growth:+.1%})",
            "wrong": str(len(self.wrong)),
        }
        return "\n".join(f"{name:<22}{value}" for name, value in rows.items())


def day(requests: int, clients: int, seed: int = 0, progress: bool = False) -> Report:
    from ..footprint import footprint

    http()
    report = Report(requests, clients)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: save_tiny(Path(folder) / name, number) for number, name in enumerate(NAMES + REFUSED)}
        models = _models(paths, Path(folder) / "disk", report)
        models.start()
        with _served(models) as url:
            _warm_up(url)
            _unload_all(models)
            report.loads.clear()
            before, report.footprint_before = _active(), footprint()
            script = _Script(url, models, report, seed)
            with _watched(models, report, before):
                begin = time.perf_counter()
                asyncio.run(script.run(progress))
                report.seconds = time.perf_counter() - begin
            _unload_all(models)
            report.active_left, report.footprint_after = _active() - before, footprint()
        _check_memory(report)
        script.check_answers({name: paths[name] for name in NAMES})
    return report


def _models(paths: dict[str, str], disk: Path, report: Report) -> "Models":
    from ..config import Settings
    from ..memory.plan import MARGIN
    from ..server.hygiene import Hygiene
    from ..server.model_settings import ModelSettings
    from ..server.models.planning import plan_model
    from ..server.models.registry import Models
    from ..server.models.spec import ModelSpec

    common: dict[str, Any] = {"kv_memory": "96MiB", "block_size": 16, "disk_cache": str(disk), "disk_limit": "1GB"}

    def spec(name: str) -> ModelSpec:
        engine = Settings(**common if name != REFUSED else {**common, "kv_memory": report.limit})
        return ModelSpec(name, paths[name], engine, ModelSettings(), "pinned" if name == "a" else "lru")

    need = plan_model(spec("a"), 2**33).need
    report.limit = MARGIN + 2 * need + need // 2
    shared = {"max_waiting": report.clients, "max_wait": TIMEOUT_S, "hygiene": Hygiene(), "progress": False}
    specs = [spec(name) for name in paths]
    return Models(specs, report.limit, shared, lambda backend: report.loads.update([backend.name]))


@contextmanager
def _served(models: "Models") -> Iterator[str]:
    """The server on a free port, in a thread; all models are stopped at the end."""
    import socket

    from ..server.connections import Limits
    from ..server.serve import make_server
    from ..server.settings import ServerSettings

    server = make_server(models, ServerSettings(grace=0), Limits(None, 60))
    listener = socket.create_server((LOCAL, 0))
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(SAMPLE_S)
    try:
        yield f"http://{LOCAL}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def _watched(models: "Models", report: Report, before: int) -> Iterator[None]:
    import mlx.core as mx

    from ..footprint import footprint

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            report.counted = max(report.counted, models.counted)
            report.active = max(report.active, mx.get_active_memory() - before)
            report.process = max(report.process, footprint())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _check_memory(report: Report) -> None:
    for what in ("counted", "active", "process"):
        if getattr(report, what) > report.limit:
            report.wrong.append(f"{what} bytes were {getattr(report, what)}, --memory is {report.limit}")
    if report.active_left > LEFT:
        report.wrong.append(f"{report.active_left} bytes of MLX's are in use after the last model was unloaded")
    if report.footprint_growth > MOST_GROWTH:
        report.wrong.append(f"the process is {report.footprint_growth:.1%} larger after the last unload")


def _warm_up(url: str) -> None:
    """Every model answers once: imports, compiled loops, and what libraries make once."""
    for name in NAMES:
        http().post(f"{url}/v1/completions", json=_body(name, list(range(TURN_TOKENS))), timeout=TIMEOUT_S)


def _body(model: str, prompt: list[int]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": GENERATED, "temperature": 0, "ignore_eos": True}


def _unload_all(models: "Models") -> None:
    while any(model.uses for model in models.models):
        time.sleep(SAMPLE_S)
    for model in models.models:
        models.unload(model)


def _active() -> int:
    import mlx.core as mx

    from ..server.models.freeing import give_back

    give_back()
    return mx.get_active_memory()


@dataclass
class _Conversation:
    """Its tokens follow from `seed`. What is written down of the answers is small: the server's memory is measured in
    this process.
    """

    model: str
    seed: int
    turn: int = 0
    # Tokens of the longest prompt that was answered, and which load of the model that was.
    answered: int = 0
    load: int = 0

    def prompt(self) -> list[int]:
        draw = random.Random(self.seed)
        return [draw.randrange(100, VOCABULARY) for _ in range((self.turn + 1) * TURN_TOKENS)]


class _Script:
    def __init__(self, url: str, models: "Models", report: Report, seed: int) -> None:
        self._url, self._models, self._report = url, models, report
        self._random = random.Random(seed)
        self._left = report.requests
        # Conversations without a request in flight: one is left for each client.
        count = max(CONVERSATIONS, math.ceil(report.clients / len(NAMES)))
        self._idle = [self._conversation(name) for name in NAMES for _ in range(count)]
        # What was answered in which turn of which conversation: its model and seed.
        self._texts: dict[tuple[str, int, int], set[str]] = {}

    def _conversation(self, model: str) -> _Conversation:
        return _Conversation(model, self._random.getrandbits(32))

    async def run(self, progress: bool) -> None:
        with tqdm(total=self._left, unit=" requests", disable=not progress) as bar:
            async with http().AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as client:
                await asyncio.gather(*(self._client(client, bar) for _ in range(self._report.clients)))

    async def _client(self, client: "httpx2.AsyncClient", bar: Any) -> None:
        while self._left > 0:
            self._left -= 1
            if self._random.random() < 0.05:
                await self._refused(client)
            else:
                conversation = self._idle.pop(self._random.randrange(len(self._idle)))
                await self._turn(client, conversation)
                ended = conversation.turn == TURNS
                self._idle.append(self._conversation(conversation.model) if ended else conversation)
            bar.update()

    async def _refused(self, client: "httpx2.AsyncClient") -> None:
        answer = await client.post("/v1/completions", json=_body(REFUSED, [1, 2, 3]))
        good = answer.status_code == 503 and f"--memory is {format_size(self._report.limit)}" in answer.text
        self._outcome("refused" if good else "wrong", f"{REFUSED}: {answer.status_code} {answer.text[:300]}")

    async def _turn(self, client: "httpx2.AsyncClient", conversation: _Conversation) -> None:
        model, prompt = conversation.model, conversation.prompt()
        body = _body(model, prompt)
        if self._random.random() < CANCELLED:
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                line = await anext(aiter(answer.aiter_lines()), "")
            good = answer.status_code == 200 and (line.startswith(":") or '"choices"' in line)
            self._outcome("closed" if good else "wrong", f"{model}: {answer.status_code} {line[:300]}")
            return
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            self._outcome("wrong", f"{model}: {answer.status_code} {answer.text[:300]}")
            return
        said = answer.json()
        if said["usage"]["completion_tokens"] != GENERATED:
            self._outcome("wrong", f"{model}: cut off after {said['usage']['completion_tokens']} tokens")
            return
        self._outcome("answered")
        self._texts.setdefault((model, conversation.seed, conversation.turn), set()).add(said["choices"][0]["text"])
        self._check_cached(conversation, len(prompt), said["usage"]["prompt_tokens_details"]["cached_tokens"])
        conversation.answered, conversation.load = len(prompt), self._report.loads[model]
        conversation.turn += 1

    def _check_cached(self, conversation: _Conversation, prompt: int, cached: int) -> None:
        if not conversation.answered or conversation.load == self._report.loads[conversation.model]:
            return
        share = min(1.0, cached / min(conversation.answered, prompt - 1))
        self._report.resumed += 1
        self._report.least_cached = min(self._report.least_cached, share)
        if share < LEAST_CACHED:
            self._report.wrong.append(
                f"{conversation.model}: {share:.1%} of {conversation.answered} tokens were cached"
            )

    def _outcome(self, outcome: str, problem: str = "") -> None:
        self._report.outcomes[outcome] += 1
        if outcome == "wrong":
            self._report.wrong.append(problem)

    def check_answers(self, paths: dict[str, str]) -> None:
        """Against each model alone, with nothing cached."""
        from ..llm import LLM

        for name, path in paths.items():
            with LLM(path, kv_memory="96MiB", block_size=16, prefix_cache=False, progress=False) as llm:
                for (model, seed, turn), texts in self._texts.items():
                    if model == name:
                        prompt = _Conversation(model, seed, turn).prompt()
                        alone = llm.generate(prompt, GENERATED, ignore_eos=True).text
                        if texts != {alone}:
                            self._report.wrong.append(f"{name}: {sorted(texts)} where it says {alone!r} alone")
